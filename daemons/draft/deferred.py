"""Rows of plain decodes that the drafter's context lacks: they are added together, once something needs them.

While nothing is drafted, a drafter that extends its context by one row a step launches as much as for sixty.  Knows
neither drafter nor pages.  Invariant: the rows of a sequence have consecutive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from lucevisor.protocol.steps import Operation, SetPages, Slice

MAX_ROWS: Final = 64
"""Rows of a sequence that wait at most: a pass over so many takes hardly longer than one over a single row."""
MAX_ROWS_OF_ALL: Final = 512
"""The same of all sequences: on a GPU a pass over 64 to 512 rows takes about as long, and steps of many sequences
would have one every few steps."""


class DeferredRows:
    """The rows that wait, by sequence; ``most`` of all sequences."""

    def __init__(self, most: int = MAX_ROWS_OF_ALL) -> None:
        self.n_rows, self._most = 0, most
        self._slices: dict[int, list[Slice]] = {}
        self._features: dict[int, list[Tensor]] = {}

    def allows(self, operations: Sequence[Operation]) -> bool:
        """Whether operations may run before the waiting rows are added: they only give sequences more pages."""
        return not self.n_rows or all(isinstance(operation, SetPages) for operation in operations)

    def accepts(self, slices: Sequence[Slice]) -> bool:
        """Whether the rows of a step that asks for no drafts may wait: one of each sequence, behind those that do."""
        if self.n_rows + len(slices) > self._most:
            return False
        for s in slices:
            before = self._slices.get(s.sequence)
            if len(s.tokens) != 1 or s.states:
                return False
            if before and (before[-1].start + 1 != s.start or len(before) == MAX_ROWS):
                return False
        return True

    def add(self, slices: Sequence[Slice], features: Tensor) -> None:
        """Let a row of each slice wait; ``features`` [B, n E] are copied."""
        for s, row in zip(slices, features.clone(), strict=True):
            self._slices.setdefault(s.sequence, []).append(s)
            self._features.setdefault(s.sequence, []).append(row)
        self.n_rows += len(slices)

    def pop_all(self) -> tuple[list[Slice], Tensor]:
        """Return all rows as one slice of each sequence, and their features [T, n E]; none waits any more."""
        slices = [
            msgspec.structs.replace(parts[-1], start=parts[0].start, tokens=[s.tokens[0] for s in parts])
            for parts in self._slices.values()
        ]
        features = torch.stack([row for rows in self._features.values() for row in rows])
        self.clear()
        return slices, features

    def clear(self) -> None:
        """Forget all rows."""
        self.n_rows = 0
        self._slices.clear()
        self._features.clear()
