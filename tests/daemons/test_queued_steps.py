"""A stage queues a step behind the one on its device, and answers that while it waits for the next rows.

Two daemons' loops in threads, with real links, arenas and stages.  On a cpu the first one's rows count as computed some
time after they are: then what it must not do until they are there shows.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from daemons.options import Options
from daemons.runner import ModelRunner
from daemons.worker import _MessageLoop
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.codec import encode
from lucevisor.protocol.frames import POSTED
from lucevisor.protocol.loading import (
    ArenaPlan,
    CaptureSource,
    DraftKind,
    DraftPlan,
    Load,
    ShardPlan,
    StagePlan,
    arena_regions,
    token_region_bytes,
)
from lucevisor.protocol.messages import Failed, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    PENDING,
    CancelPending,
    Operation,
    PendingCancelled,
    SamplingParams,
    Slice,
    Step,
    StepResult,
)
from lucevisor.protocol.transport import BlockingLink
from tests.daemons.test_run_ahead import BACKENDS, Reporter, opening
from tests.families.golden import opened
from tests.families.pipeline import pools_of

GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3)
LATE_S = 0.004
WAIT_S = 20.0
N_REGIONS = arena_regions(2)
N_TOKENS = 12


@dataclass
class LateEvent:
    """Stands for a device's event: what is before it takes a while."""

    at: float = field(default_factory=lambda: time.monotonic() + LATE_S)
    polled: int = 0
    is_waited_for: bool = False

    def query(self) -> bool:
        self.polled += 1
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        self.is_waited_for = True
        while time.monotonic() < self.at:
            time.sleep(0.001)


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


