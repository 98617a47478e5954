"""The recurrent gated delta net against the daemon's torch block."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from daemons.ops.triton.recurrent_delta_rule import recurrent_gated_delta_net
from daemons.ops.triton_operations import TritonOperations
from tests.kernels.delta_layers import DEVICE, Layer, form_of, make_states, one_by_one, only_last

HALVES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
N_STATES = 7


def layer(
    n_key: int = 2, n_value: int = 4, dim: int = 32, conv_width: int = 4, decay_rates: tuple[float, float] = (0.1, 8.0)
) -> Layer:
    """``decay_rates``: exp A of the first and of the last head."""
    return Layer.random(n_key, n_value, dim, conv_width, decay_rates, N_STATES)


def kernels(a: Layer, y: Tensor, ids: list[int]) -> Tensor:
    """Run the kernels; updates the states of ``a``."""
    return keeping(a, y, ids, only_last(ids, len(y) // len(ids)))


def keeping(a: Layer, y: Tensor, ids: list[int], kept: Tensor) -> Tensor:
    """Run the kernels from states ``ids``; the state after each token goes to its row in ``kept`` [B, n]."""
    out = recurrent_gated_delta_net(y, a.pools, torch.tensor(ids, device=DEVICE), kept, a.params)
    make_states(a.pools, ids, kept, TritonOperations())
    return out


def check(a: Layer, y: Tensor, ids: list[int]) -> Tensor:
    """Compare with the block, within the roundings of single tokens, as these kernels compute."""
    return a.check(partial(kernels, a), y, ids, one_by_one(a.net), form_of(a.net))


@pytest.mark.parametrize(
    ("n", "ids"), [(1, [3]), (1, [6, 1, 4, 0, 3]), (2, [5, 0, 2]), (3, [1, 0]), (4, [2]), (7, [4]), (16, [5, 3])]
)
def test_outputs_and_states_are_those_of_the_torch_form(n: int, ids: list[int]) -> None:
    a = layer(1, 2)
    y = a.inputs(n * len(ids))
    check(a, y, ids)


@pytest.mark.parametrize(
    ("n_key", "n_value", "dim", "conv_width"),
    [(2, 2, 32, 4), (1, 3, 64, 4), (2, 4, 128, 4), (3, 9, 16, 4), (2, 6, 48, 4), (2, 4, 20, 2), (1, 2, 32, 7)],
)
def test_any_heads_and_conv_width(n_key: int, n_value: int, dim: int, conv_width: int) -> None:
    a = layer(n_key, n_value, dim, conv_width)
    for ids in ([4], [4, 1]):
        y = a.inputs(2, seed=len(ids))
        check(a, y, ids)


@pytest.mark.parametrize("decay_rates", [(0.0, 0.0), (1e-6, 1e-3), (50.0, 500.0)])
def test_extreme_decays(decay_rates: tuple[float, float]) -> None:
    a = layer(1, 3, decay_rates=decay_rates)
    y = a.inputs(5, spread=6.0)
    y[:, -2 * a.params.n_value :] *= 2.0  # alpha and beta: both sides of where softplus and sigmoid are straight
    check(a, y, [1])


def test_tiny_queries_and_keys() -> None:
    """Lengths about the root of the epsilon in the l2 norm, and zeros."""
    a = layer(1, 2)
    a.conv_states.zero_()
    y = a.inputs(5, spread=3e-4)
    y[0] = 0.0
    check(a, y, [2])


def test_a_slow_decay_is_not_lost() -> None:
    """alpha + dt far below 0: softplus is about exp of it, of which 1 + exp keeps two bits."""
    a = layer(n_value=2, decay_rates=(3e5, 3e5))
    y = a.inputs(1)
    y[:, -4:-2] = -15.0 - a.params.dt_bias
    before = a.states[3].clone()
    y[:, -2:] = -80.0  # beta 0: S only shrinks
    check(a, y, [3])
    decay = a.states[3] / before
    assert bool(((decay > 0.90) & (decay < 0.92)).all())  # exp(-3e5 exp(-15)) is 0.912


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [1, 5])
def test_half_precision_is_rounded_only_at_the_end(dtype: torch.dtype, n: int) -> None:
    a = layer(1, 3, 64)
    y = a.inputs(2 * n).to(dtype)
    assert check(a, y, [6, 2]).dtype == dtype


def test_several_tokens_equal_single_steps_bit_for_bit() -> None:
    """Bit for bit, outputs and states, so that a draft's check may take the place of single steps."""
    ids, n = [4, 0], 5
    at_once = layer(1, 2)
    single, halves = at_once.twin(), at_once.twin()
    y = at_once.inputs(2 * n).view(2, n, -1)
    out = kernels(at_once, y.reshape(2 * n, -1), ids).view(2, n, -1)
    for i in range(n):
        assert torch.equal(kernels(single, y[:, i], ids), out[:, i])
    for part in (slice(0, 2), slice(2, n)):
        kernels(halves, y[:, part].reshape(-1, y.shape[-1]), ids)
    for other in (single, halves):
        assert torch.equal(other.states, at_once.states)
        assert torch.equal(other.conv_states, at_once.conv_states)


