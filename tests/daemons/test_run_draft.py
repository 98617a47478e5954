"""A daemon's draft stage gets the captures and the sampled tokens of each step, from this daemon and from others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.errors import LoadError, StateError
from daemons.models.stage import LoadedStage
from daemons.runner import ModelRunner
from daemons.sampling import Sampler
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.arena import Arena, descriptors
from lucevisor.protocol.loading import (
    ArenaPlan,
    CaptureSource,
    DeviceUse,
    DraftKind,
    DraftPlan,
    Load,
    ShardPlan,
    StagePlan,
)
from lucevisor.protocol.steps import (
    CloseSequence,
    Drafted,
    DraftStep,
    OpenSequence,
    Operation,
    Sampling,
    SetPages,
    Slice,
    Step,
    ZeroState,
)
from tests.families.golden import Golden, opened
from tests.families.pipeline import load_stages, pools_of

LAYERS = [0, 2, 3, 7]
CUT = 3


class Recorder:
    """Stands for a drafter: keeps what it is given, and drafts the token sampled last."""

    def __init__(self) -> None:
        self.device, self.kernels = torch.device("cpu"), {"cpu drafter": "none"}
        self.spec = SimpleNamespace(files=SimpleNamespace(identities=[]))
        self.graphs = None
        self.cold = False
        self.operations: list[Operation] = []
        self.steps: list[object] = []

    def has_extended(self, step: Step) -> bool:
        return False

    def prepare(self, step: Step, goes_on: Callable[[], bool]) -> None:
        pass

    def apply(self, operations: Sequence[Operation]) -> None:
        self.operations += operations

    def run(
        self, step: Step, captures: Sequence[Tensor], tokens: Sequence[Sequence[int]], *, defer: bool = False
    ) -> list[Drafted]:
        self.steps.append((step.step_id, [rows.clone() for rows in captures], [list(t) for t in tokens]))
        return [
            Drafted(s.sequence, t[-1:]) for s, t in zip(step.slices, tokens, strict=True) if s.num_draft_tokens and t
        ]

    def reset(self) -> None:
        self.steps.append("reset")

    def usage(self) -> list[DeviceUse]:
        return [DeviceUse(0, LayerRange(0, 1), 11, 22, 33)]


@pytest.fixture(autouse=True)
def drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(runner: ModelRunner, _: object) -> Recorder:
        runner._draft = Recorder()
        return runner._draft

    monkeypatch.setattr(ModelRunner, "_load_draft", load)


class Reporter:
    def progress(self, _: object) -> None:
        pass

    def log(self, level: str, event: str, **fields: object) -> None:
        pass


@pytest.fixture
def golden() -> Golden:
    return opened("qwen35")


def draft_plan(*arenas: int | None) -> DraftPlan:
    """Stage 0 has layers before CUT, stage 1 the others."""
    own = [[i for i in LAYERS if i < CUT], [i for i in LAYERS if i >= CUT]]
    sources = [CaptureSource(stage, own[stage], arena) for stage, arena in enumerate(arenas)]
    return DraftPlan(2, DraftKind.DFLASH, ["none"], 0, LayerRange(0, 1), sources)


def stage_plan(
    golden: Golden, stage: int, *, source: int | None, target: int | None, captures: int | None
) -> StagePlan:
    layers = LayerRange(0, CUT) if stage == 0 else LayerRange(CUT, golden.spec.n_layers)
    taken = [i for i in LAYERS if i in layers]
    return StagePlan(stage, [ShardPlan(0, layers)], source, target, stage == 0, stage == 1, taken, captures)


class Daemons:
    """Runners of several daemons over the same arenas."""

    def __init__(self, golden: Golden, arenas: Sequence[ArenaPlan]) -> None:
        self.golden = golden
        self.arenas = [Arena.create(plan) for plan in arenas]

    def runner(
        self, stages: list[StagePlan], used: list[int], draft: DraftPlan | None
    ) -> tuple[ModelRunner, list[DeviceUse]]:
        """``used``: its arenas, in the order of its Load."""
        load = Load(
            files=[str(path) for path in self.golden.spec.files.paths],
            dtype=Dtype.FLOAT32,
            kv_dtype=Dtype.FLOAT32,
            stages=stages,
            arenas=[self.arenas[i].plan for i in used],
            pools=pools_of(self.golden.spec),
            max_sequences=4,
            max_step_tokens=80,
            draft=draft,
        )
        fds = [os.dup(fd) for fd in descriptors([self.arenas[i] for i in used])]
        runner, loaded = ModelRunner.load(load, Backend.CPU, fds, Reporter())
        return runner, [loaded.draft] if loaded.draft is not None else []


def arena_plan(golden: Golden, boundary: int, n_columns: int, capture: bool) -> ArenaPlan:
    return ArenaPlan(boundary, 80 * n_columns * 4, 4, capture)


def boundary(golden: Golden) -> ArenaPlan:
    return arena_plan(golden, 0, golden.spec.boundary_width, capture=False)


def captured(golden: Golden, stage: int) -> ArenaPlan:
    n = len([i for i in LAYERS if (i < CUT) == (stage == 0)])
    return arena_plan(golden, stage, n * golden.spec.hidden_size, capture=True)


@pytest.fixture(params=["same daemon", "with the output stage", "alone"])
def daemons(request: pytest.FixtureRequest, golden: Golden) -> Iterator[tuple[ModelRunner, ...]]:
    """The runners of stage 0, stage 1 and the draft stage."""
    made = Daemons(golden, [boundary(golden), captured(golden, 0), captured(golden, 1)])
    plans = {"source": None, "target": 0}, {"source": 0, "target": None}
    if request.param == "same daemon":
        stages = [stage_plan(golden, i, **plans[i], captures=None) for i in (0, 1)]
        runner, _ = made.runner(stages, [0], draft_plan(None, None))
        yield runner, runner, runner
    elif request.param == "with the output stage":
        first, _ = made.runner([stage_plan(golden, 0, **plans[0], captures=1)], [0, 1], None)
        second, _ = made.runner([stage_plan(golden, 1, **plans[1], captures=None)], [0, 1], draft_plan(1, None))
        yield first, second, second
    else:
        first, _ = made.runner([stage_plan(golden, 0, **plans[0], captures=1)], [0, 1], None)
        second, _ = made.runner([stage_plan(golden, 1, **plans[1], captures=1)], [0, 2], None)
        third, uses = made.runner([], [1, 2], draft_plan(0, 1))
        assert uses == Recorder().usage()
        assert len(third.free_bytes()) == 1
        yield first, second, third


def step(number: int, start: int, tokens: list[int], n_drafts: int = 0, **more: object) -> Step:
    states = list(range(n_drafts + 1)) if n_drafts else []
    slices = [Slice(5, start, tokens, True, n_drafts, states, num_draft_tokens=3)]
    return Step(number, number % 4, slices=slices, **more)  # type: ignore[arg-type]


def opening(golden: Golden) -> list[Operation]:
    return [OpenSequence(5, 0, Sampling(temperature=0)), ZeroState(0), SetPages(5, Space.FULL, 0, [7, 3])]


def test_captures_and_tokens_of_each_step(
    daemons: tuple[ModelRunner, ModelRunner, ModelRunner], golden: Golden
) -> None:
    """Two steps are in flight: both run on all stages before the draft stage runs the first."""
    first, second, third = daemons
    ids = golden.ids
    steps = [step(8, 0, ids[:30], operations=opening(golden)), step(9, 30, [ids[30], ids[31], ids[32]], 2)]
    whole = golden.pipeline(load_stages(golden.spec))
    whole.open(5)
    wanted, sampled = [], []
    for one in steps:
        logits = whole.verify((5, one.slices[0].tokens, one.slices[0].n_drafts), want_hidden=True)
        wanted.append([whole.hidden[i + 1] for i in LAYERS])
        first.run_step(one, 0, 0.0)
        sampled.append([s.token for s in second.run_step(one, 1, 0.0).result.sampled])
        assert sampled[-1][0] == int(logits[-1 - one.slices[0].n_drafts].argmax())
    for one, hidden, tokens in zip(steps, wanted, sampled, strict=True):
        answer = third.run_draft(DraftStep(one, None if second is third else [tokens]), 0.25).result
        assert (answer.step_id, answer.stage, answer.wait_s, answer.sampled) == (one.step_id, 2, 0.25, [])
        assert answer.drafts == [Drafted(5, tokens[-1:])]
        step_id, captures, given = third._draft.steps[-1]
        assert (step_id, given) == (one.step_id, [tokens])
        assert torch.equal(torch.cat(captures, dim=-1), torch.cat(hidden, dim=-1))
    assert third._draft.operations == opening(golden)


def test_answers_that_wait_are_sent_between_a_step_and_its_tokens(
    daemons: tuple[ModelRunner, ModelRunner, ModelRunner], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the supervisor is awake when the tokens come."""
    first, second, _ = daemons
    assert second._sampler is not None
    done, sample, logits = [], Sampler.sample, LoadedStage.logits
    monkeypatch.setattr(Sampler, "sample", lambda *a, **more: (done.append("drawn"), sample(*a, **more))[1])
    monkeypatch.setattr(LoadedStage, "logits", lambda *a: (done.append("logits"), logits(*a))[1])
    first.flush_answers = second.flush_answers = lambda: done.append("flushed")
    one = step(8, 0, golden.ids[:30], operations=opening(golden))
    first.run_step(one, 0, 0.0)
    second.run_step(one, 1, 0.0)
    assert done == ["logits", "flushed", "drawn"]


