"""Steps whose tokens the step before samples: the daemon puts them in place, and may queue both on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from daemons.deferred import PlaceholderFill
from daemons.errors import StateError
from daemons.runner import ModelRunner
from daemons.sampling import Sampler
from daemons.step_output import StepOutput
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import (
    PENDING,
    Drafted,
    DraftStep,
    OpenSequence,
    Operation,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    ZeroState,
)
from tests.families.golden import opened
from tests.families.pipeline import pools_of
from tests.model.drafter_files import DFLASH2, MTP, TARGET, UPSTREAM

GREEDY, PLAIN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3)
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
    for space in spec.spaces():
        recurrent = space is Space.RECURRENT
        operations.append(ZeroState(sequence) if recurrent else SetPages(sequence, space, 0, [sequence]))
    return operations


@dataclass
class Daemon:
    """All layers of a model in one runner, and a drafter; ``waiting``: the step on the device."""

    runner: ModelRunner
    waiting: StepOutput | None = None
    drafting: DraftStep | None = None  # behind it
    drafted: list[Drafted] = field(default_factory=list)
    n_deferred: int = 0
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
        output = self.runner.run_step(step, 0, 0.0, queued=self.settle)
        assert self.waiting is None
        self.waiting, self.drafting = output, DraftStep(step)
        self.n_deferred += output.deferred is not None
        if output.deferred is None:
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
    assert (ahead.n_deferred == ahead.n_steps) == on_device
    assert on_device or mix == "of all kinds" or not ahead.n_deferred


DRAFTERS = {
    "dflash": (UPSTREAM, DraftKind.DFLASH),
    "dflash2": (DFLASH2, DraftKind.DFLASH),
    "qwen35_mtp_draft": (MTP, DraftKind.MTP),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_is_not_asked_gets_the_rows_of_steps_that_ran_ahead(name: str, backend: Backend) -> None:
    spec = open_spec(MTP if name == "qwen35_mtp_draft" else TARGET)
    ids = opened("qwen35").ids
    known, ahead = (Daemon.of(spec, ids, backend, [GREEDY] * 3, DRAFTERS[name]) for _ in range(2))
    at = [5, 6, 7]
    for order in [(0, 1, 2), (1, 0, 2)] * 4:
        known.settle()
        known.run([Slice(s, at[s], [known.drawn[s][-1]], True) for s in order])
        ahead.run([Slice(s, at[s], [PENDING], True) for s in order])
        at = [n + 1 for n in at]
    for one in (known, ahead):
        one.settle()
        assert not one.drafted
    ahead.run([Slice(s, at[s], [ahead.drawn[s][-1]], True, num_draft_tokens=3) for s in range(3)])
    known.run([Slice(s, at[s], [known.drawn[s][-1]], True, num_draft_tokens=3) for s in range(3)])
    for one in (known, ahead):
        one.settle()
    assert ahead.drawn == known.drawn
    assert [one.tokens for one in ahead.drafted] == [one.tokens for one in known.drafted]
    assert all(len(one.tokens) == 3 for one in ahead.drafted)


def test_a_token_that_nobody_sampled_is_refused() -> None:
    sampler = Sampler(9, torch.device("cpu"))
    sampler.open(4, GREEDY, [])
    with pytest.raises(StateError, match="sequence 4 at 17"):
        sampler.known(Step(1, 0, [], [Slice(4, 17, [PENDING], True)]))


def test_neighbours_are_filled_by_one_copy() -> None:
    fill = PlaceholderFill.of(torch.tensor([50, 51, 52, 53]), [(0, 1), (1, 2), (3, 3), (4, 0)])
    assert fill.runs == [(0, 1, 2), (3, 3, 1), (4, 0, 1)]
    metadata = torch.zeros(6, dtype=torch.int64)
    fill(metadata)
    assert metadata.tolist() == [51, 52, 0, 53, 50, 0]
