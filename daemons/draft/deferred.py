"""Rows of plain decodes that the drafter's context still lacks; they are added together when something needs them.

While nothing is drafted, adding one row per step would launch as many kernels as adding sixty at once.
Invariant: the rows of a sequence have consecutive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from lucevisor.protocol.steps import Operation, SetPages, Slice

MAX_ROWS: Final = 64
"""Pending rows of one sequence: a pass over this many takes hardly longer than one over a single row."""
MAX_ROWS_OF_ALL: Final = 512
"""Pending rows of all sequences: on a GPU a pass over 64 to 512 rows takes about the same time, and with many sequences
a lower bound would cause a pass every few steps."""


class DeferredRows:
    """The pending rows by sequence, at most ``max_rows`` in all."""

    def __init__(self, max_rows: int = MAX_ROWS_OF_ALL) -> None:
        self.n_rows, self._max_rows = 0, max_rows
        self._slices: dict[int, list[Slice]] = {}
        self._features: dict[int, list[Tensor]] = {}

    def allows(self, operations: Sequence[Operation]) -> bool:
        """Return whether operations may run before the pending rows are added, as they only add pages to sequences."""
        return not self.n_rows or all(isinstance(operation, SetPages) for operation in operations)

    def accepts(self, slices: Sequence[Slice]) -> bool:
        """Return whether the rows of a step may be deferred: one per sequence, following its pending ones."""
        if self.n_rows + len(slices) > self._max_rows:
            return False
        for s in slices:
            before = self._slices.get(s.sequence)
            if len(s.tokens) != 1 or s.states:
                return False
            if before and (before[-1].start + 1 != s.start or len(before) == MAX_ROWS):
                return False
        return True

    def add(self, slices: Sequence[Slice], features: Tensor) -> None:
        """Defer a row of each slice; ``features`` [B, n E] are copied."""
        for s, row in zip(slices, features.clone(), strict=True):
            self._slices.setdefault(s.sequence, []).append(s)
            self._features.setdefault(s.sequence, []).append(row)
        self.n_rows += len(slices)

    def pop_all(self) -> tuple[list[Slice], Tensor]:
        """Remove all rows and return them as one slice per sequence, with their features [T, n E]."""
        slices = [
            msgspec.structs.replace(parts[-1], start=parts[0].start, tokens=[s.tokens[0] for s in parts])
            for parts in self._slices.values()
        ]
        features = torch.stack([row for rows in self._features.values() for row in rows])
        self.clear()
        return slices, features

    def clear(self) -> None:
        """Drop all rows."""
        self.n_rows = 0
        self._slices.clear()
        self._features.clear()
