"""What a step has for some stages alone: slices that the others skip, over rows that the journal has.

Pure.  Lost stages compute again what they had of a prefix slot, in steps that pass all stages in order like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lucevisor.engine.journal import RowCopy
from lucevisor.protocol.steps import Operation, Slice


@dataclass(frozen=True, slots=True)
class LoneWork:
    """``operations`` behind those of the step, and ``slices``, for ``stages``.  ``rows``: where the rows lie that they
    read, by boundary.
    """

    stages: frozenset[int]
    operations: Sequence[Operation]
    slices: Sequence[Slice]
    rows: Mapping[int, Sequence[RowCopy]]

    @property
    def n_tokens(self) -> int:
        """Tokens of its slices, once for each stage."""
        return len(self.stages) * sum(len(piece.tokens) for piece in self.slices)

    def without(self, lost: Collection[int]) -> LoneWork:
        """Return it without the part of stages that are lost, which know nothing of it when they are back."""
        stages = self.stages.difference(lost)
        return replace(self, stages=stages, rows={at: rows for at, rows in self.rows.items() if at + 1 in stages})
