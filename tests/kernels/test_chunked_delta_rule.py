"""The chunked gated delta net against the daemon's torch block, single tokens, and itself in two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from daemons.ops.delta_rule import CHUNK, convolve
from daemons.ops.triton import chunked_delta_rule, recurrent_delta_rule
from daemons.ops.triton.chunked_delta_rule import chunked_gated_delta_net
from daemons.ops.triton.recurrent_delta_rule import recurrent_gated_delta_net
from tests.kernels.delta_layers import DEVICE, Form, Layer, Results, form_of, one_by_one, only_last

HALVES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
N_STATES = 5


def rule_inputs(y: Tensor, left: Tensor, weights: Sequence[Tensor], n_key: int, dim: int) -> tuple[Tensor, ...]:
    """q, k [B, n, n_key, D], v [B, n, N, D], decay and beta [B, n, N] of y [B, n, columns], in the dtype of all."""
    conv_weight, decay_rates, dt_bias = weights
    b, n, channels = *y.shape[:2], conv_weight.shape[1]
    qkv, _, alpha, beta = y.split_with_sizes([channels, len(dt_bias) * dim, len(dt_bias), len(dt_bias)], dim=-1)
    heads = F.silu(convolve(qkv, left, conv_weight)[0]).view(b, n, -1, dim)
    q, k, v = heads.split_with_sizes([n_key, n_key, len(dt_bias)], dim=2)
    q, k = (x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return q * dim**-0.5, k, v, torch.exp(F.softplus(alpha + dt_bias) * decay_rates), torch.sigmoid(beta)


class TorchConv1d:
    """``causal_conv1d_kernel`` in torch: the interpreter takes 10 ms per head and token; others test the kernel."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self.launch

    def launch(self, *pointers: Any, **options: Any) -> None:
        y, qkv, gates, conv_states, ids, _, *weights, n, _ = pointers
        left = conv_states[ids]
        q, k, v, decay, beta = rule_inputs(
            y.float().reshape(len(ids), n, -1), left, weights, options["N_KEY"], options["DIM"]
        )
        qkv.copy_(torch.cat([q, k, v], dim=2).view(qkv.shape))
        gates.copy_(torch.stack([decay, beta], dim=-1).view(gates.shape))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(chunked_delta_rule, "causal_conv1d_kernel", TorchConv1d())


def layer(
    n_key: int = 1, n_value: int = 2, dim: int = 32, conv_width: int = 4, decay_rates: tuple[float, float] = (0.02, 2.0)
) -> Layer:
    """``decay_rates``: exp A of the first and of the last head."""
    a = Layer.random(n_key, n_value, dim, conv_width, decay_rates, N_STATES)
    return replace(a, precision=chunked_delta_rule._precision(torch.device(DEVICE)))


def kernels(a: Layer, y: Tensor, ids: list[int], offset: int = 0) -> Tensor:
    """Run the kernels; updates the states of ``a``."""
    pools, spans = (a.conv_states, a.states), spans_of(offset, len(y) // len(ids), len(ids))
    return chunked_gated_delta_net(y, *pools, torch.tensor(ids, device=DEVICE), spans, a.params)


def spans_of(offset: int, n: int, n_slices: int = 1) -> Tensor:
    """Of slices of n tokens."""
    return torch.tensor([[offset, n]] * n_slices, device=DEVICE)


def check(a: Layer, y: Tensor, ids: list[int], offset: int = 0, exact: Form | None = None) -> Tensor:
    """Compare with the block, or with ``exact``, within the roundings of products of decays."""

    def run(y: Tensor, ids: list[int]) -> Tensor:
        return kernels(a, y, ids, offset)

    return a.check(run, y, ids, form_of(a.chunks, offset), exact or form_of(a.net, offset))


@pytest.mark.parametrize(
    ("n", "offset", "ids"),
    [
        (17, 0, [3]),
        (17, 63, [0, 4]),  # one token in the first chunk
        (64, 0, [2, 1]),
        (64, 1, [1]),
        (65, 0, [4]),  # one token in the last chunk
        (27, 37, [2]),  # to the end of a chunk
        (130, 37, [1, 3, 0]),
        (200, 63, [0]),
        (3, 62, [3]),  # no longer than the window
    ],
)
def test_outputs_and_states_are_those_of_the_torch_form(n: int, offset: int, ids: list[int]) -> None:
    a = layer()
    y = a.inputs(n * len(ids))
    check(a, y, ids, offset)


@pytest.mark.parametrize(
    ("n_key", "n_value", "dim", "conv_width"),
    [(2, 2, 32, 4), (1, 3, 64, 4), (2, 4, 128, 4), (3, 9, 32, 4), (2, 2, 32, 2), (1, 2, 32, 7), (1, 1, 32, 4)],
)
def test_any_heads_and_conv_width(n_key: int, n_value: int, dim: int, conv_width: int) -> None:
    a = layer(n_key, n_value, dim, conv_width)
    y = a.inputs(70)
    check(a, y, [4], 20)


def test_a_slice_equals_its_tokens_one_by_one() -> None:
    a = layer()
    y = a.inputs(300)
    check(a, y, [2], 50, one_by_one(a.net))


def test_with_the_convolution_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_delta_rule, "causal_conv1d_kernel", recurrent_delta_rule.causal_conv1d_kernel)
    a = layer(1, 1)
    y = a.inputs(2 * 17)
    check(a, y, [3, 1], 59)


