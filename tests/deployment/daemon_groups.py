"""Groups whose daemons are toys, joined by the real assembly, engine and pipeline: all in one thread, moved by hand.

A daemon computes real encoded steps (tests/engine/toy_pipeline.py), so state that outlived a reset, or a pipeline over
a daemon that was not reset, gives a Violation or wrong tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.engine.pipeline import StageFailure
from lucevisor.engine.request import FinishedEvent, GenerationRequest, RequestHandle
from lucevisor.engine.shell import Engine, EngineSettings, StateReplay
from lucevisor.kv_transfer.transfers import KvTransfer
from lucevisor.model.values import LayerRange
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.messages import KIND_OF
from lucevisor.protocol.steps import CancelPending, PendingCancelled, Reset, ResetDone, StepResult
from tests.engine.toy_drafter import ToyDrafter
from tests.engine.toy_engine import HYBRID, limits
from tests.engine.toy_pipeline import ToyDaemon, ToyLimits, ToyModel, ToyRows, ToyStage


def frame(message: StepResult | PendingCancelled | ResetDone, payload: bytes | memoryview = b"") -> Frame:
    return Frame(KIND_OF[type(message)], 0, 0, message, memoryview(bytearray(payload)))


class Process:
    """One daemon from READY to its death, and the supervisor's link to it."""

    def __init__(self, stages: dict[int, ToyStage], told: ToyLimits, drafter: ToyDrafter | None = None) -> None:
        self.alive = True
        self.inbox: deque[Reset | CancelPending | bytes] = deque()
        self.resets = 0
        self.last_reset = 0
        self._daemon = ToyDaemon(stages, told)
        self._daemon.drafter = drafter

    @property
    def busy(self) -> bool:
        """Whether it can do something."""
        return self._reads() or bool(self.inbox)

    def _reads(self) -> bool:
        """Take what came before a reset; whether it can run any of it."""
        while self.inbox and not isinstance(self.inbox[0], Reset):
            self._daemon.send(self.inbox.popleft())  # type: ignore[arg-type]
        return self._daemon.ready

    def send(self, message: Reset | CancelPending | bytes, *, payload: object = ()) -> None:
        if not self.alive:
            raise LinkClosed("end of file", "link", "the daemon has exited; see its log")
        self.inbox.append(message)

    def work(self) -> Frame:
        """Do what came first, and answer."""
        if self._reads():
            return frame(*self._daemon.run_one())
        message = self.inbox.popleft()
        assert isinstance(message, Reset)
        self.resets += 1
        self.last_reset = message.token
        drafter = [self._daemon.drafter] if isinstance(self._daemon.drafter, ToyDrafter) else []
        for stage in (*self._daemon.stages.values(), *drafter):
            stage.sequences.clear()
        self._daemon.inbox.clear()  # what is posted never begins
        return frame(ResetDone(message.token))


DRAFTING = SpeculationSettings(max_drafts=4, drafter=True)