class LoopReporter(Reporter):
    """``phases``: those set so far, with their steps."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []

    def phase(self, phase: str, step_id: int = 0) -> None:
        self.phases.append((phase, step_id))

    def step_done(self, _: int) -> None:
        pass


class TwoStages:
    """The halves of a model in two daemons' loops, and the supervisor's ends of their links."""

    def __init__(self, spec: ModelSpec, backend: Backend, spin_s: float, drafter: Path | None = None) -> None:
        half = next(i for i in range(spec.n_layers // 2, spec.n_layers) if spec.legal_boundary(i))
        ranges = LayerRange(0, half), LayerRange(half, spec.n_layers)
        plans = [
            ArenaPlan(0, 4 * spec.boundary_width * 64, N_REGIONS),
            ArenaPlan(1, token_region_bytes(4, 4), N_REGIONS, tokens=True),
        ]
        self.spec = spec
        self.arenas = [Arena.create(plan) for plan in plans]
        self.links, self.daemons = list[BlockingLink](), list[BlockingLink]()
        self.runners, self.threads = list[ModelRunner](), list[threading.Thread]()
        self.reporters = [LoopReporter(), LoopReporter()]
        files = [str(path) for path in spec.files.paths]
        for i, layers in enumerate(ranges):
            source, target = (None, 0) if i == 0 else (0, None)
            plan = StagePlan(i, [ShardPlan(0, layers)], source, target, embedding=i == 0, output=i == 1, tokens=1)
            draft = None
            if drafter is not None and plan.output:
                own = read_draft_spec(open_draft([drafter]), spec, DraftKind.MTP)
                sources = [CaptureSource(1, [*own.captures], None)]
                draft = DraftPlan(2, DraftKind.MTP, [str(drafter)], 0, own.layers, sources)
                plan = replace(plan, captures=[*own.captures])
            fds = [os.dup(a.fd) for a in self.arenas] + [os.dup(a.wake_fd) for a in self.arenas]
            sizes = pools_of(spec), 4, 80
            load = Load(files, Dtype.FLOAT32, Dtype.FLOAT32, [plan], plans, *sizes, draft=draft, spin_s=spin_s)
            runner, _ = ModelRunner.load(load, backend, fds, Reporter())  # type: ignore[arg-type]
            if spin_s:
                runner._queues = True
            ours, theirs = socket.socketpair()
            link, daemon = BlockingLink(ours, role=Role.SUPERVISOR), BlockingLink(theirs)
            for end in (link, daemon):
                end._connection.state = LinkState.READY
            loop = _MessageLoop(daemon, self.reporters[i], Options("g", backend, 0, 0, 0, 1, ()))  # type: ignore[arg-type]
            loop._runtime, loop._inbox.spin_s = runner, spin_s
            thread = threading.Thread(target=loop.run)
            thread.start()
            self.links += [link]
            self.daemons += [daemon]
            self.runners.append(runner)
            self.threads.append(thread)

    def post(self, step: Step, stage: int) -> None:
        """As the supervisor does: the first stage waits only for tokens and drafts."""
        posted = POSTED if stage or step.waits_for_tokens else 0
        self.links[stage].send(encode(step, step.step_id, stage | posted))

    def answer(self, stage: int) -> StepResult | PendingCancelled:
        frame = self.links[stage].receive()
        assert frame is not None
        assert isinstance(frame.message, StepResult | PendingCancelled), frame.message
        return frame.message

    def close(self) -> None:
        for link in self.links:
            link.send(Shutdown())
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        for link in (*self.links, *self.daemons):
            link.close()
        for runner in self.runners:
            for boundary in runner._boundaries:
                boundary.close()
        for arena in self.arenas:
            arena.close()


@contextmanager
def two_stages(spec: ModelSpec, backend: Backend, spin_s: float, drafter: Path | None = None) -> Iterator[TwoStages]:
    both = TwoStages(spec, backend, spin_s, drafter)
    try:
        yield both
    finally:
        both.close()


def run(both: TwoStages, ids: list[int], batches: list[list[int]]) -> dict[int, list[int]]:
    """N_TOKENS of each sequence after a prompt in two parts, in micro-batches that take turns.

    Each has a step under way and one behind it.
    """
    steps, last = list[Step](), dict[int, int]()
    for turn in range(-1, N_TOKENS):
        for at, batch in enumerate(batches):
            operations: list[Operation] = []
            slices = []
            for s in batch:
                prompt = ids[: 5 + s]
                if turn == -1:
                    operations += opening(both.spec, s, GREEDY if s != 1 else DRAWN)
                if turn < 0:
                    slices.append(Slice(s, 0, prompt[:2], False))
                else:
                    slices.append(Slice(s, 4 + s + turn, [PENDING], True) if turn else Slice(s, 2, prompt[2:], True))
            number = len(steps) + 1
            steps.append(Step(number, number % N_REGIONS, operations, slices, depends_on_step=last.get(at, 0)))
            if turn >= 0:
                last[at] = number
    drawn: dict[int, list[int]] = {}
    ahead = 2 * len(batches)
    for i in range(len(steps) + ahead):
        if i < len(steps):
            both.post(steps[i], 0)
            both.post(steps[i], 1)
        if i >= ahead - 1 and (done := i - ahead + 1) < len(steps):
            first, second = both.answer(0), both.answer(1)
            assert isinstance(first, StepResult)
            assert isinstance(second, StepResult)
            assert first.step_id == second.step_id == steps[done].step_id
            for one in second.sampled:
                drawn.setdefault(one.sequence, []).append(one.token)
    return drawn


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batches", [[[0]], [[0, 1]], [[0], [1]], [[0, 2], [1]]], ids=str)
def test_tokens_are_those_of_stages_that_wait(
    backend: Backend, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = opened("qwen35")
    events: list[LateEvent] = []

    def late(device: torch.device) -> LateEvent:
        events.append(LateEvent())
        return events[-1]

    if backend is Backend.CPU:
        monkeypatch.setattr("daemons.runner.recorded", late)
    with two_stages(golden.spec, backend, 0.0) as both:
        wanted = run(both, golden.ids, batches)
    assert not events
    with two_stages(golden.spec, backend, 0.05) as both:
        found = run(both, golden.ids, batches)
    assert found == wanted
    assert all(len(tokens) == N_TOKENS for tokens in found.values())
    if backend is Backend.CPU:
        assert len(events) == (N_TOKENS + 2) * len(batches)  # of the last stage only one step samples nothing
        n_asked = sum(event.polled > 0 for event in events)
        assert len(batches) > 1 or n_asked >= N_TOKENS  # of a decode: the next one's wait for its token must end


def test_a_bell_is_rung_when_the_rows_have_left_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened("qwen35")
    event = LateEvent(at=float("inf"))
    monkeypatch.setattr("daemons.runner.recorded", lambda _: event)
    with two_stages(golden.spec, Backend.CPU, 0.05) as both:
        slices = [Slice(0, 0, golden.ids[:5], True)]
        for stage in (0, 1):
            both.post(Step(1, 1, opening(golden.spec, 0, GREEDY), slices), stage)
        wait_until(lambda: event.polled > 100)
        assert not both.arenas[0].rung(1, 1)
        # a loss takes back what waits behind it; the step on the device is answered all the same
        both.post(Step(2, 2, [], [Slice(0, 5, [PENDING], True)], depends_on_step=1), 0)
        wait_until(lambda: ("step", 2) in both.reporters[0].phases)
        both.links[0].send(CancelPending(0))
        n_polled = event.polled
        wait_until(lambda: event.is_waited_for or event.polled > n_polled + 100)
        event.at = 0.0
        first = both.answer(0)
        assert isinstance(first, StepResult)
        assert first.step_id == 1
        assert both.answer(0) == PendingCancelled(0, [2], True)
        second = both.answer(1)
        assert isinstance(second, StepResult)
        assert len(second.sampled) == 1


def test_a_device_that_fails_is_reported_with_the_step_that_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingEvent(LateEvent):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    golden = opened("qwen35")
    monkeypatch.setattr("daemons.runner.recorded", lambda _: FailingEvent())
    with two_stages(golden.spec, Backend.CPU, 0.05) as both:
        both.post(Step(1, 1, opening(golden.spec, 0, GREEDY), [Slice(0, 0, golden.ids[:5], True)]), 0)
        frame = both.links[0].receive()
        assert frame is not None
        assert isinstance(frame.message, Failed)
        assert frame.message.what == "step 1"
        assert frame.message.where.endswith("stage 0")
        assert "illegal memory access" in frame.message.reason
        both.threads[0].join(WAIT_S)  # the process would end
        assert not both.threads[0].is_alive()
