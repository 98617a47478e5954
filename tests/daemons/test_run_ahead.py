"""Steps whose tokens the step before samples: the daemon puts them in place, and may queue both on the device."""

from __future__ import annotations

import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.draft import stage as stage_module
from daemons.draft.drafter import Drafts
from daemons.draft.stage import DraftJob, DraftStage, PlaceholderDraft
from daemons.errors import StateError
from daemons.kv.batch import Layout
from daemons.options import Options
from daemons.runner import ModelRunner
from daemons.sampling import Sampler
from daemons.step_output import StepOutput
from daemons.token_ring import RunAheadStep, TokenRing
from daemons.worker import _MessageLoop
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.arena import Arena, SharedBuffer, open_arenas
from lucevisor.protocol.frames import POSTED, encode
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
from lucevisor.protocol.messages import Failed, Progress, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    PENDING,
    Drafted,
    DraftStep,
    OpenSequence,
    Operation,
    PendingCancelled,
    Sampled,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    StepResult,
    UseState,
    ZeroState,
)
from lucevisor.protocol.transport import BlockingLink
from tests.families.golden import opened
from tests.families.pipeline import pools_of
from tests.model.drafter_files import MTP

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=0.9, seed=3)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, seed=5)
SORTED = SamplingParams(temperature=0.7, typical_p=0.9, seed=7)
MIXES = {
    "greedy": [GREEDY] * 3,
    "plain": [PLAIN] * 3,
    "filtered": [FILTERED, SamplingParams(temperature=1.2, top_k=7, seed=9), FILTERED],
    "biased": [
        SamplingParams(temperature=0.0, logit_bias={5: 4.0}),
        GREEDY,
        SamplingParams(temperature=0.0, banned=(1, 2, 3)),
    ],
    "of all kinds": [GREEDY, FILTERED, SORTED],
}
ORDERS = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (1, 2), (0, 2, 1), (1, 0, 2)]
"""The sequences of each decode."""
BACKENDS = [
    Backend.CPU,
    pytest.param(
        Backend.CUDA,
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device")],
    ),
]


class Reporter:
    def progress(self, _: Progress) -> None:
        pass

    def log(self, level: str, event: str, **fields: object) -> None:
        pass


def opening(spec: ModelSpec, sequence: int, sampling: SamplingParams) -> list[Operation]:
    operations: list[Operation] = [OpenSequence(sequence, sequence, sampling)]
    for kv_group in spec.kv_groups():
        recurrent = kv_group is KvGroup.RECURRENT
        operations.append(ZeroState(sequence) if recurrent else SetPages(sequence, kv_group, 0, [sequence]))
    return operations


