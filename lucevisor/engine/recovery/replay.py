"""What lost stages have computed, for their new daemons to compute again while they load their weights.

Knows plans of a rebuild and where their rows lie; the caller hands both to the daemons.
Invariant: a replay is the rebuild that ``StageRecovery.restore`` would begin, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lucevisor.engine.changes import Changes
from lucevisor.engine.recovery.rebuild import CannotRebuild, RebuildPlan
from lucevisor.engine.recovery.stages import StageRecovery
from lucevisor.protocol.loading import StageReplay

MAX_REPLAY_TOKENS: Final = 1 << 17
"""Longer replays wait until the weights are loaded: the message and the rows would be too large."""


@dataclass(frozen=True, slots=True)
class StateReplay:
    """The steps of each lost stage, and the ``file`` of their boundary rows, a descriptor.  Rows are still being
    written to it; it is sealed behind the last one.
    """

    stages: Sequence[StageReplay]
    file: int


class StageReplays:
    """Replays of the stages that ``recovery`` is to bring back."""

    def __init__(self, recovery: StageRecovery, changes: Changes, clock: Callable[[], float]) -> None:
        self._recovery, self._changes, self._clock = recovery, changes, clock

    async def make(self, stages: Collection[int], timeout_s: float) -> StateReplay | None:
        """Return what lost stages have computed; None if steps are on their way to other stages for longer, it is too
        much, or impossible: then ``restore`` does that.

        The caller closes the file.  It holds until another stage is lost.
        """
        plans: dict[int, RebuildPlan] = {}

        def prepared() -> bool:
            found = self._recovery.prepare(stages, self._clock())
            plans.update(found or {})
            return found is not None

        try:
            if not await self._changes.holds_within(prepared, timeout_s):
                return None
        except CannotRebuild:
            return None
        if not 0 < sum(plan.n_tokens for plan in plans.values()) <= MAX_REPLAY_TOKENS:
            return None
        replays, n_rows = [], 0
        for stage, plan in plans.items():
            replays.append(StageReplay(stage, [one.step for one in plan.steps], n_rows))
            n_rows += sum(copy.n for one in plan.steps for copy in one.rows)
        try:
            return StateReplay(replays, self._recovery.gather(plans.values()))
        except OSError:
            return None
