"""The memory of the journal: boundary rows, copied between the arenas and blocks of one page each.

Knows bytes, neither sequences nor steps.  Memory is taken from the system when a block is first written.
Invariant: never more than ``Placement.journal_bytes``.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lucevisor.engine.journal import RowCopy
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.placement.result import Placement
from lucevisor.protocol.arena import Arena


class JournalRows:
    """``arenas``: by boundary, all with rows of ``row_bytes``.  ``n_pages``: blocks that fit into ``n_bytes``."""

    def __init__(self, arenas: Mapping[int, Arena], row_bytes: int, n_bytes: int) -> None:
        self.n_pages = n_bytes // (PAGE_TOKENS * row_bytes)
        memory = mmap.mmap(-1, self.n_pages * PAGE_TOKENS * row_bytes)
        self._blocks = np.frombuffer(memory, dtype=np.uint8).reshape(-1, PAGE_TOKENS, row_bytes)
        self._regions = {
            (boundary, region): _rows(arena.region(region), row_bytes)
            for boundary, arena in arenas.items()
            for region in range(arena.plan.n_regions)
        }

    def file(self, boundary: int, region: int, copies: Sequence[RowCopy]) -> None:
        """Copy rows of a step from its region."""
        rows = self._regions[boundary, region]
        for block, offset, row, n in copies:
            self._blocks[block, offset : offset + n] = rows[row : row + n]

    def place(self, boundary: int, region: int, copies: Sequence[RowCopy]) -> None:
        """Copy rows into a step's region."""
        rows = self._regions[boundary, region]
        for block, offset, row, n in copies:
            rows[row : row + n] = self._blocks[block, offset : offset + n]

    def copy(self, source: int, target: int, n_rows: int) -> None:
        """Copy the first rows of a block to another."""
        self._blocks[target, :n_rows] = self._blocks[source, :n_rows]


def _rows(region: memoryview, row_bytes: int) -> npt.NDArray[np.uint8]:
    found = np.frombuffer(region, dtype=np.uint8)
    return found[: len(found) // row_bytes * row_bytes].reshape(-1, row_bytes)


def journal_rows(buffers: Mapping[tuple[bool, int], Arena], placement: Placement) -> JournalRows | None:
    """Return the journal's memory for a placement; None without a journal."""
    if not placement.journal_bytes:
        return None
    arenas = {boundary: arena for (capture, boundary), arena in buffers.items() if not capture}
    row_bytes = arenas[0].plan.region_bytes // placement.max_step_tokens
    return JournalRows(arenas, row_bytes, placement.journal_bytes)
