"""The mixer of runs of tokens beside the torch form of the daemon's block, token by token, and beside itself, cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from daemons.models.blocks import DeltaNet
from daemons.ops.delta_rule import CHUNK, convolve, step
from daemons.ops.operations import MixWeights
from daemons.ops.triton import delta_chunks, delta_rule
from daemons.ops.triton.delta_chunks import mix_run
from daemons.ops.triton.delta_rule import mix_few
from tests.kernels.delta_layers import random_net

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
N_STATES = 5
FINE = 1.0 if DEVICE == "cpu" else 5.0
"""What the tolerances are multiplied by: products of three of TF32 are not quite those of float32."""


def rule_inputs(y: Tensor, left: Tensor, weights: Sequence[Tensor], n_key: int, dim: int) -> tuple[Tensor, ...]:
    """q, k [B, n, n_key, D], v [B, n, N, D], decay and beta [B, n, N] of y [B, n, columns], in the dtype of all."""
    taps, decay, dt = weights
    b, n, channels = *y.shape[:2], taps.shape[1]
    mixed, _, alpha, beta = y.split_with_sizes([channels, len(dt) * dim, len(dt), len(dt)], dim=-1)
    heads = F.silu(convolve(mixed, left, taps)[0]).view(b, n, -1, dim)
    q, k, v = heads.split_with_sizes([n_key, n_key, len(dt)], dim=2)
    q, k = (x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return q * dim**-0.5, k, v, torch.exp(F.softplus(alpha + dt) * decay), torch.sigmoid(beta)


class Convolve:
    """``convolve_kernel`` in torch: the interpreter takes 10 ms for each head of each token, tests beside know it."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self.launch

    def launch(self, *pointers: Any, **options: Any) -> None:
        y, mixed, gates, convolution, ids, *weights, n, _ = pointers
        left = convolution[ids]
        q, k, v, kept, beta = rule_inputs(
            y.float().reshape(len(ids), n, -1), left, weights, options["N_KEY"], options["DIM"]
        )
        mixed.copy_(torch.cat([q, k, v], dim=2).view(mixed.shape))
        gates.copy_(torch.stack([kept, beta], dim=-1).view(gates.shape))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(delta_chunks, "convolve_kernel", Convolve())


