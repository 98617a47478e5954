"""Brings an engine to rest for an operator, between two steps, so that the state of all stages can be moved.

Like the kernel's cgroup freezer: ``freeze``, then ``thaw``, or other daemons that go on.  Knows ids; its caller moves
their bytes.
Invariant: what a FrozenState names keeps its bytes in every daemon that lives on, until steps are planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lucevisor.engine.changes import Changes
from lucevisor.engine.pipeline import Pipeline
from lucevisor.engine.recovery import PauseReason, Recovery, StageRecovery
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import RequestRecord, page_operations
from lucevisor.model.values import Space
from lucevisor.protocol.steps import OpenSequence, Operation


@dataclass(frozen=True, slots=True)
class FrozenState:
    """All state that sequences and prefix slots have in the shards, between two steps.

    ``units``: the pages and states in use, by space.  ``opening``: what opens the running sequences over them in a
    daemon that has these units.  ``n_tokens``: of these sequences.
    """

    units: Mapping[Space, Sequence[int]]
    opening: Sequence[Operation]
    n_tokens: int


class Freezer:
    """Freezes an engine.  ``stages`` and ``recovery`` hear of it, as of a loss that is announced.

    ``pipeline``: the one attached now.  ``proceed`` sends the steps that have become possible.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stages: StageRecovery,
        recovery: Recovery,
        changes: Changes,
        clock: Callable[[], float],
        *,
        pipeline: Callable[[], Pipeline | None],
        proceed: Callable[[], None],
    ) -> None:
        self._scheduler, self._stages, self._recovery = scheduler, stages, recovery
        self._changes, self._clock = changes, clock
        self._pipeline, self._proceed = pipeline, proceed
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether no step is planned because of ``freeze``."""
        return self._paused

    async def freeze(self, timeout_s: float, reason: PauseReason = "restart") -> FrozenState | None:
        """Plan no step until lost stages are there again or a pipeline is attached, and wait until those on their way
        are done; requests are held meanwhile.

        Returns what the shards hold then, which the engine's ``restore`` or ``attach`` may be told to be kept.  None if
        it took longer, or the pipeline was lost.
        """
        self._paused = True
        self._recovery.begin(self._clock(), reason)
        at_rest = await self._changes.holds_within(
            lambda: not self._paused or self._pipeline() is None or self._flush(), timeout_s
        )
        if not at_rest or not self._paused or self._pipeline() is None:
            return None
        scheduler, pools = self._scheduler, self._scheduler.pools
        frozen = FrozenState(pools.in_use(), opening_of(scheduler.running), _n_tokens(scheduler.running))
        self._stages.freeze(frozen.opening, frozen.n_tokens)
        return frozen

    def thaw(self) -> None:
        """Plan again after a freeze.  Does nothing if the freeze has ended already."""
        if self._paused and self._pipeline() is not None and not self._stages.active:
            self.end()
            self._proceed()

    def end(self) -> None:
        """The pipeline is whole: steps are planned again, after a freeze or a loss."""
        self._paused = False
        self._recovery.end(self._clock())

    async def quiesce(self, timeout_s: float) -> bool:
        """Start no queued request until the next attach; return whether the running ones ended in time.

        For the orderly restart of a group without holds: new requests are still accepted, and wait.
        """
        scheduler = self._scheduler
        scheduler.admission.open = False
        return await self._changes.holds_within(
            lambda: scheduler.n_running == 0 and scheduler.n_in_flight == 0, timeout_s
        )

    def _flush(self) -> bool:
        """Send what waits for a step; return whether every daemon has done all that was decided."""
        pipeline = self._pipeline()
        if pipeline is None or self._stages.active or self._scheduler.n_in_flight or not pipeline.settled:
            return False
        plan = self._scheduler.cut(self._clock())
        if plan is not None:
            self._stages.planned(plan, {})
            pipeline.submit(plan.step, opening=plan.opening)
        return plan is None


def opening_of(running: Iterable[RequestRecord]) -> list[Operation]:
    """Return what opens running sequences, none of which has a step in flight, over the pages and states they have."""
    operations: list[Operation] = []
    for record in running:
        if (live := record.live) is None:
            continue
        sampling = record.request.sampling
        history = [*record.tokens[: live.n_computed]] if sampling.needs_history else []
        n_prompt = len(record.request.prompt)
        operations.append(OpenSequence(live.sequence, live.state, sampling, history, record.mu, n_prompt))
        for growth in live.table.growths():
            operations += page_operations(live.sequence, growth)
    return operations


def _n_tokens(running: Iterable[RequestRecord]) -> int:
    return sum(record.live.n_computed for record in running if record.live is not None)