@pytest.mark.parametrize("decay_rates", [(0.0, 0.0), (1e-6, 1e-3), (50.0, 1000.0), (0.0, 1000.0)])
def test_extreme_decays(decay_rates: tuple[float, float]) -> None:
    a = layer(decay_rates=decay_rates)
    y = a.inputs(90, spread=3.0)
    y[:, -2 * a.params.n_value :] *= 2.0  # alpha and beta: both sides of where softplus and sigmoid are straight
    # one by one: the block adds the logarithms of decays up, which costs it digits when they are large
    check(a, y, [1], 10, one_by_one(a.net))


def test_no_digits_are_lost_after_a_token_that_resets_the_state() -> None:
    """Heads that keep almost all, but for tokens at which S becomes 0: sums of logarithms would be rough by then."""
    a = layer(decay_rates=(1e-2, 1e-2))
    y = a.inputs(80)
    y[:30, -4:-2] = 1e6  # alpha
    check(a, y, [1], exact=one_by_one(a.net))


def test_similar_keys() -> None:
    """The triangle of a chunk is then ones: its inverse is small, the powers of it are not."""
    a = layer(decay_rates=(0.0, 1e-4))
    y = a.inputs(1).expand(150, -1).clone()
    y[:, -2:] = 20.0  # beta 1
    y[:, 64:128] += a.inputs(150, seed=2)[:, 64:128]
    check(a, y, [1], 5, one_by_one(a.net))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    a = layer()
    y = a.inputs(2 * 40).to(dtype)
    assert check(a, y, [3, 2], 30).dtype == dtype


@pytest.mark.parametrize("cut", [17, 27, 64, 133])
def test_a_prompt_in_two_steps_equals_one_step(cut: int) -> None:
    n, offset = 150, 37
    whole = layer()
    parts, y = whole.twin(), whole.inputs(n)
    outputs, windows, matrices = whole.bounds(y, [4], form_of(whole.chunks, offset))
    out = kernels(whole, y, [4], offset)
    cuts = ((0, cut), (cut, n))
    found = torch.cat([kernels(parts, y[a:b], [4], (offset + a) % CHUNK) for a, b in cuts])
    outputs = outputs._replace(exact=out.double().view(outputs.exact.shape))
    parts.within(found, [4], (outputs, windows, matrices._replace(exact=whole.states[[4]].double())))


@pytest.mark.parametrize(
    ("n", "offset", "rows"), [(33, 0, 48), (33, 50, 48), (64, 1, 64), (70, 63, 96), (129, 37, 192), (3, 0, 48)]
)
def test_pad_rows_do_not_count(n: int, offset: int, rows: int) -> None:
    """Outputs of tokens, windows and states have the bits of a call without pad rows, whatever pad rows hold."""
    plain = layer()
    padded, y = plain.twin(), plain.inputs(2 * n).view(2, n, -1)
    wanted = kernels(plain, y.flatten(0, 1), [3, 1], offset).view(2, n, -1)
    wide = F.pad(y, (0, 0, 0, rows - n), value=float("nan")).flatten(0, 1)
    ids, spans = torch.tensor([3, 1], device=DEVICE), spans_of(offset, n, 2)
    found = chunked_gated_delta_net(wide, padded.conv_states, padded.states, ids, spans, padded.params)
    # The convolution here is torch's: summation order may differ with the number of rows.
    same = torch.equal if DEVICE == "cuda" else torch.allclose
    assert same(found.view(2, rows, -1)[:, :n], wanted)
    assert torch.equal(padded.conv_states, plain.conv_states)
    assert same(padded.states, plain.states)