@dataclass
class Layer:
    """A mixer, its torch form, and pools for each of the two, which begin as equals."""

    mixer: MixWeights
    net: DeltaNet
    convolution: Tensor
    states: Tensor

    def inputs(self, rows: int, seed: int = 1, spread: float = 1.0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, self.mixer.columns, generator=g) * spread).to(DEVICE)

    def torch_form(self, y: Tensor, ids: list[int], offset: int = 0) -> Tensor:
        """Outputs [B n, n_value dim] float32; moves the states of ``net`` on."""
        index, rows = torch.tensor(ids, device=DEVICE), y.shape[0]

        def store(pool: Tensor, value: Tensor) -> None:
            pool[index] = value

        group = SimpleNamespace(
            n_slices=len(ids),
            n_tokens=rows // len(ids),
            offset=offset,
            load_state=lambda pool: pool[index],
            store_state=store,
        )
        return self.net._mix(group, y.view(len(ids), -1, y.shape[-1])).reshape(rows, -1)

    def exact(self, y: Tensor, state: int) -> Tensor:
        """One slice token by token in float64, outputs [n, n_value dim] rounded at the end; moves ``net`` on."""
        m, n = self.mixer, y.shape[0]
        weights = [x.double() for x in (m.taps, m.decay, m.dt)]
        left, s = self.net.convolution[state : state + 1], self.net.states[state : state + 1].double()
        q, k, v, kept, beta = rule_inputs(y[None].double(), left.double(), weights, m.n_key, m.dim)
        qk = torch.stack([q, k], dim=2).repeat(1, 1, 1, m.n_value // m.n_key, 1)
        at = [slice(i, i + 1) for i in range(n)]
        o = torch.cat([step(s, qk[:, i], v[:, i], kept[:, i], beta[:, i]) for i in at], dim=1)
        z = y[:, m.channels : m.channels + m.n_value * m.dim].double()
        o = (F.rms_norm(o, (m.dim,), m.norm.weight.double(), m.norm.epsilon)).view(n, -1) * F.silu(z)
        self.net.convolution[state] = convolve(y[None, :, : m.channels], left, m.taps)[1][0, n:]
        self.net.states[state] = s[0].float()
        return o.float()

    def kernels(self, y: Tensor, ids: list[int], offset: int = 0) -> Tensor:
        """Outputs of the kernels; moves the states of this on."""
        return mix_run(y, self.convolution, self.states, torch.tensor(ids, device=DEVICE), self.mixer, offset)

    def few(self, y: Tensor, ids: list[int]) -> Tensor:
        """Outputs of the kernels for few tokens; moves the states of this on."""
        return mix_few(y, self.convolution, self.states, torch.tensor(ids, device=DEVICE), self.mixer)

    def check(self, got: Tensor, expected: Tensor, tolerance: float = 2e-5, states: float = 2e-5) -> None:
        """Outputs and both pools."""
        tolerance, states = tolerance * FINE, states * FINE
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(self.convolution, self.net.convolution)
        torch.testing.assert_close(self.states, self.net.states, rtol=states, atol=states)


def layer(
    n_key: int = 1, n_value: int = 2, dim: int = 32, n_taps: int = 4, decay: tuple[float, float] = (0.02, 2.0)
) -> Layer:
    """``decay``: exp A of the first and of the last head."""
    return Layer(*random_net(n_key, n_value, dim, n_taps, decay, N_STATES, DEVICE))


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
    a.check(a.kernels(y, ids, offset), a.torch_form(y, ids, offset))


@pytest.mark.parametrize(
    ("n_key", "n_value", "dim", "n_taps"),
    [(2, 2, 32, 4), (1, 3, 64, 4), (2, 4, 128, 4), (3, 9, 32, 4), (2, 2, 32, 2), (1, 2, 32, 7), (1, 1, 32, 4)],
)
def test_any_heads_and_taps(n_key: int, n_value: int, dim: int, n_taps: int) -> None:
    a = layer(n_key, n_value, dim, n_taps)
    y = a.inputs(70)
    a.check(a.kernels(y, [4], 20), a.torch_form(y, [4], 20))


def test_a_run_is_its_tokens_one_by_one() -> None:
    a = layer()
    y = a.inputs(300)
    a.check(a.kernels(y, [2], 50), a.exact(y, 2))


def test_the_convolution_too_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_chunks, "convolve_kernel", delta_rule.convolve_kernel)
    a = layer(1, 1)
    y = a.inputs(2 * 17)
    a.check(a.kernels(y, [3, 1], 59), a.torch_form(y, [3, 1], 59))


@pytest.mark.parametrize("decay", [(0.0, 0.0), (1e-6, 1e-3), (50.0, 1000.0), (0.0, 1000.0)])
def test_heads_that_keep_all_and_heads_that_forget_all(decay: tuple[float, float]) -> None:
    a = layer(decay=decay)
    y = a.inputs(90, spread=3.0)
    y[:, -2 * a.mixer.n_value :] *= 2.0  # alpha and beta: both sides of where softplus and sigmoid are straight
    # one by one, as the chunked form adds the logarithms of decays up, which costs it digits when they are large
    a.check(a.kernels(y, [1], 10), a.exact(y, 1), tolerance=1e-4)


def test_nothing_is_lost_behind_a_token_that_forgets_all() -> None:
    """Heads that keep almost all, but for tokens at which S becomes 0: sums of logarithms would be rough by then."""
    a = layer(decay=(1e-2, 1e-2))
    y = a.inputs(80)
    y[:30, -4:-2] = 1e6  # alpha
    a.check(a.kernels(y, [1]), a.exact(y, 1))