def test_a_step_with_upkeep_is_taken_along_without_a_message(
    daemons: tuple[ModelRunner, ModelRunner, ModelRunner], golden: Golden
) -> None:
    first, second, third = daemons
    one = replace(step(8, 0, golden.ids[:30], operations=opening(golden)), upkeep=True)
    first.run_step(one, 0, 0.0)
    second.run_step(one, 1, 0.0)
    first.keep_up(one, 0)
    second.keep_up(one, 1)
    if second is not third:
        assert third._draft.steps == []  # that is asked by messages
        return
    assert third._draft.operations == opening(golden)
    assert [number for number, *_ in third._draft.steps] == [8]
    assert third._draft.steps[0][2] == [[]]  # it drafts nothing
    after = Step(9, 1, [CloseSequence(5)])
    first.run_step(after, 0, 0.0)
    assert second.run_step(after, 1, 0.0).result.upkeep_s > 0
    assert not third._draft_inputs._kept.keys() - {9}


def test_steps_without_tokens_and_without_sampled_tokens(daemons: tuple[ModelRunner, ...], golden: Golden) -> None:
    first, second, third = daemons
    silent = Step(1, 0, opening(golden), [Slice(5, 0, golden.ids[:4], False)])
    for one, tokens in ((silent, [[]]), (Step(2, 1, [CloseSequence(5)]), [])):
        first.run_step(one, 0, 0.0)
        assert second.run_step(one, 1, 0.0).result.sampled == []
        assert third.run_draft(DraftStep(one, None if second is third else tokens), 0.0).result.drafts == []
    assert [number for number, *_ in third._draft.steps] == [1]
    assert third._draft.operations[-1] == CloseSequence(5)


