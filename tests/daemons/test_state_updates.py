"""States that are made of what the tokens of a verify slice do to them: one of each slice, by whatever comes next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.device import CPU
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.delta_rule import apply_updates
from lucevisor.model.families import open_spec
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor, update_width
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CloseSequence, CopyState, OpenSequence, Operation, SamplingParams, Slice, UseState
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.families.pipeline import How, Pipeline, load_stages

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
SIZES = PoolSizes(full_pages=0, window_pages=0, states=9)
N_KEY, N_VALUE, DIM = 1, 2, 16
KEPT = [2, 5, 0, 7]
"""Rows of four tokens; the live state is the first one."""


def verified() -> tuple[Pools, Sequences]:
    """Sequence 1, whose last slice left updates in the rows ``KEPT``; 3 is another sequence's, at state 4."""
    width = update_width(N_KEY, N_VALUE, DIM)
    state = (StateTensor("delta", (N_VALUE, DIM, DIM), Dtype.FLOAT32, width),)
    layers = tuple(LayerSpec(i, Space.RECURRENT, {}, state) for i in range(3))
    spec = ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 16, None)
    pools = Pools(spec, LayerRange(0, 3), CPU, Dtype.FLOAT32, SIZES)
    torch.manual_seed(0)
    for i in range(3):
        pools.state(i, "delta").normal_()
        pools.updates.of_layer(i).normal_()
    sequences = Sequences([pools], SIZES, 2)
    sequences.apply(OpenSequence(1, KEPT[0], SamplingParams()))
    sequences.apply(OpenSequence(3, 4, SamplingParams()))
    sequences.record_updates([Slice(1, 0, [1] * 4, True, 3, KEPT), Slice(3, 0, [1, 1], False)])
    return pools, sequences


def contents(pools: Pools) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of states and updates, [layers, rows, ...]."""
    states = [pools.state(i, "delta") for i in range(3)]
    return torch.stack(states), torch.stack([pools.updates.of_layer(i) for i in range(3)])


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
def test_the_state_that_is_used_is_made(n_tokens: int) -> None:
    pools, sequences = verified()
    states, updates = contents(pools)
    sequences.apply(UseState(1, KEPT[n_tokens - 1]))
    apply_updates(states, updates, KEPT[0], torch.tensor(KEPT[:n_tokens]), KEPT[n_tokens - 1])
    assert torch.equal(contents(pools)[0], states)
    assert sequences.by_id[1].state == KEPT[n_tokens - 1]
    sequences.commit_states([Slice(1, 4, [1], True)])
    sequences.apply(CopyState(KEPT[n_tokens - 1], 8))
    states[:, 8] = states[:, KEPT[n_tokens - 1]]
    assert torch.equal(contents(pools)[0], states)  # once


@pytest.mark.parametrize("what", [Slice(1, 1, [1], True), CloseSequence(1)], ids=["a slice", "the end"])
def test_without_a_word_the_first_token_counts(what: Slice | Operation) -> None:
    pools, sequences = verified()
    states, updates = contents(pools)
    if isinstance(what, Slice):
        sequences.commit_states([Slice(3, 0, [1], False), what])
    else:
        sequences.apply(what)
    apply_updates(states, updates, KEPT[0], torch.tensor(KEPT[:1]), KEPT[0])
    assert torch.equal(contents(pools)[0], states)


@pytest.mark.parametrize("source", KEPT)
def test_a_copy_before_the_choice(source: int) -> None:
    """It is made, and the choice is still any of them."""
    pools, sequences = verified()
    states, updates = contents(pools)
    for i in (2, KEPT.index(source)):
        apply_updates(states, updates, KEPT[0], torch.tensor(KEPT[: i + 1]), KEPT[i])
    sequences.apply(CopyState(source, 8))
    states[:, 8] = states[:, source]
    sequences.apply(UseState(1, KEPT[2]))
    assert torch.equal(contents(pools)[0], states)


def test_slices_whose_states_were_written_leave_none() -> None:
    pools, sequences = verified()
    states, _ = contents(pools)
    for s in (Slice(3, 0, [1, 1, 1], True, 1, [4, 8]), Slice(3, 0, [1], True, 0, [4])):
        sequences.record_updates([s])
        sequences.apply(UseState(3, s.states[-1]))
        sequences.apply(UseState(3, 4))
    assert torch.equal(contents(pools)[0], states)


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
