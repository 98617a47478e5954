"""Steps whose tokens the step before samples: the daemon puts them in place, and may queue both on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from daemons.deferred import Fill
from daemons.errors import StateError
from daemons.runner import ModelRunner, StepOutput
from daemons.sampling import Sampler
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import PENDING, OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState
from tests.families.golden import Golden, opened
from tests.families.pipeline import pools_of

GREEDY, PLAIN = Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)
FILTERED = Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, seed=5)
SORTED = Sampling(temperature=0.7, typical_p=0.9, seed=7)
MIXES = {
    "greedy": [GREEDY] * 3,
    "plain": [PLAIN] * 3,
    "filtered": [FILTERED, Sampling(temperature=1.2, top_k=7, seed=9), FILTERED],
    "biased": [Sampling(temperature=0.0, logit_bias={5: 4.0}), GREEDY, Sampling(temperature=0.0, banned=(1, 2, 3))],
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


@dataclass
class Daemon:
    """All layers of a model in one runner; ``waiting``: the step on the device."""

    runner: ModelRunner
    waiting: StepOutput | None = None
    n_deferred: int = 0
    drawn: dict[int, list[int]] = field(default_factory=dict)
    n_steps: int = 0

    @classmethod
    def of(cls, golden: Golden, backend: Backend, samplings: list[Sampling]) -> Daemon:
        layers = LayerRange(0, golden.spec.n_layers)
        plan = StagePlan(0, [ShardPlan(0, layers)], None, None, embedding=True, output=True)
        files = [str(path) for path in golden.spec.files.paths]
        load = Load(files, Dtype.FLOAT32, Dtype.FLOAT32, [plan], [], pools_of(golden.spec), 4, 80)
        runner, _ = ModelRunner.load(load, backend, [], Reporter())
        found = cls(runner)
        for sequence, sampling in enumerate(samplings):
            operations: list[Operation] = [OpenSequence(sequence, sequence, sampling)]
            for space in golden.spec.spaces():
                one = ZeroState(sequence) if space is Space.RECURRENT else SetPages(sequence, space, 0, [sequence])
                operations.append(one)
            prompt = golden.ids[: 5 + sequence]
            found.run([Slice(sequence, 0, [*prompt], True)], operations)
            found.settle()
        return found

    def run(self, slices: list[Slice], operations: list[Operation] | None = None) -> None:
        self.n_steps += 1
        step = Step(self.n_steps, 0, operations or [], slices)
        output = self.runner.run_step(step, 0, 0.0, queued=self.settle)
        assert self.waiting is None
        self.waiting = output
        self.n_deferred += output.deferred is not None
        if output.deferred is None:
            self.settle()

    def settle(self) -> None:
        output, self.waiting = self.waiting, None
        if output is not None:
            for sampled in self.runner.settle(output).result.sampled:
                self.drawn.setdefault(sampled.sequence, []).append(sampled.token)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_those_of_steps_that_wait(mix: str, backend: Backend) -> None:
    golden = opened("qwen35")
    known, ahead = (Daemon.of(golden, backend, MIXES[mix]) for _ in range(2))
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


def test_a_token_that_nobody_sampled_is_refused() -> None:
    sampler = Sampler(9, torch.device("cpu"))
    sampler.open(4, GREEDY, [])
    with pytest.raises(StateError, match="sequence 4 at 17"):
        sampler.known(Step(1, 0, [], [Slice(4, 17, [PENDING], True)]))


def test_neighbours_are_filled_by_one_copy() -> None:
    fill = Fill.of(torch.tensor([50, 51, 52, 53]), [(0, 1), (1, 2), (3, 3), (4, 0)])
    assert fill.runs == [(0, 1, 2), (3, 3, 1), (4, 0, 1)]
    metadata = torch.zeros(6, dtype=torch.int64)
    fill(metadata)
    assert metadata.tolist() == [51, 52, 0, 53, 50, 0]