def test_nothing_is_kept_of_steps_that_ran_or_were_reset(golden: Golden) -> None:
    made = Daemons(golden, [boundary(golden)])
    stages = [
        stage_plan(golden, 0, source=None, target=0, captures=None),
        stage_plan(golden, 1, source=0, target=None, captures=None),
    ]
    runner, _ = made.runner(stages, [0], draft_plan(None, None))

    def run(*numbers: int) -> None:
        for i in numbers:
            one = step(i, i, golden.ids[i : i + 1], operations=opening(golden) if i == 0 else [])
            for stage in (0, 1):
                runner.run_step(one, stage, 0.0)

    run(0, 1, 2)
    runner._draft.cold = True
    answer = runner.run_draft(DraftStep(step(1, 1, golden.ids[1:2])), 0.0)  # that of step 0 was never asked for
    assert answer.result.cold
    assert list(runner._draft_inputs._kept) == [2]
    for number in (0, 1, 3):
        with pytest.raises(StateError, match=f"draft step {number}: no sampled tokens for 1 slices"):
            runner.run_draft(DraftStep(step(number, 1, [4])), 0.0)
        with pytest.raises(StateError, match="stage 0 of this daemon has kept no captures of it"):
            runner.run_draft(DraftStep(step(number, 1, [4]), [[4]]), 0.0)
    with pytest.raises(StateError, match="2 lists of sampled tokens for 1 slices"):
        runner.run_draft(DraftStep(step(2, 2, golden.ids[2:3]), [[4], [5]]), 0.0)
    run(3)
    runner.reset()
    assert not runner._draft_inputs._kept
    assert runner._draft.steps[-1] == "reset"


def test_a_daemon_without_a_draft_stage_refuses_its_steps(golden: Golden) -> None:
    runner, _ = Daemons(golden, []).runner([], [], None)
    with pytest.raises(StateError, match="draft step 4: this daemon has no draft stage"):
        runner.run_draft(DraftStep(step(4, 0, [1])), 0.0)


def test_an_arena_for_captures_that_nobody_uses_is_refused(golden: Golden) -> None:
    with pytest.raises(LoadError, match="arena 0 for captures: 0 stages of this daemon write or read it"):
        Daemons(golden, [captured(golden, 0)]).runner([], [0], None)


def test_only_steps_that_ask_for_drafts_keep_the_next_one_waiting(
    daemons: tuple[ModelRunner, ModelRunner, ModelRunner], golden: Golden
) -> None:
    """Not those of a drafter that rests, which nobody tells the daemon of."""
    _, second, third = daemons
    [plan] = [plan for plan in second._plans.values() if plan.output]
    second._queues = True
    asking = step(8, 0, golden.ids[:30])
    silent = replace(asking, slices=[replace(asking.slices[0], num_draft_tokens=0)])
    assert second._may_queue(plan, asking) == (second is not third)
    assert second._may_queue(plan, silent)
    assert second._may_queue(plan, replace(silent, upkeep=True))
