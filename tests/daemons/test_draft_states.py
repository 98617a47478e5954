"""Ids of drafts' states: rows of updates and of windows, and no state; what is made of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.device import CPU
from daemons.errors import StateError
from daemons.kv.batch import Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.delta_rule import apply_updates
from lucevisor.model.families import open_spec
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor, update_width
from lucevisor.model.values import Dtype, LayerRange, Space, Tier
from lucevisor.protocol.loading import PoolSizes, StatePlace
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyState,
    OpenSequence,
    Operation,
    SamplingParams,
    Slice,
    UseState,
    ZeroState,
)
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.families.pipeline import How, Pipeline, load_stages

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
SIZES = PoolSizes(full_pages=0, window_pages=0, states=6, host_states=2, draft_states=5)
LIVE, OTHER, FREE = 1, 3, 2
DRAFTS, HOSTS = range(4, 9), range(9, 11)
KEPT = [LIVE, 6, 4, 8]
N_KEY, N_VALUE, DIM = 1, 2, 16
LAYERS = 3


def model() -> ModelSpec:
    width = update_width(N_KEY, N_VALUE, DIM)
    state = (
        StateTensor("conv", (3, 8), Dtype.FLOAT32),
        StateTensor("delta", (N_VALUE, DIM, DIM), Dtype.FLOAT32, width),
    )
    layers = tuple(LayerSpec(i, Space.RECURRENT, {}, state) for i in range(LAYERS))
    return ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 16, None)


class Verified:
    """Pools in which a verify slice of sequence 1 left ``KEPT``; sequence 3 has another state."""

    def __init__(self) -> None:
        self.pools = Pools(model(), LayerRange(0, LAYERS), CPU, Dtype.FLOAT32, SIZES)
        torch.manual_seed(0)
        for i in range(LAYERS):
            for rows in (self.pools.state(i, "delta"), self.pools.state(i, "conv"), self.pools.updates.of_layer(i)):
                rows.normal_()
        self.sequences = Sequences([self.pools], SIZES, 3)
        self.apply(OpenSequence(1, LIVE, SamplingParams()), OpenSequence(3, OTHER, SamplingParams()))
        self.sequences.record_updates([Slice(1, 0, [1] * 4, True, 3, KEPT)])
        self.wanted, self.windows = self.matrices(), self.stacked("conv")
        self.updates = torch.stack([self.pools.updates.of_layer(i) for i in range(LAYERS)])

    def apply(self, *operations: Operation) -> None:
        for operation in operations:
            self.sequences.apply(operation)

    def stacked(self, name: str) -> torch.Tensor:
        return torch.stack([self.pools.state(i, name) for i in range(LAYERS)])

    def matrices(self) -> torch.Tensor:
        return self.stacked("delta")

    def expect(self, n_tokens: int) -> None:
        """The live state is that after so many tokens of the slice, and nothing else changes."""
        apply_updates(self.wanted, self.updates, LIVE, torch.tensor(KEPT[:n_tokens]), LIVE)
        if n_tokens:
            self.windows[:, LIVE] = self.windows[:, KEPT[n_tokens - 1]]

    def check(self) -> None:
        assert torch.equal(self.matrices(), self.wanted)
        assert torch.equal(self.stacked("conv"), self.windows)
        assert self.sequences.by_id[1].state == LIVE


def test_ids_and_rows() -> None:
    pools = Verified().pools
    assert pools.state(0, "delta").shape[0] == SIZES.device_states == 4
    assert pools.state(0, "conv").shape[0] == pools.updates.of_layer(0).shape[0] == SIZES.device_rows == 9
    per_layer = 4 * (4 * N_VALUE * DIM * DIM + 9 * (3 * 8 + update_width(N_KEY, N_VALUE, DIM)))
    assert pools.nbytes == LAYERS * per_layer
    assert pools.nbytes == LAYERS * sum(
        n * size
        for n, size in (
            (SIZES.device_states, model().layers[0].device_unit_bytes(Dtype.FLOAT32)),
            (SIZES.draft_states, model().layers[0].draft_state_bytes(Dtype.FLOAT32)),
        )
    )
    assert [i for i in range(-1, 12) if SIZES.is_draft_state(i)] == [*DRAFTS]
    assert [SIZES.place_of_state(i) for i in HOSTS] == [StatePlace(Tier.HOST, 0), StatePlace(Tier.HOST, 1)]


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
def test_the_state_that_is_used_is_made_in_place(n_tokens: int) -> None:
    one = Verified()
    one.apply(UseState(1, KEPT[n_tokens - 1]))
    one.expect(n_tokens)
    one.check()
    one.apply(UseState(1, KEPT[n_tokens - 1]), CloseSequence(3))  # once
    one.check()


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("target", [FREE, HOSTS[1]], ids=["device", "host"])
def test_a_copy_before_the_verdict_has_the_first_token(n_tokens: int, target: int) -> None:
    """As of a request that is preempted: the newest token always counts."""
    one = Verified()
    one.apply(CopyState(LIVE, target))
    one.expect(1)
    for i in range(LAYERS):
        for name, wanted in (("delta", one.wanted), ("conv", one.windows)):
            rows, at = one.pools.rows_with(i, name, target)
            assert torch.equal(rows[at], wanted[i, LIVE])
            if target == FREE:
                wanted[i, FREE] = wanted[i, LIVE]
    one.check()
    one.apply(UseState(1, KEPT[n_tokens - 1]))
    apply_updates(one.wanted, one.updates, LIVE, torch.tensor(KEPT[1:n_tokens], dtype=torch.int64), LIVE)
    one.windows[:, LIVE] = one.windows[:, KEPT[n_tokens - 1]]
    one.check()


@pytest.mark.parametrize("what", [Slice(1, 1, [1], True), CloseSequence(1)], ids=["a slice", "the end"])
def test_without_a_word_the_first_token_counts(what: Slice | Operation) -> None:
    one = Verified()
    if isinstance(what, Slice):
        one.sequences.commit_states([Slice(3, 0, [1], False), what])
    else:
        one.apply(what)
    one.expect(1)
    assert torch.equal(one.matrices(), one.wanted)


def test_a_rebuilt_stage_has_the_state_already() -> None:
    """Its sequences were computed up to there, and the operation is for the stages that were not lost."""
    one = Verified()
    one.sequences.record_updates([Slice(1, 0, [1] * 4, False)])
    one.apply(UseState(1, KEPT[2]))
    one.check()


def test_an_id_that_the_slice_did_not_leave_is_refused() -> None:
    one = Verified()
    with pytest.raises(StateError, match="left no state 5"):
        one.apply(UseState(1, 5))
    one.check()
    one.apply(UseState(1, KEPT[2]))
    one.expect(3)
    one.check()


def test_an_id_that_another_sequence_has_by_now_is_not_read() -> None:
    one = Verified()
    one.apply(UseState(1, LIVE))
    one.expect(1)
    one.sequences.record_updates([Slice(3, 0, [1, 1], True, 1, [OTHER, KEPT[2]])])
    one.apply(UseState(1, KEPT[2]))
    one.check()


@pytest.mark.parametrize(
    "operation",
    [
        OpenSequence(7, 4, SamplingParams()),
        ZeroState(4),
        CopyState(4, FREE),
        CopyState(LIVE, 4),
        CopyState(HOSTS[0], 8),
        UseState(3, HOSTS[0]),
        UseState(3, 11),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_what_is_nowhere_whole_is_refused(operation: Operation) -> None:
    one = Verified()
    with pytest.raises(StateError, match=r"draft's|host memory|outside the pool of 11"):
        one.apply(operation)
    one.check()


@pytest.mark.parametrize(
    ("n", "states"),
    [(1, [4]), (2, [4, 5]), (4, [LIVE, 4]), (3, [4, LIVE, 5]), (3, [FREE, 4, LIVE]), (2, [LIVE, HOSTS[0]])],
    ids=repr,
)
def test_slices_that_would_write_a_whole_state_there_are_refused(n: int, states: list[int]) -> None:
    one = Verified()
    with pytest.raises(StateError, match=r"draft's, and may only be|host memory"):
        Layout([Slice(1, 0, [1] * n, True, 0, states)], one.sequences, model())
    Layout([Slice(1, 0, [1] * 3, True, 2, [LIVE, 4, 5])], one.sequences, model())


@needs_cpu_kernels
@pytest.mark.parametrize("n_accepted", [0, 2, 5])
def test_a_model_goes_on_with_the_bits_of_single_tokens(n_accepted: int) -> None:
    """Over two stages, of whose layers one kernel each keeps updates."""
    spec = open_spec(DEMO)
    pipelines = [Pipeline(spec, load_stages(spec, (2,), How(Dtype.BFLOAT16, Dtype.BFLOAT16))) for _ in range(2)]
    tokens = [7, 300, 12, 45, 9, 80, 7, 41]
    logits = []
    for pipeline, at_once in zip(pipelines, (True, False), strict=True):
        pipeline.open(0)
        pipeline.run((0, [5, 6, 9]))
        if at_once:
            pipeline.verify((0, tokens[:6], 5))
            pipeline.accept(0, 5, n_accepted)
        else:
            for token in tokens[: n_accepted + 1]:
                pipeline.run((0, [token]))
        logits.append([pipeline.run((0, [token])) for token in (3, 8)])
    for found, wanted in zip(*logits, strict=True):
        assert torch.equal(found, wanted)
