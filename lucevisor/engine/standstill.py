"""Brings an engine to rest for an operator: nothing is planned, and the state of all stages can be moved.

A base class of the engine (core.py), which sets the attributes declared here.  Knows ids; its caller moves their bytes.
Invariant: what a FrozenState names keeps its bytes in every daemon that lives on, until steps are planned again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lucevisor import awake
from lucevisor.engine.journal import RowStore, make_journal
from lucevisor.engine.pipeline.pipeline import Pipeline
from lucevisor.engine.recovery.rebuild import CannotRebuild, RebuildPlan
from lucevisor.engine.recovery.recovery import PauseReason, Recovery
from lucevisor.engine.recovery.stages import StageRecovery
from lucevisor.engine.request import RequestError
from lucevisor.engine.scheduling.scheduler import Scheduler
from lucevisor.engine.scheduling.state import Events
from lucevisor.engine.sequence import RequestRecord, page_operations
from lucevisor.model.values import Space
from lucevisor.protocol.loading import StageReplay
from lucevisor.protocol.steps import OpenSequence, Operation

MAX_REPLAY_TOKENS: Final = 1 << 17
"""Longer replays wait until the weights are loaded: the message and the rows would be too large."""


@dataclass(frozen=True, slots=True)
class FrozenState:
    """All state that sequences and prefix slots have in the shards, between two steps.

    ``units``: the pages and states in use, by space.  ``opening``: what opens the running sequences over them in a
    daemon that has these units.  ``n_tokens``: of these sequences.
    """

    units: Mapping[Space, Sequence[int]]
    opening: Sequence[Operation]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StateReplay:
    """What lost stages have computed: the steps of each, and the ``file`` of their boundary rows, a descriptor.  Rows
    are still being written to it; it is sealed behind the last one.
    """

    stages: Sequence[StageReplay]
    file: int


class Standstill(ABC):
    """The engine's side of orderly stops."""

    _scheduler: Scheduler
    _pipeline: Pipeline | None
    _changed: asyncio.Event
    _clock: Callable[[], float]
    _stages: StageRecovery
    _paused: bool
    _unavailable: str
    _refusal: str
    recovery: Recovery

    def thaw(self) -> None:
        """Plan again after a freeze.  Does nothing if the freeze has ended already."""
        if self._paused and self._pipeline is not None and not self._stages.active:
            self._paused = False
            self.recovery.end(self._clock())
            self._proceed([])

    def part(self, error: RequestError, rows: RowStore | None, journal_pages: int) -> None:
        """Leave the pipeline after a freeze; the next one may have what was frozen (``attach``).

        ``error``: says meanwhile why requests are not served.  ``rows``, ``journal_pages``: the memory of the journal
        over the next pipeline's boundaries.
        """
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._scheduler.detach_drafter()
        self._scheduler.reuse.index.drop_partial()  # stages are others then
        opening, n_tokens = self._stages.opening or (), self._stages.n_frozen
        self._stages = StageRecovery(self._scheduler, make_journal(rows, self._scheduler.pools, journal_pages))
        self._stages.freeze(opening, n_tokens)
        self._unavailable = error.message

    async def freeze(self, timeout_s: float, reason: PauseReason = "restart") -> FrozenState | None:
        """Plan no step until lost stages are there again or a pipeline is attached, and wait until those on their way
        are done; requests are held meanwhile.

        Returns what the shards hold then, which :meth:`restore` or ``attach`` may be told to be kept.  None if it took
        longer, or the pipeline was lost.
        """
        self._paused = True
        self._scheduler.end_refill()
        self.recovery.begin(self._clock(), reason)
        at_rest = await self._wait(lambda: not self._paused or self._pipeline is None or self._flush(), timeout_s)
        if not at_rest or not self._paused or self._pipeline is None:
            return None
        scheduler, pools = self._scheduler, self._scheduler.pools
        frozen = FrozenState(pools.in_use(), opening_of(scheduler.running), _n_tokens(scheduler.running))
        self._stages.freeze(frozen.opening, frozen.n_tokens)
        return frozen

    def _flush(self) -> bool:
        """Send what waits for a step; return whether every daemon has done all that was decided."""
        if self._pipeline is None or self._stages.active or self._scheduler.n_in_flight or not self._pipeline.settled:
            return False
        plan = self._scheduler.cut(self._clock())
        if plan is not None:
            self._stages.planned(plan, {})
            self._pipeline.submit(plan.step, opening=plan.opening)
        return plan is None

    async def replay(self, stages: Collection[int], timeout_s: float) -> StateReplay | None:
        """Return what lost stages have computed, for their new daemons to compute while they load; None if steps are on
        their way to other stages for longer, it is too much, or impossible: then ``restore`` does that.

        The caller closes the file.  It holds until another stage is lost.
        """
        plans: dict[int, RebuildPlan] = {}

        def prepared() -> bool:
            found = self._stages.prepare(stages, self._clock())
            plans.update(found or {})
            return found is not None

        try:
            if not await self._wait(prepared, timeout_s):
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
            return StateReplay(replays, self._stages.gather(plans.values()))
        except OSError:
            return None

    async def quiesce(self, timeout_s: float) -> bool:
        """Start no queued request until the next attach; return whether the running ones ended in time.

        For the orderly restart of a group without holds: new requests are still accepted, and wait.
        """
        self._scheduler.admission.open = False
        return await self._wait(lambda: self._scheduler.n_running == 0 and self._scheduler.n_in_flight == 0, timeout_s)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; return whether all accepted ones ended in time."""
        self._refusal = self._refusal or "the server is shutting down"
        return await self._wait(lambda: self._scheduler.idle, timeout_s)

    async def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with awake.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @abstractmethod
    def _proceed(self, events: Events) -> None:
        """Send the steps that have become possible, then deliver events."""


def opening_of(running: Iterable[RequestRecord]) -> list[Operation]:
    """Return what opens running sequences, none of which has a step in flight, over the pages and states they have."""
    operations: list[Operation] = []
    for record in running:
        if (live := record.live) is None:
            continue
        sampling = record.request.sampling
        history = [*record.tokens[: live.n_computed]] if sampling.needs_history else []
        operations.append(OpenSequence(live.sequence, live.state, sampling, history, record.mu))
        for growth in live.table.growths():
            operations += page_operations(live.sequence, growth)
    return operations


def _n_tokens(running: Iterable[RequestRecord]) -> int:
    return sum(record.live.n_computed for record in running if record.live is not None)
