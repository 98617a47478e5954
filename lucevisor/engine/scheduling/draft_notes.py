"""What drafts took, told to policy and statistics when no stage waits for it: that takes as long as to apply a result.

Pure.  Invariant: drafts are learned in the order of their steps, and before the step that verifies them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.engine.drafting.controller import SpecDecodeController
from lucevisor.engine.drafting.statistics import DraftStatistics, StepShare
from lucevisor.engine.step import ScheduledStep, all_decodes
from lucevisor.protocol.steps import Drafted, StepResult


class DraftNotes:
    """The drafts behind one step, until they are learned."""

    def __init__(self, statistics: DraftStatistics) -> None:
        self._statistics = statistics
        self._noted: tuple[ScheduledStep, Mapping[int, Drafted], StepResult] | None = None

    def note(self, step: ScheduledStep, drafts: Mapping[int, Drafted], result: StepResult) -> None:
        """Note the answer of the draft stage to a step.  Those before it have been learned."""
        assert self._noted is None
        self._noted = step, drafts, result

    def learn(self, policy: SpecDecodeController) -> None:
        """Tell what was noted, if there is something."""
        if self._noted is None:
            return
        (step, drafts, result), self._noted = self._noted, None
        self._count(step, drafts, result.compute_s)
        pieces = [part.slice for part in step.parts.values()]
        if not pieces or not all_decodes(pieces):
            return
        if n_asked := sum(piece.n_ahead > 0 for piece in pieces):
            policy.measured_draft(n_asked, step.n_ahead, result.compute_s, cold=result.cold)
        else:
            policy.measured_upkeep(result.compute_s)

    def _count(self, step: ScheduledStep, drafts: Mapping[int, Drafted], seconds: float) -> None:
        shares, n_drafted = [], []
        for sequence, part in step.parts.items():
            n_rows = len(part.slice.tokens) + part.slice.n_ahead
            shares.append(StepShare(part.origin, n_rows, n_rows if part.slice.n_ahead else 0))
            n_drafted.append(len(drafts[sequence].tokens) if sequence in drafts else 0)
        self._statistics.drafted(shares, n_drafted, seconds)
