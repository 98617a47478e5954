"""The engine: the asyncio shell of the core. One thread, no task of its own.

Invariants: a request that ``submit`` returned gets exactly one FinishedEvent; instructions are carried out in the order
in which the core gave them, whatever their effects call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any, ClassVar, Protocol

import structlog

from lucevisor import suspend_clock
from lucevisor.engine import events as ev
from lucevisor.engine.constraint import MaskMaker
from lucevisor.engine.core import CoreSettings, EngineCore, FrozenState
from lucevisor.engine.events import EngineState, PauseReason
from lucevisor.engine.journal import CopyRows, FileRows, PlaceRows, RowCopy
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.output_rows import IdsOutput, RowCollector, RowsMissing
from lucevisor.engine.page_ranking import PageRelevance
from lucevisor.engine.pipeline import (
    NO_PAYLOAD,
    OldestStep,
    PipelineResult,
    SendCancelPending,
    SendFrame,
    SendMasks,
    StageFailure,
)
from lucevisor.engine.recovery import CannotRebuild
from lucevisor.engine.request import (
    FinishedEvent,
    GenerationRequest,
    RequestError,
    RequestHandle,
    RequestState,
)
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.statistics import EngineStatistics
from lucevisor.errors import LucevisorError
from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.prefix_cache import PrefixIndex, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import KvGroup
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.loading import StageReplay
from lucevisor.protocol.messages import SlotPlace
from lucevisor.protocol.steps import CancelPending, Masks, PendingCancelled, SamplingParams, Step, StepResult
from lucevisor.protocol.validation import UnansweredStep

log = structlog.get_logger("lucevisor.engine")


class Changes:
    """Waits for conditions of something that calls ``notify`` after each change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters, which check their conditions again."""
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def holds_within(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds; False if it takes longer."""
        try:
            async with suspend_clock.timeout(timeout_s):
                await self.wait_for(condition)
        except TimeoutError:
            return False
        return True


class StageLink(Protocol):
    """The link to the daemon that runs a stage."""

    def send(self, message: bytes | Masks | CancelPending, /, *, payload: Sequence[bytearray] = ()) -> None:
        """Send an encoded frame, masks with their rows, or a cancellation, without waiting. Raises ProtocolError or
        OSError."""