KEPT = {
    "all, the live one first": (2, [[2, 0, 5, 1, 6]]),
    "all, the live one last": (6, [[2, 0, 5, 1, 6]]),
    "all, the live one amid them": (0, [[2, 0, 5, 1, 6]]),
    "all others": (3, [[2, 0, 5, 1, 6]]),
    "those after the last tokens": (4, [[-1, -1, 4, 0, 6]]),
    "of some tokens": (4, [[-1, 1, -1, 4, -1]]),
    "none": (4, [[-1, -1, -1]]),
    "of several slices": ([5, 1], [[5, 0, 3], [2, 1, 6]]),
    "of some slices": ([5, 1, 0], [[5, 4, 3], [-1, -1, 1], [-1, -1, 6]]),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("conv_width", [2, 4, 7])
def test_states_after_each_token_are_those_of_single_steps_bit_for_bit(name: str, conv_width: int) -> None:
    """The state that a slice reads may be among those it writes, after any token; other rows do not change."""
    live, kept = KEPT[name]
    ids, n = live if isinstance(live, list) else [live], len(kept[0])
    a = layer(1, 3, 16, conv_width)
    single, wanted = a.twin(), a.twin()
    y = a.inputs(n * len(ids)).view(len(ids), n, -1)
    out = keeping(a, y.flatten(0, 1), ids, torch.tensor(kept, device=DEVICE)).view(len(ids), n, -1)
    for token in range(n):
        assert torch.equal(kernels(single, y[:, token], ids), out[:, token])
        for state, rows in zip(ids, kept, strict=True):
            if rows[token] >= 0:
                wanted.states[rows[token]] = single.states[state]
                wanted.conv_states[rows[token]] = single.conv_states[state]
    assert torch.equal(a.states, wanted.states)
    assert torch.equal(a.conv_states, wanted.conv_states)


def test_other_states_do_not_change() -> None:
    a = layer()
    before = a.conv_states.clone(), a.states.clone()
    kernels(a, a.inputs(4), [5, 2])
    for old, new in zip(before, (a.conv_states, a.states), strict=True):
        changed = (old != new).flatten(1).any(dim=1)
        assert changed.tolist() == [False, False, True, False, False, True, False]


def test_rows_of_a_wider_batch() -> None:
    """The columns of a product that made more, a part of its rows, ids within another tensor: as a step cuts them."""
    a = layer()
    y = a.inputs(6)
    wide = torch.nn.functional.pad(y, (0, 5, 1, 0), value=float("nan"))
    ids = torch.tensor([0, 3, 1], device=DEVICE)[1:]

    def run(*_: object) -> Tensor:
        rows, kept = wide[1:, : a.params.columns], only_last([3, 1], 3)
        return recurrent_gated_delta_net(rows, a.pools, ids, kept, a.params)

    a.check(run, y, [3, 1], one_by_one(a.net))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: no graph to capture")
def test_a_graph_reads_ids_at_replay() -> None:
    a = layer(2, 6, 128)
    y, ids, kept = a.inputs(3), torch.tensor([0], device=DEVICE), only_last([0], 3)
    kernels(a, y, [6])  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = recurrent_gated_delta_net(y, a.pools, ids, kept, a.params)
    for state in (4, 1):
        ids.fill_(state)
        kept.copy_(only_last([state], 3))
        y.copy_(a.inputs(3, seed=state))

        def run(*_: object) -> Tensor:
            graph.replay()
            return got

        a.check(run, y, [state], one_by_one(a.net))