class Ticks:
    """A clock that moves by a millisecond whenever it is read: histories repeat, however busy the machine is."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class Groups:
    """``homes[s]``: the group that runs stage s; ``draft``: the one that runs the draft stage, if any."""

    def __init__(
        self,
        homes: Sequence[str],
        draft: str = "",
        hold_s: float = 0.0,
        journal_pages: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.homes, self.draft = list(homes), draft
        n = len(homes)
        self.limits = limits(max_sequences=2, pools=PoolSizes(16, 0, 2))
        if draft:
            self.limits = replace(self.limits, pools=PoolSizes(16, 0, 2, draft_states=8), speculation=DRAFTING)
        self.texts: dict[int, list[int]] = {}  # prompt and answer by seed, for the drafter
        self.drafters_lost: list[StageFailure] = []
        self.model = ToyModel(n, HYBRID, None)
        self.rows = ToyRows()
        self.regions = self.rows.regions  # shared memory outlives daemons
        self.failures: list[StageFailure] = []
        self.changes = 0
        self.engine = Engine(
            self.limits,
            EngineSettings(
                max_queue=100,
                hold_s=hold_s,
                max_losses=1000,
                rows=self.rows,
                journal_pages=journal_pages,
                on_pipeline_failed=self._pipeline_failed,
                on_drafter_lost=self._drafter_lost,
                validate=True,
                clock=clock or Ticks(),
            ),
        )
        self.transfers = KvTransfer({group: [LayerRange(i, i + 1)] for i, group in enumerate(homes)})
        self.assembly = PipelineAssembly(self.engine, self.homes, self._changed, self.transfers, draft)
        self.processes: dict[str, Process] = {}  # those that supervision holds for READY
        self._loop: asyncio.AbstractEventLoop | None = None
        self.replays: dict[str, tuple[StateReplay, list[int]]] = {}  # what loads carry, and the rows

    def _changed(self) -> None:
        self.changes += 1

    def _pipeline_failed(self, failure: StageFailure) -> None:
        self.failures.append(failure)
        self.assembly.pipeline_failed()

    def _drafter_lost(self, failure: StageFailure) -> None:
        """What a deployment does."""
        self.drafters_lost.append(failure)
        self.assembly.detach_drafter(failure.message)

    def submit(self, one: GenerationRequest) -> RequestHandle:
        """Submit a request whose drafts the drafter knows."""
        alone = self.model.alone(one.prompt, one.sampling, one.max_tokens, one.stop_ids)
        self.texts[one.sampling.seed] = [*one.prompt, *alone]
        return self.engine.submit(one)

    def ready(self, group: str, *, alive: bool = True, with_draft: bool = True) -> Process:
        """A new daemon of the group finished loading; not ``alive``: those were its last words."""
        assert group not in self.processes
        n_stages = len(self.homes)
        told = ToyLimits(
            n_stages, self.limits.max_sequences, self.limits.max_step_tokens, self.limits.n_regions(n_stages)
        )
        stages = {
            s: ToyStage(self.model, s, self.limits.pools, self.regions) for s, g in enumerate(self.homes) if g == group
        }
        with_draft = with_draft and group == self.draft
        drafter = None
        if with_draft:
            drafter = ToyDrafter(
                self.model, self.limits.pools, self.regions, lambda sampling: self.texts[sampling.seed], wrong=3
            )
        process = self.processes[group] = Process(stages, told, drafter)
        process.alive = alive
        found = self.replays.pop(group, None)
        for one in found[0].stages if found is not None else ():
            stages[one.stage].replay(one.steps, found[1][one.first_row :], self.limits.max_sequences)
        replayed = found is not None
        self.assembly.on_ready(group, process, with_draft=with_draft, replayed=replayed)  # type: ignore[arg-type]  # what it uses of a Link
        return process

    def load(self, group: str) -> bool:
        """A new daemon of the group is sent its load; return whether it carries a replay."""
        self.replays.pop(group, None)
        self._loop = self._loop or asyncio.new_event_loop()  # one, which the engine's events are bound to
        found = self._loop.run_until_complete(self.assembly.replay(group, 0.0))
        if found is not None:
            found.file.close()
            self.replays[group] = found, self.rows.gathered
        return found is not None

    def close(self) -> None:
        """After the last ``load``."""
        if self._loop is not None:
            self._loop.close()

    def die(self, group: str) -> None:
        """The daemon is gone; the supervisor has not heard of it."""
        self.processes[group].alive = False

    def lost(self, group: str) -> None:
        """Supervision says so."""
        del self.processes[group]
        self.assembly.on_lost(group, "killed by signal 9")

    def answer(self, group: str) -> None:
        """One answer arrives; those that a daemon sent before its death do, too."""
        self.assembly.on_frame(group, self.processes[group].work())

    def work(self) -> None:
        """Until nobody has anything to do."""
        while busy := [g for g, p in self.processes.items() if p.busy and p.alive]:
            self.answer(busy[0])


def drained(handle: RequestHandle) -> list[object]:
    """The events that nobody has read yet."""
    found: list[object] = [*handle._events]
    handle._events.clear()
    assert not found or isinstance(found[-1], FinishedEvent)
    return found


class GroupMachine(RuleBasedStateMachine):
    """The groups of a property test, and daemons that answer in any order; ``begin``, an ``initialize`` rule, makes
    ``groups`` and ``names``."""

    groups: Groups
    names: list[str]

    def some(self, draw: int, names: list[str]) -> str:
        return names[draw % len(names)]

    @property
    def away(self) -> list[str]:
        return [n for n in self.names if n not in self.groups.processes]

    @property
    def here(self) -> list[str]:
        return [n for n in self.names if n in self.groups.processes]

    @property
    def busy(self) -> list[str]:
        return [n for n in self.here if self.groups.processes[n].busy]

    @precondition(lambda self: self.busy)
    @rule(draw=st.integers(0, 5), n=st.sampled_from([1, 1, 9, 40]), turns=st.booleans())
    def answer(self, draw: int, n: int, turns: bool) -> None:
        """``turns``: the daemons take turns, else each goes on as long as it can."""
        for i in range(n):
            if self.busy:
                self.groups.answer(self.some(draw + i * turns, self.busy))