def test_keys_that_are_all_alike() -> None:
    """The triangle of a chunk is then ones: its inverse is small, the powers of it are not."""
    a = layer(decay=(0.0, 1e-4))
    y = a.inputs(1).expand(150, -1).clone()
    y[:, -2:] = 20.0  # beta 1
    y[:, 64:128] += a.inputs(150, seed=2)[:, 64:128]
    a.check(a.kernels(y, [1], 5), a.exact(y, 1), tolerance=1e-4, states=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    a = layer()
    y = a.inputs(2 * 40).to(dtype)
    got = a.kernels(y, [3, 2], 30)
    assert got.dtype == dtype
    a.check(got, a.torch_form(y, [3, 2], 30), tolerance=2 * torch.finfo(dtype).eps / FINE)


@pytest.mark.parametrize("cut", [17, 27, 64, 133])
def test_a_run_in_two_steps_is_one_run(cut: int) -> None:
    n, offset = 150, 37
    whole, parts = layer(), layer()
    y = whole.inputs(n)
    out = whole.kernels(y, [4], offset)
    for first, last in ((0, cut), (cut, n)):
        got = parts.kernels(y[first:last], [4], (offset + first) % CHUNK)
        torch.testing.assert_close(got, out[first:last], rtol=5e-6 * FINE, atol=5e-6 * FINE)
    torch.testing.assert_close(parts.states, whole.states, rtol=5e-6 * FINE, atol=5e-6 * FINE)
    assert torch.equal(parts.convolution, whole.convolution)


def test_it_goes_on_where_single_tokens_ended_and_they_where_it_did() -> None:
    a = layer()
    y = a.inputs(5 + 60 + 3)
    got = [a.few(y[:5], [2]), a.kernels(y[5:65], [2], 5), a.few(y[65:], [2])]
    a.check(torch.cat(got), a.torch_form(y, [2]))


def test_other_states_stay_as_they_are() -> None:
    a = layer()
    before = a.convolution.clone(), a.states.clone()
    a.kernels(a.inputs(2 * 20), [3, 1], 60)
    for old, new in zip(before, (a.convolution, a.states), strict=True):
        changed = (old != new).flatten(1).any(dim=1)
        assert changed.tolist() == [False, True, False, True, False]


def test_rows_of_a_wider_batch() -> None:
    """The columns of a product that made more, a part of its rows, ids within another tensor: as a step cuts them."""
    a = layer()
    y = a.inputs(2 * 18)
    wide = torch.nn.functional.pad(y, (0, 5, 1, 1), value=float("nan"))
    ids = torch.tensor([0, 3, 1], device=DEVICE)[1:]
    got = mix_run(wide[1:-1, : a.mixer.columns], a.convolution, a.states, ids, a.mixer, 55)
    a.check(got, a.torch_form(y, [3, 1], 55))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: the interpreter is too slow")
@pytest.mark.parametrize(("n", "ids"), [(512, [2, 0]), (1100, [1])])
def test_heads_and_lengths_as_in_a_model(n: int, ids: list[int]) -> None:
    a = layer(16, 48, 128)
    y = a.inputs(n * len(ids))
    expected = torch.cat([a.exact(part, state) for part, state in zip(y.split(n), ids, strict=True)])
    a.check(a.kernels(y, ids, 9), expected, tolerance=1e-4, states=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: nothing is compiled")
def test_no_length_offset_or_number_of_slices_is_compiled_anew() -> None:
    kernels = [delta_rule.convolve_kernel, *(getattr(delta_chunks, f"{x}_kernel") for x in ("solve", "carry", "gate"))]

    def compiled() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    a = layer()
    a.kernels(a.inputs(20), [0], 0)
    before = compiled()
    for n, offset, ids in ((64, 0, [1]), (65, 1, [1, 2]), (160, 16, [0, 3, 2]), (17, 63, [4])):
        a.kernels(a.inputs(n * len(ids)), ids, offset)
    assert compiled() == before