@dataclass
class Daemon:
    """All layers of a model in one runner, and a drafter; ``waiting``: the step on the device."""

    runner: ModelRunner
    waiting: StepOutput | None = None
    drafting: DraftStep | None = None  # behind it
    drafted: list[Drafted] = field(default_factory=list)
    n_async: int = 0
    drawn: dict[int, list[int]] = field(default_factory=dict)
    n_steps: int = 0

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        ids: list[int],
        backend: Backend,
        samplings: list[SamplingParams],
        drafter: tuple[Path, DraftKind] | None = None,
    ) -> Daemon:
        layers = LayerRange(0, spec.n_layers)
        draft, captures = None, []
        if drafter is not None:
            path, kind = drafter
            own = read_draft_spec(open_draft([path]), spec, kind)
            captures = [*own.captures]
            draft = DraftPlan(1, kind, [str(path)], 0, own.layers, [CaptureSource(0, captures, None)])
        plan = StagePlan(0, [ShardPlan(0, layers)], None, None, embedding=True, output=True, captures=captures)
        files = [str(path) for path in spec.files.paths]
        load = Load(files, Dtype.FLOAT32, Dtype.FLOAT32, [plan], [], pools_of(spec), 4, 80, draft=draft)
        runner, _ = ModelRunner.load(load, backend, [], Reporter())
        found = cls(runner)
        for sequence, sampling in enumerate(samplings):
            found.run([Slice(sequence, 0, ids[: 5 + sequence], True)], opening(spec, sequence, sampling))
            found.settle()
        return found

    def run(self, slices: list[Slice], operations: list[Operation] | None = None) -> None:
        self.n_steps += 1
        step = Step(self.n_steps, 0, operations or [], slices)
        output = self.runner.run_step(step, 0, 0.0, finish_previous=self.settle)
        assert self.waiting is None
        self.waiting, self.drafting = output, DraftStep(step)
        self.n_async += output.async_output is not None
        if output.async_output is None:
            self.settle()

    def settle(self) -> None:
        output, self.waiting = self.waiting, None
        if output is not None:
            for sampled in self.runner.finish_step(output).result.sampled:
                self.drawn.setdefault(sampled.sequence, []).append(sampled.token)
            if self.runner._draft is not None and self.drafting is not None:
                self.drafted = self.runner.finish_step(self.runner.run_draft(self.drafting, 0.0)).result.drafts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_those_of_steps_that_wait(mix: str, backend: Backend) -> None:
    golden = opened("qwen35")
    known, ahead = (Daemon.of(golden.spec, golden.ids, backend, MIXES[mix]) for _ in range(2))
    at = [5, 6, 7]
    for order in ORDERS * 3:
        known.settle()
        known.run([Slice(s, at[s], [known.drawn[s][-1]], True) for s in order])
        if len(order) == 3:
            ahead.run([Slice(s, at[s], [PENDING], True) for s in order])
        else:  # the supervisor plans only what all have
            ahead.settle()
            ahead.run([Slice(s, at[s], [ahead.drawn[s][-1]], True) for s in order])
        for s in order:
            at[s] += 1
    known.settle()
    ahead.settle()
    assert ahead.drawn == known.drawn
    assert len({token for drawn in known.drawn.values() for token in drawn}) > 3
    on_device = backend is not Backend.CPU and mix != "of all kinds"
    assert (ahead.n_async == ahead.n_steps) == on_device
    assert on_device or mix == "of all kinds" or not ahead.n_async