def test_slices_of_different_lengths_and_offsets() -> None:
    """Padded to one length, as the kernels read spans of each slice."""
    plain = layer()
    together, lengths, offsets = plain.twin(), (40, 17), (60, 5)
    y = [plain.inputs(n, seed=n) for n in lengths]
    wanted = [kernels(plain, *one) for one in zip(y, [[2], [4]], offsets, strict=True)]
    wide = torch.cat([F.pad(x, (0, 0, 0, 48 - len(x)), value=float("nan")) for x in y])
    ids, spans = torch.tensor([2, 4], device=DEVICE), torch.tensor([[60, 40], [5, 17]], device=DEVICE)
    found = chunked_gated_delta_net(wide, together.conv_states, together.states, ids, spans, together.params)
    for out, one in zip(found.view(2, 48, -1), wanted, strict=True):
        torch.testing.assert_close(out[: len(one)], one)
    torch.testing.assert_close(together.states, plain.states)
    assert torch.equal(together.conv_states, plain.conv_states)


def test_decode_prefill_decode() -> None:
    a = layer()
    y = a.inputs(5 + 60 + 3)
    few, run = one_by_one(a.net), form_of(a.chunks, 5)

    def form(y: Tensor, left: Tensor, s: Tensor) -> Results:
        out = []
        for part, mix in zip(y.split([5, 60, 3], dim=1), (few, run, few), strict=True):
            o, left, s = mix(part, left, s)
            out.append(o)
        return torch.cat(out, dim=1), left, s

    def qkv(y: Tensor, ids: list[int]) -> Tensor:
        index = torch.tensor(ids, device=DEVICE)
        first = recurrent_gated_delta_net(y[:5], a.pools, index, only_last(ids, 5), a.params)
        middle = kernels(a, y[5:65], ids, 5)
        last = recurrent_gated_delta_net(y[65:], a.pools, index, only_last(ids, len(y) - 65), a.params)
        return torch.cat([first, middle, last])

    a.check(qkv, y, [2], form, form_of(a.net))


def test_other_states_do_not_change() -> None:
    a = layer()
    before = a.conv_states.clone(), a.states.clone()
    kernels(a, a.inputs(2 * 20), [3, 1], 60)
    for old, new in zip(before, (a.conv_states, a.states), strict=True):
        changed = (old != new).flatten(1).any(dim=1)
        assert changed.tolist() == [False, True, False, True, False]


def test_rows_of_a_wider_batch() -> None:
    """The columns of a product that made more, a part of its rows, ids within another tensor: as a step cuts them."""
    a = layer()
    y = a.inputs(2 * 18)
    wide = torch.nn.functional.pad(y, (0, 5, 1, 1), value=float("nan"))
    ids = torch.tensor([0, 3, 1], device=DEVICE)[1:]

    def run(*_: object) -> Tensor:
        rows, spans = wide[1:-1, : a.params.columns], spans_of(55, 18, 2)
        return chunked_gated_delta_net(rows, a.conv_states, a.states, ids, spans, a.params)

    a.check(run, y, [3, 1], form_of(a.chunks, 55), form_of(a.net, 55))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: the interpreter is too slow")
@pytest.mark.parametrize(("n", "ids"), [(512, [2, 0]), (1100, [1])])
def test_heads_and_lengths_as_in_a_model(n: int, ids: list[int]) -> None:
    a = layer(16, 48, 128)
    y = a.inputs(n * len(ids))
    check(a, y, ids, 9, one_by_one(a.net))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: nothing is compiled")
def test_other_lengths_offsets_and_slices_compile_nothing() -> None:
    programs = [
        recurrent_delta_rule.causal_conv1d_kernel,
        *(
            getattr(chunked_delta_rule, f"{x}_kernel")
            for x in ("delta_rule_solve", "delta_rule_state", "gated_rms_norm")
        ),
    ]

    def compiled() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in programs)

    a = layer()
    kernels(a, a.inputs(20), [0], 0)
    before = compiled()
    for n, offset, ids in ((64, 0, [1]), (65, 1, [1, 2]), (160, 16, [0, 3, 2]), (17, 63, [4])):
        kernels(a, a.inputs(n * len(ids)), ids, offset)
    assert compiled() == before