class RowStore(Protocol):
    """The memory of the journal, and that of the boundaries."""

    def has_rows(self, boundary: int, step: Step) -> bool:
        """Return whether the rows of a step are in its region here."""

    def file(self, boundary: int, region: int, copies: Sequence[RowCopy]) -> None:
        """Copy rows of a step from its region."""

    def place(self, boundary: int, step: Step, copies: Sequence[RowCopy]) -> None:
        """Copy rows into the region of a step, and tell its reader."""

    def copy(self, source: int, target: int, n_rows: int) -> None:
        """Copy the first rows of a block to another."""

    def gather(self, steps: Sequence[Sequence[RowCopy]]) -> FileIO:
        """Return a memfd to which the rows of steps are written one after the other, and which is then sealed. Raises
        LucevisorError."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(CoreSettings):
    """``rows``: the memory of the journal. ``blame`` names the first stage of a step whose rows are NaN or infinite.
    ``mask_threads`` False: masks are made on the calling thread. ``on_step`` gets every finished step. ``call_soon``:
    that of the event loop, so that requests that come together share their first step."""

    rows: RowStore | None = None
    blame: Callable[[Step], str] = lambda _: "the output stage"
    mask_threads: bool = True
    call_soon: Callable[[Callable[[], None]], object] = lambda call: call()
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[PipelineResult], None] = lambda _: None
    on_pipeline_failed: Callable[[StageFailure], None] = lambda _: None
    on_drafter_lost: Callable[[StageFailure], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class DraftStage:
    """The link to a draft stage; the other fields as in events.DrafterReady."""

    link: StageLink
    with_output: bool
    restored: bool = False


@dataclass(frozen=True, slots=True)
class StateReplay:
    """The steps of each lost stage, and the ``file`` of their boundary rows, which is sealed when all are written."""

    stages: Sequence[StageReplay]
    file: FileIO


class Engine:
    """Requests in, events out, over the attached daemons."""

    def __init__(self, limits: EngineLimits, settings: EngineSettings) -> None:
        self._settings, self._clock = settings, settings.clock
        self._row_store = settings.rows
        self.core = EngineCore(limits, settings, self._clock(), self._has_rows)
        self._handles: dict[str, RequestHandle] = {}
        self._was_busy = False
        self._tick_due = False
        self._collectors: dict[str, RowCollector] = {}  # by request
        self._links: list[StageLink] = []  # by stage, and that of the draft stage after the last one
        self._n_stages = 0
        self._numbers: dict[int, tuple[int, StageLink]] = {}  # of daemons, by the id of their links
        self._on_dead_link: Callable[[int, str], None] = lambda _, __: None
        self._on_rebuilt: Callable[[bool], None] = lambda _: None
        self._on_released: Callable[[RequestHandle, RequestRecord], None] = lambda _, __: None
        self.on_state: Callable[[], None] = lambda: None  # called after each change of the core's state
        self.on_busy: Callable[[], None] = lambda: None  # called after each change of ``busy``
        self._state = self.core.state
        self._instructions: deque[ev.Instruction] = deque()
        self._dead: dict[int, str] = {}  # stages that a frame could not be sent to, and why
        self._executing = False
        self.changes = Changes()
        self.relevance = PageRelevance(self.handle)
        self._masks = MaskMaker(
            lambda step_id, made: self.handle(ev.MasksMade(step_id, made)),
            self._masks_failed,
            threaded=settings.mask_threads,
        )
        self._n_ids_runs = 0
        self.slots = SlotAccess(self, self.changes, self._clock)

    # ---- requests

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request. Raises NotReady without a pipeline or a hold, QueueFull, InvalidRequest, ContextOverflow."""
        self.core.check_taking(request)
        return self._submit(request, None)

    def release(self, take: Callable[[RequestHandle, RequestRecord], None], *, running: bool = False) -> None:
        """Give away requests that hold nothing in the shards, with ``running`` after a freeze all, for ``take`` to have
        each adopted by another engine or ended."""
        self._on_released = take
        self.handle(ev.Release(running))

    def adopt(self, handle: RequestHandle, record: RequestRecord) -> None:
        """Go on with a request that another engine has released. Raises what submit raises, but QueueFull."""
        known = self._handles.setdefault(handle.request_id, handle)
        try:
            self.handle(ev.Adopt(record))
        except BaseException:
            if known is handle:
                del self._handles[handle.request_id]
            raise
        handle.move_to(self._cancel)
        self._note_busy()

    def end(self, handle: RequestHandle, record: RequestRecord, error: RequestError) -> None:
        """End a request that was released and that no engine adopts."""
        record.move(RequestState.FAILED)
        handle.push(record.finished_event("error", self._clock(), error, None))

    @property
    def replicas(self) -> Mapping[str, Engine]:
        """The engine itself, under no name, as of a :class:`ReplicatedEngine`."""
        return {"": self}

    def n_cached(self, tokens: TokenBuffer) -> int:
        """Return how many tokens of a prompt need not be computed; those of lower tiers, which are read first, count
        3/4."""
        if not self.prefixes.enabled:
            return 0
        n_here = self.prefixes.match(tokens).position
        return n_here + max(0, self.prefixes.hooks.find(tokens, n_here) - n_here) * 3 // 4

    def resume(self, request_id: str) -> None:
        """Let a request start that ``PrefixHooks.fetch`` held, whether or not a prefix was restored for it."""
        self.handle(ev.Resume(request_id))

    async def run_ids(self, ids: Sequence[int], *, want_hidden: bool, rows_per_step: int) -> IdsOutput:
        """Run token ids through the pipeline, at most ``rows_per_step`` a step (see ``max_rows_per_step``), and return
        the logits and hidden states of every position. Raises what submit raises, RowsMissing, ProtocolError."""
        self._n_ids_runs += 1
        request_id = f"ids-{self._n_ids_runs}"
        request = GenerationRequest(
            request_id=request_id, prompt=TokenBuffer(ids), max_tokens=1, sampling=SamplingParams(temperature=0.0)
        )
        collector = self._collectors[request_id] = RowCollector(len(request.prompt), hidden=want_hidden)
        try:
            with self._submit(request, WantedRows(hidden=want_hidden, rows=rows_per_step)) as handle:
                async for event in handle:
                    if isinstance(event, FinishedEvent) and event.error is not None:
                        raise RowsMissing(f"the ids did not go through: {event.error.message}")
        finally:
            del self._collectors[request_id]
        return collector.output()

    @property
    def prefixes(self) -> PrefixIndex:
        return self.core.scheduler.reuse.index

    # ---- the pipeline

    @property
    def ready(self) -> bool:
        """True if requests are served."""
        return self.core.ready

    @property
    def busy(self) -> bool:
        """True while there are requests, whether they run or wait."""
        return bool(self._handles)

    def unload(self, reason: str, error: RequestError | None = None) -> None:
        """Leave the pipeline; requests wait for the next attach. ``error``: why loading failed, which ends those that
        wait."""
        self.handle(ev.Unload(reason, error))

    def attach(
        self,
        links: Sequence[StageLink],
        *,
        has_doorbells: bool = False,
        restored: bool = False,
        drafter: DraftStage | None = None,
        on_dead_link: Callable[[int, str], None] | None = None,
    ) -> None:
        """Use daemons that hold no sequences, by stage; queued and held requests start. See events.StagesReady.

        ``on_dead_link`` gets a stage that cannot be sent to, and the reason; it calls ``lose_stages`` or ``detach``,
        the default."""
        self._numbers.clear()
        self._dead.clear()
        self._links, self._n_stages = [*links], len(links)
        self._on_dead_link = on_dead_link or self._detach_dead_link
        ready = self._drafter_ready(drafter)
        self.handle(ev.StagesReady([self._number(link) for link in links], has_doorbells, restored, ready))

    def receive(self, result: StepResult | PendingCancelled, payload: memoryview = NO_PAYLOAD) -> None:
        """Take the answer of a stage or of the draft stage."""
        if isinstance(result, StepResult) and result.invalid and (step := self.core.find_step(result.step_id)):
            self.handle(ev.StageAnswer(result, payload, self._settings.blame(step)))
        else:
            self.handle(ev.StageAnswer(result, payload))

    def fail(self, stage: int, message: str) -> None:
        """Drop the pipeline because the daemon of a stage did what it must not."""
        self.handle(ev.ShardStateUnknown(StageFailure(stage, "protocol_error", message)))

    def detach(self, error: RequestError, *, permanent: bool = False) -> None:
        """Drop the pipeline, and hold requests until the next attach; without a hold, end running ones with ``error``.
        ``permanent`` (no pipeline will come by itself) ends queued requests, too."""
        self.handle(ev.PipelineLost(error, permanent))

    def detach_frozen(self, error: RequestError, rows: RowStore | None, journal_pages: int) -> None:
        """Leave the pipeline after a freeze; the next one may have what was frozen (``attach``). ``rows``,
        ``journal_pages``: the journal over its boundaries."""
        self._row_store = rows
        self.handle(ev.PipelineHandedOff(error, 0 if rows is None else journal_pages))

    def set_unavailable(self, error: RequestError) -> None:
        self.handle(ev.Unavailable(error))

    def lose_stages(self, stages: Collection[int], error: RequestError) -> bool:
        """Hold requests until ``restore``, as some stages are lost; the others keep their state. False where that is
        impossible: then it does what ``detach`` does."""
        self.handle(ev.StagesLost(frozenset(stages), error))
        return self.core.state is EngineState.REBUILDING

    def restore(
        self,
        links: Mapping[int, StageLink],
        on_end: Callable[[bool], None],
        *,
        restored: bool = False,
        replayed: Collection[int] = (),
        drafter: DraftStage | None = None,
    ) -> bool:
        """Rebuild all lost stages in the daemons behind ``links``, by stage; see events.StagesReplaced. False if none
        is lost.

        ``on_end`` gets whether that worked; if not, the pipeline is detached by then."""
        if self.core.state is not EngineState.REBUILDING:
            return False
        self._on_rebuilt = on_end
        for stage, link in links.items():
            self._links[stage] = link
            self._dead.pop(stage, None)
        daemons = {stage: self._number(link) for stage, link in links.items()}
        self.handle(ev.StagesReplaced(daemons, restored, frozenset(replayed), self._drafter_ready(drafter)))
        return True

    async def make_replay(self, stages: Collection[int], timeout_s: float) -> StateReplay | None:
        """Return what lost stages have computed, whose file the caller closes; None if that takes longer, is too much,
        or impossible: then ``restore`` does it. It holds until another stage is lost."""

        def prepared() -> bool:
            self.handle(ev.PrepareReplay(frozenset(stages)))
            return self.core.replay_plans is not None

        try:
            if not await self.changes.holds_within(prepared, timeout_s):
                return None
        except CannotRebuild:
            return None
        replay = self.core.replay()
        if replay is None or self._row_store is None:
            return None
        try:
            return StateReplay(replay.stages, self._row_store.gather(replay.rows))
        except LucevisorError as error:
            log.info("lost stages compute again after the load of their daemons", reason=str(error))
            return None

    def attach_drafter(self, drafter: DraftStage) -> None:
        """Draft with a stage whose daemon holds no sequences."""
        ready = self._drafter_ready(drafter)
        assert ready is not None
        self.handle(ready)

    def detach_drafter(self) -> None:
        """Go on without drafts."""
        self.handle(ev.DrafterLost())

    def fail_drafter(self, message: str) -> None:
        """Detach the drafter because its daemon did what it must not."""
        self.handle(ev.DrafterBroken("protocol_error", message))

    def oldest_in_flight(self) -> OldestStep | None:
        """Return the step a daemon has worked on for longest, for the watchdog."""
        return self.core.oldest_in_flight(self._clock())

    def find_unanswered(self, stage: int, step_id: int) -> UnansweredStep | None:
        """Return a step that a stage has yet to answer, for the check of its answer."""
        return self.core.find_unanswered(stage, step_id, self._clock())

    @property
    def invalid(self) -> str:
        """The stage that computed NaN or infinities instead of the newest tokens, or empty."""
        return self.core.invalid(self._clock())

    def statistics(self) -> EngineStatistics:
        """Return counts and rates as of now."""
        return self.core.statistics(self._clock())

    # ---- pauses, like the kernel's cgroup freezer

    async def freeze(self, timeout_s: float, reason: PauseReason = "restart") -> FrozenState | None:
        """Plan no step, wait until those on their way are done, and return what the shards hold then, for ``restore``
        or ``attach`` with ``restored``; requests are held. None if it took longer, or the pipeline was lost."""
        self.handle(ev.Freeze(reason))
        under_way = (EngineState.DRAINING, EngineState.REBUILDING)
        await self.changes.holds_within(lambda: self.core.state not in under_way, timeout_s)
        return self.core.frozen if self.core.pipeline is not None else None

    def thaw(self) -> None:
        """Plan again after a freeze."""
        self.handle(ev.Thaw())

    async def quiesce(self, timeout_s: float) -> bool:
        """Start no queued request until the next attach; return whether the running ones ended in time."""
        self.handle(ev.Quiesce())
        scheduler = self.core.scheduler
        return await self.changes.holds_within(
            lambda: scheduler.n_running == 0 and scheduler.n_in_flight == 0, timeout_s
        )

    # ---- the end

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; return whether all accepted ones ended in time."""
        self.handle(ev.Refuse("the server is shutting down"))
        return await self.changes.holds_within(lambda: self.core.scheduler.idle, timeout_s)

    def close(self, error: RequestError) -> None:
        """End all requests with ``error`` and refuse new ones from now on."""
        self.handle(ev.Close(error))
        self._masks.close()
        self.relevance.close()

    # ---- inside

    def tick(self) -> None:
        """Plan what has become possible."""
        self._tick_due = False
        self.handle(ev.Tick())

    def _submit(self, request: GenerationRequest, wanted: WantedRows | None) -> RequestHandle:
        handle = RequestHandle(request.request_id, self._cancel)
        known = self._handles.setdefault(request.request_id, handle)
        try:
            self.handle(ev.Submit(request, wanted))
        except BaseException:
            if known is handle:
                del self._handles[request.request_id]
            raise
        if not self._tick_due:
            self._tick_due = True
            self._settings.call_soon(self.tick)
        self._note_busy()
        return handle

    def _note_busy(self) -> None:
        if self.busy != self._was_busy:
            self._was_busy = self.busy
            self.on_busy()

    def _cancel(self, request_id: str) -> None:
        self.handle(ev.Cancel(request_id))

    def _has_rows(self, boundary: int, step: Step) -> bool:
        return self._row_store is not None and self._row_store.has_rows(boundary, step)

    def _number(self, link: StageLink) -> int:
        """Return the number of the daemon behind a link."""
        return self._numbers.setdefault(id(link), (len(self._numbers), link))[0]

    def _drafter_ready(self, drafter: DraftStage | None) -> ev.DrafterReady | None:
        if drafter is None:
            return None
        self._links[self._n_stages :] = [drafter.link]
        return ev.DrafterReady(self._number(drafter.link), drafter.with_output, drafter.restored)

    def handle(self, event: ev.CoreEvent) -> None:
        """Feed an event to the core, and carry out what it asks for.  Raises what the core raises."""
        queue, effects = self._instructions, self._EFFECTS
        queue += self.core.handle(event, self._clock())
        if self._executing:  # an effect of an instruction: those before it come first
            return
        self._executing = True
        try:
            while queue or self._dead:
                while queue:
                    instruction = queue.popleft()
                    effects[type(instruction)](self, instruction)
                if self._dead:
                    stage = next(iter(self._dead))
                    self._report_dead_link(stage, self._dead.pop(stage))
        finally:
            self._executing = False
        if self.core.state is not self._state:
            self._state = self.core.state
            self.on_state()
        self.changes.notify()

    # ---- effects of instructions

    def _send(
        self, stage: int, what: str, message: bytes | Masks | CancelPending, payload: Sequence[bytearray] = ()
    ) -> None:
        try:
            self._links[stage].send(message, payload=payload)
        except (ProtocolError, OSError) as error:
            self._dead.setdefault(stage, f"{what} could not be sent to stage {stage}: {error}")

    def _deliver(self, instruction: ev.Deliver) -> None:
        handles = self._handles
        for request_id, event in instruction.events:
            handles[request_id].push(event)
            if type(event) is FinishedEvent:
                del handles[request_id]
        if not handles:
            self._note_busy()

    def _released(self, instruction: ev.Released) -> None:
        for record in instruction.records:
            self._on_released(self._handles.pop(record.request.request_id), record)
        self._note_busy()

    @property
    def _rows(self) -> RowStore:
        assert self._row_store is not None  # a journal has one
        return self._row_store

    def _step_finished(self, instruction: ev.StepFinished) -> None:
        if (collector := self._collectors.get(instruction.request_id)) is not None:
            collector.add(instruction.result)
        self._settings.on_step(instruction.result)

    def _rebuild_ended(self, instruction: ev.RebuildEnded) -> None:
        on_rebuilt, self._on_rebuilt = self._on_rebuilt, lambda _: None
        on_rebuilt(instruction.rebuilt)

    _EFFECTS: ClassVar[Mapping[type, Callable[[Engine, Any], None]]] = {  # a table is quicker than a match
        SendFrame: lambda self, it: self._send(it.stage, f"step {it.step_id}", it.frame),
        SendMasks: lambda self, it: self._send(it.stage, f"masks of step {it.message.step_id}", it.message, it.payload),
        SendCancelPending: lambda self, it: self._send(it.stage, "a cancellation", CancelPending(it.stage)),
        FileRows: lambda self, it: self._rows.file(it.boundary, it.region, it.copies),
        PlaceRows: lambda self, it: self._rows.place(it.boundary, it.step, it.copies),
        CopyRows: lambda self, it: self._rows.copy(it.source, it.target, it.n_rows),
        ev.Deliver: _deliver,
        ev.Released: _released,
        ev.StepFinished: _step_finished,
        ev.MakeMasks: lambda self, it: self._masks.make_masks(it.step_id, it.jobs),
        ev.RankPages: lambda self, it: self.relevance.rank(it.step_id, it.sequence, it.tokens),
        ev.ReportPipelineFailure: lambda self, it: self._settings.on_pipeline_failed(it.failure),
        ev.ReportDrafterFailure: lambda self, it: self._settings.on_drafter_lost(it.failure),
        ev.RebuildEnded: _rebuild_ended,
    }

    def _report_dead_link(self, stage: int, text: str) -> None:
        pipeline = self.core.pipeline
        if pipeline is None or stage in pipeline.lost:
            return
        if stage == pipeline.n_stages:
            self.handle(ev.DrafterBroken("shard_lost", text))
        else:
            self._on_dead_link(stage, text)

    def _detach_dead_link(self, stage: int, text: str) -> None:
        self.handle(ev.ShardStateUnknown(StageFailure(stage, "shard_lost", text)))

    def _masks_failed(self, step_id: int, text: str) -> None:
        """Drop the pipeline: the output stage would wait for the masks."""
        if self.core.find_step(step_id) is not None and self.core.pipeline is not None:
            self.fail(self.core.pipeline.n_stages - 1, text)


class SlotAccess:
    """Prefix slots to save, and places for slots to restore. Nothing writes to a place until it is released, adopted or
    cancelled."""

    def __init__(self, engine: Engine, changes: Changes, clock: Callable[[], float]) -> None:
        self._engine, self._changes, self._clock = engine, changes, clock
        self._index = engine.core.scheduler.reuse.index

    async def synchronize(self) -> bool:
        """Wait until every stage has done all that was decided up to now; False if the pipeline fails first."""
        pipeline = self._engine.core.pipeline
        self._engine.handle(ev.Flush())
        goal = self._engine.core.flush_goal
        if pipeline is None:
            return False
        await self._changes.wait_for(
            lambda: pipeline is not self._engine.core.pipeline or self._engine.core.scheduler.last_finished >= goal
        )
        return pipeline is self._engine.core.pipeline

    async def export(self, slot: PrefixSlot) -> SlotPlace | None:
        """Pin a slot until ``release``, and return its place once its bytes are there in every stage; None, without a
        pin, if it is gone or the pipeline fails."""
        self._index.pin(slot)
        if slot.alive and await self.synchronize() and slot.alive:
            full, window = (slot.pages(kv_group) for kv_group in (KvGroup.FULL, KvGroup.WINDOW))
            return SlotPlace(slot.n_tokens, full, window, slot.first_window, slot.state)
        self.release(slot)
        return None

    def release(self, slot: PrefixSlot) -> None:
        """Undo the pin of ``export``."""
        self._index.unpin(slot)
        self._engine.tick()

    def can_restore(self, n_tokens: int, n_saved: int, paged_out: PagedOut | None) -> bool:
        """Return whether the first ``n_tokens`` of a prefix of ``n_saved`` may be restored, pages of which were
        ``paged_out``: what was computed without some pages stands for nothing that is computed with all."""
        limits = self._engine.core.scheduler.limits
        if not limits.stays_whole(n_tokens + 1):
            return False
        if paged_out is None or not paged_out.approximate or n_tokens < paged_out.n_exact:
            return True
        return n_tokens == n_saved and limits.residency is not None and limits.residency.ranks_pages

    async def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate pages and a state for a prefix, to which no step in flight writes any more; then ``adopt`` or
        ``cancel_reservation``. ``paged_out``: pages that were in host memory when it was saved. None if there is no
        room, KV Flash would drop some of it, or the pipeline fails."""
        reuse = self._engine.core.scheduler.reuse
        if (reservation := reuse.reserve(n_tokens, paged_out)) is None and self._index.evicting:
            await self._changes.wait_for(lambda: not self._index.evicting)  # their pages come free
            reservation = reuse.reserve(n_tokens, paged_out)
        if reservation is not None and not await self.synchronize():
            self.cancel_reservation(reservation)
            return None
        return reservation

    def adopt(self, tokens: Sequence[int], reservation: Reservation, *, drafted: bool = False) -> PrefixSlot | None:
        """Publish a restored prefix, pinned until ``release``; None if the pipeline failed meanwhile, or it is not
        worth caching. ``drafted``: the drafter's state was restored, too."""
        slot = self._index.adopt(tokens, reservation, self._clock(), drafted=drafted)
        self._engine.tick()
        return slot

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Free reserved pages, unless they are freed or adopted already."""
        self._index.cancel(reservation)
        self._engine.tick()

    async def wait_for_capacity(self) -> None:
        """Wait until the queue is empty and another sequence could start."""
        scheduler = self._engine.core.scheduler
        n_most = scheduler.limits.max_sequences
        await self._changes.wait_for(
            lambda: self._engine.core.pipeline is not None and not scheduler.n_queued and scheduler.n_running < n_most
        )