@pytest.mark.parametrize("mix", ["plain", "filtered", "of all kinds"])
def test_many_rows_are_sampled_in_parts(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 3, 1 and 2 rows, of which the first and the last are masked, at most 3 rows at a time."""
    golden = opened("qwen3")
    whole, parts = (Daemon.of(golden.spec, golden.ids, Backend.CPU, MIXES[mix]) for _ in range(2))
    slices = [
        Slice(0, 5, golden.ids[5:8], True, n_drafts=2, masked=True),
        Slice(1, 6, golden.ids[6:7], True),
        Slice(2, 7, golden.ids[7:9], True, n_drafts=1, masked=True),
    ]
    masks = torch.zeros(5, -(-golden.spec.vocabulary // 8), dtype=torch.uint8)
    for row in range(5):
        masks[row, row] = 0b1010  # each row of a masked slice may be one of two tokens of its own
    made, logits = list[int](), parts.runner.stages[0].logits
    monkeypatch.setattr(parts.runner.stages[0], "max_sampled_rows", 3)
    monkeypatch.setattr(
        parts.runner.stages[0], "logits", lambda rows, which: made.append(len(which)) or logits(rows, which)
    )
    found = [
        daemon.runner.run_step(Step(9, 0, [], slices), 0, 0.0, lambda step_id, masked: masks.clone()).result.sampled
        for daemon in (whole, parts)
    ]
    assert found[0] == found[1]
    assert made == [3, 3]
    assert found[1][0].token in (1, 3)
    assert {s.sequence for s in found[1]} == {0, 1, 2}


def test_a_token_that_nobody_sampled_is_refused() -> None:
    sampler = Sampler(9, torch.device("cpu"))
    sampler.open(4, GREEDY, [])
    with pytest.raises(StateError, match="sequence 4 at 17"):
        sampler.fill_placeholders(Step(1, 0, [], [Slice(4, 17, [PENDING], True)]))


# ---- steps queued on the device


LATE_S = 0.004
WAIT_S = 60.0
N_REGIONS = arena_regions(2)


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
            arenas = open_arenas(plans, fds)
            runner, _ = ModelRunner.load(load, backend, arenas, Reporter())  # type: ignore[arg-type]
            if spin_s:
                runner._queues = True
            ours, theirs = socket.socketpair()
            link, daemon = BlockingLink(ours, role=Role.SUPERVISOR), BlockingLink(theirs)
            for end in (link, daemon):
                end._connection.state = LinkState.READY
            loop = _MessageLoop(daemon, self.reporters[i], Options("g", backend, 0, 0, 0, 1, ()))  # type: ignore[arg-type]
            loop._runtime, loop._messages.spin_s = runner, spin_s
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
            thread.join(60)
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


# ---- posted verify steps


N_DRAFTS, ROUNDS = 3, 8


def plain_tokens(daemon: Daemon, n: int) -> dict[int, list[int]]:
    """What each sequence draws without drafts."""
    for i in range(n):
        daemon.run([Slice(s, 5 + s + i, [drawn[-1]], True) for s, drawn in daemon.drawn.items()])
        daemon.settle()
    return daemon.drawn


def draft_partly_right(monkeypatch: pytest.MonkeyPatch, wanted: Mapping[int, Sequence[int]]) -> None:
    """Random drafters are never right: let the first i % 3 drafts of position i be, of what each sequence draws."""
    draft = DraftStage._draft

    def partly_right(stage: DraftStage, jobs: Sequence[DraftJob], hidden: Tensor) -> Drafts:
        found = draft(stage, jobs, hidden)
        for row, job in enumerate(jobs):
            at = job.position - 5 - job.slice.sequence + 1
            for i, token in enumerate(wanted[job.slice.sequence][at : at + job.position % 3]):
                found.tokens[row, i] = token
        return found

    draft_at, placeholder_draft, begins = DraftStage._draft_at, stage_module.placeholder_draft, dict[int, Tensor]()

    def noted(
        layouts: Sequence[Layout], drafts: Sequence[int], first_row: int, drawn: Tensor
    ) -> PlaceholderDraft | None:
        found = placeholder_draft(layouts, drafts, first_row, drawn)
        if found is not None:
            begins[id(found.layout)] = int(layouts[0].metadata[layouts[0].n_rows]) + found.row - first_row
        return found

    def partly_right_unseen(stage: DraftStage, layout: Layout, hidden: Tensor, index: Tensor) -> Drafts:
        """As ``partly_right``, of drafts whose position only the device knows."""
        found = draft_at(stage, layout, hidden, index)
        if (position := begins.pop(id(layout), None)) is not None:
            i, following = (x.to(position.device) for x in (torch.arange(N_DRAFTS), torch.tensor(wanted[0])))
            found.tokens[0] = torch.where(i < position % 3, following[position - 4 + i], found.tokens[0])
        return found

    monkeypatch.setattr(DraftStage, "_draft", partly_right)
    monkeypatch.setattr(DraftStage, "_draft_at", partly_right_unseen)
    monkeypatch.setattr(stage_module, "placeholder_draft", noted)


@dataclass
class LateTimedEvent(LateEvent):
    def elapsed_time(self, _: LateEvent) -> float:
        return 3.0


class Supervisor:
    """Verifies N drafts of each sequence a step.  ``ahead``: sends a step before its drafts are known."""

    def __init__(self, both: TwoStages, ids: list[int], n_sequences: int, *, ahead: bool) -> None:
        self.both, self.ahead = both, ahead
        self.drawn: dict[int, list[int]] = {s: [] for s in range(n_sequences)}
        self.at = [0] * n_sequences
        self.states = [*range(n_sequences)]
        self.drafts: list[dict[int, list[int]]] = []
        self.reported: list[list[int]] = []  # by the first stage: what it started with
        prompts = [Slice(s, 0, ids[: 5 + s], True, num_draft_tokens=N_DRAFTS) for s in self.drawn]
        self.send(Step(1, 1, [one for s in self.drawn for one in opening(both.spec, s, GREEDY)], prompts))
        for _ in range(ROUNDS):
            self.verify(self.answered())
        self.answered()
        self.drafted()

    def send(self, step: Step) -> None:
        self.step = step
        for stage in (0, 1):
            self.both.post(step, stage)
        self.both.links[1].send(encode(DraftStep(step), step.step_id, 2))

    def result(self, stage: int) -> StepResult:
        result = self.both.answer(min(stage, 1))
        assert isinstance(result, StepResult)
        assert result.stage == stage
        return result

    def answered(self) -> list[Operation]:
        """Wait for the verdict; the operations that follow from it."""
        self.reported.append([one.token for one in self.result(0).sampled])
        if self.ahead and len(self.reported) > 1:
            self.drafted()  # told before the first stage started
        sampled, operations = self.result(1).sampled, list[Operation]()
        for piece in self.step.slices:
            drawn = [one.token for one in sampled if one.sequence == piece.sequence]
            self.drawn[piece.sequence] += drawn
            self.at[piece.sequence] += piece.n_context + len(drawn) - 1
            if piece.states:
                self.states[piece.sequence] = piece.states[len(drawn) - 1]
                operations.append(UseState(piece.sequence, self.states[piece.sequence]))
        return operations

    def drafted(self) -> None:
        self.drafts.append({one.sequence: one.tokens for one in self.result(2).drafts})

    def verify(self, operations: list[Operation]) -> None:
        number = self.step.step_id + 1
        if not self.ahead:
            self.drafted()
        slices = []
        for s, drawn in self.drawn.items():
            drafts = [PENDING] * N_DRAFTS if self.ahead else self.drafts[-1][s]
            others = [i for i in range(8 * s + 8, 8 * s + 16) if i != self.states[s]][:N_DRAFTS]
            tokens, states = [drawn[-1], *drafts], [self.states[s], *others]
            slices.append(Slice(s, self.at[s], tokens, True, N_DRAFTS, states, num_draft_tokens=N_DRAFTS))
        drafts_of = self.step.step_id if self.ahead else 0
        self.send(Step(number, number % N_REGIONS, operations, slices, drafts_of=drafts_of))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n_sequences", "spin_s"), [(2, 0.0), (1, 0.05)])
def test_tokens_and_drafts_are_those_of_steps_that_wait(
    spin_s: float, n_sequences: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is Backend.CPU:
        for place in ("runner", "async_output", "draft.stage"):
            monkeypatch.setattr(f"daemons.{place}.recorded", lambda *_, **__: LateTimedEvent())
    spec, ids = open_spec(MTP), opened("qwen35").ids
    wanted = plain_tokens(Daemon.of(spec, ids, backend, [GREEDY] * n_sequences), (ROUNDS + 1) * (N_DRAFTS + 1))
    draft_partly_right(monkeypatch, wanted)
    found = []
    for ahead in (False, True):
        with two_stages(spec, backend, spin_s, MTP) as both:
            both.runners[1].defers_drafts = spin_s > 0  # as on a GPU
            found.append(Supervisor(both, ids, n_sequences, ahead=ahead))
    seen, unseen = found
    assert unseen.drawn == seen.drawn
    assert unseen.drafts == seen.drafts
    for s, drawn in seen.drawn.items():
        assert drawn == wanted[s][: len(drawn)]
        assert len(drawn) > ROUNDS + 1  # some drafts were accepted
    assert seen.reported == [[]] * (ROUNDS + 1)
    started_with = [[token for own in drafts.values() for token in own] for drafts in unseen.drafts[:-1]]
    assert unseen.reported == [[], *started_with]


# ---- the token ring


N_RING_REGIONS = 4
VOCABULARY = 200


@pytest.fixture
def arena() -> Iterator[Arena]:
    last = Arena.create(ArenaPlan(1, token_region_bytes(3, 4), N_RING_REGIONS, tokens=True))
    yield last
    last.close()


@pytest.fixture
def rings(arena: Arena) -> Iterator[tuple[TokenRing, TokenRing]]:
    first = Arena.attach(os.dup(arena.fd), arena.plan, os.dup(arena.wake_fd))
    yield TokenRing(arena, VOCABULARY), TokenRing(first, VOCABULARY)
    first.close()


def rung(tokens: SharedBuffer, region: int, step_id: int, posted: bool) -> float:
    assert tokens.rung(region, step_id)
    return 0.25


def decode(step_id: int, *sequences: int) -> Step:
    return Step(step_id, step_id % N_RING_REGIONS, [], [Slice(s, 40, [7], sample=True) for s in sequences])


def publish(end: TokenRing, step: Step, *sampled: Sampled) -> None:
    end.publish(step, StepResult(step.step_id, 1, [*sampled]))


def following(step_id: int, depends_on_step: int, *sequences: int) -> Step:
    slices = [Slice(s, 41, [PENDING], sample=True) for s in sequences]
    return Step(step_id, step_id % N_RING_REGIONS, [], slices, depends_on_step=depends_on_step)


def test_a_step_starts_from_the_tokens_of_the_step_it_follows(rings: tuple[TokenRing, TokenRing]) -> None:
    last, first = rings
    publish(last, decode(5, 9, 2, 4), Sampled(9, 100), Sampled(2, 101), Sampled(4, 102))
    publish(last, decode(6, 1), Sampled(1, 55))
    one = RunAheadStep(first, following(8, 5, 4, 9), rung)
    metadata = torch.full((6,), -7)
    one(metadata)
    one(metadata)  # a graph is captured, then replayed
    assert metadata.tolist() == [102, 100, -7, -7, -7, -7]
    assert one.tokens == [Sampled(4, 102), Sampled(9, 100)]
    assert one.arrival.hop_s == 0.25
    all_of_them = RunAheadStep(first, following(8, 5, 9, 2, 4), rung)
    all_of_them(metadata)
    assert metadata.tolist() == [100, 101, 102, -7, -7, -7]
    assert all_of_them.tokens == [Sampled(9, 100), Sampled(2, 101), Sampled(4, 102)]


def test_what_nobody_sampled_is_refused(rings: tuple[TokenRing, TokenRing]) -> None:
    last, first = rings
    publish(last, decode(5, 9), Sampled(9, 100))
    with pytest.raises(StateError, match="has no token for the sequences"):
        RunAheadStep(first, following(6, 5, 9, 2), rung)(torch.zeros(2))
    with pytest.raises(StateError, match="was not posted"):
        RunAheadStep(first, following(6, 5, 9), None)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
@pytest.mark.parametrize("fill", [RunAheadStep.put, RunAheadStep.queue])
def test_an_id_outside_the_vocabulary_is_not_embedded(
    fill: Callable[[RunAheadStep, torch.Tensor], None], token: int, rings: tuple[TokenRing, TokenRing]
) -> None:
    last, first = rings
    publish(last, decode(5, 9, 2), Sampled(9, 100), Sampled(2, token))
    with pytest.raises(StateError, match=rf"step 5: token: id {token} is not one of 200"):
        fill(RunAheadStep(first, following(6, 5, 9), rung), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("head", [(-1, 1), (0, 0), (1, 2**40), (2**40, 1)])
def test_a_count_beyond_the_region_is_refused(
    head: tuple[int, int], arena: Arena, rings: tuple[TokenRing, TokenRing]
) -> None:
    last, first = rings
    publish(last, decode(5, 9), Sampled(9, 100))
    arena.region(5 % N_RING_REGIONS).cast("q")[:2] = memoryview(array("q", head))
    with pytest.raises(StateError, match="have no room in it"):
        first.read(5)
