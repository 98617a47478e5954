"""The gated delta net's block keeps the state after each token, or what makes it, as single steps of it do, within
rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from daemons.device import CPU
from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.operations import TorchOperations
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import OpenSequence, Sampling, Slice
from tests.kernels.delta_layers import Layer, make_states, one_by_one
from tests.kernels.limits import assert_within
from tests.numerics import UNIT

N_STATES = 40
SIZES = PoolSizes(full_pages=0, window_pages=0, states=N_STATES)


def run(a: Layer, y: Tensor, slices: list[Slice], live: dict[int, int]) -> Tensor:
    """The block on a step of ``slices`` with input columns y [T, ...]; states go to and from the layer's pools."""
    tensors = (
        StateTensor("conv", tuple(a.conv_states.shape[1:]), Dtype.FLOAT32),
        StateTensor("delta", tuple(a.states.shape[1:]), Dtype.FLOAT32),
    )
    layers = (LayerSpec(0, Space.RECURRENT, {}, tensors),)
    spec = ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 16, None)
    sequences = Sequences([Pools(spec, LayerRange(0, 1), CPU, Dtype.FLOAT32, SIZES)], SIZES, len(slices))
    for s in slices:
        sequences.apply(OpenSequence(s.sequence, live[s.sequence], Sampling()))
    a.net.convolution, a.net.states, a.net.updates = a.pools
    layout = Layout(slices, sequences, spec)
    batch = Batch(layout, sequences.tables(CPU), layout.on(CPU))
    return batch.map_groups(a.net._mix, y)


def layer(n_key: int, n_value: int, dim: int, conv_width: int) -> Layer:
    return Layer.random(n_key, n_value, dim, conv_width, (0.1, 8.0), N_STATES)


def check_kept(a: Layer, y: Tensor, slices: list[Slice], live: dict[int, int]) -> None:
    """Every state and window kept, and every output, is what single steps from the live state make.  Of slices that
    keep one after each token states are not written, but made of updates.
    """
    wanted, at = [], 0
    for s in slices:
        n = len(s.tokens)
        prefixes = range(1, n + 1)
        wanted.append([a.bounds(y[at : at + i], [live[s.sequence]], one_by_one(a.net)) for i in prefixes])
        at += n
    before = a.twin()
    found = run(a, y, slices, live)
    at, written = 0, set()
    for s in slices:
        if len(s.states) == len(s.tokens) > 1:
            assert torch.equal(a.states[s.states], before.states[s.states])
            make_states(a.pools, [live[s.sequence]], torch.tensor([s.states]), TorchOperations())
    for s, bounds in zip(slices, wanted, strict=True):
        n = len(s.tokens)
        assert_within(found[at : at + n][None], bounds[-1][0], what="the output")
        for state, (_, windows, matrices) in zip(s.states, bounds[n - len(s.states) :], strict=True):
            assert torch.equal(a.conv_states[[state]].double(), windows)
            assert_within(a.states[[state]], matrices, what=f"state {state}")
        at, written = at + n, written | set(s.states)
    rest = [i for i in range(N_STATES) if i not in written]
    assert torch.equal(a.states[rest], before.states[rest])
    assert torch.equal(a.conv_states[rest], before.conv_states[rest])


@pytest.mark.parametrize("n", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("first", ["the live one", "the live one is last", "another"])
def test_states_after_each_token_of_one_slice(n: int, first: str) -> None:
    states = list(range(30, 30 - n, -1))
    live = {"the live one": states[0], "the live one is last": states[-1], "another": 3}[first]
    a = layer(2, 4, 16, 4)
    check_kept(a, a.inputs(n), [Slice(7, 0, [1] * n, True, 0, states)], {7: live})


@pytest.mark.parametrize(("n_key", "n_value", "dim", "conv_width"), [(1, 3, 8, 2), (2, 2, 20, 7)])
def test_context_before_the_tokens_whose_states_are_kept(n_key: int, n_value: int, dim: int, conv_width: int) -> None:
    a = layer(n_key, n_value, dim, conv_width)
    check_kept(a, a.inputs(9), [Slice(7, 0, [1] * 9, True, 0, [2, 9, 4])], {7: 2})


def test_slices_of_one_step() -> None:
    """Three that keep five states, and one that keeps two of them."""
    a = layer(2, 4, 16, 4)
    live = {0: 8, 1: 20, 2: 5, 3: 31}
    states = {0: [8, 9, 1, 2, 3], 1: [20, 0, 39, 11, 12], 2: [15, 5, 16, 17, 18], 3: [31, 30]}
    slices = [Slice(s, 0, [1] * 5, True, 0, states[s]) for s in (2, 0, 3, 1)]
    check_kept(a, a.inputs(20), slices, live)


def test_the_numbers_are_those_of_single_steps_but_for_the_convolution() -> None:
    """Given the same convolution: so a verify slice differs from plain decoding by what products of rows do only."""
    a = layer(2, 4, 16, 4)
    a.net.w.conv_weight[:-1] = 0.0  # of one term, in whatever order
    single, y, n = a.twin(), a.inputs(6), 6
    found = run(a, y, [Slice(0, 0, [1] * n, True, 0, list(range(n)))], {0: 0})
    make_states(a.pools, [0], torch.arange(n)[None], TorchOperations())
    for i in range(n):
        assert torch.equal(run(single, y[i : i + 1], [Slice(0, 0, [1], True)], {0: 0})[0], found[i])
        # exp and its products are rounded otherwise in the tail of a processor's vectors
        assert (single.states[0] - a.states[i]).abs().max() <= 8 * (i + 1) * UNIT * a.states[i].abs().max()
