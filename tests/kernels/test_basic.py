"""RMSNorm, QK norm with RoPE, act-and-mul and output gate kernels match their torch forms."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F  # noqa: E402

from daemons.ops.basic import (  # noqa: E402
    ACTIVATIONS,
    RmsNorm,
    plain_rope,
    rotate,
)
from daemons.ops.basic import act_and_mul as torch_act_and_mul  # noqa: E402
from daemons.ops.triton import basic  # noqa: E402
from tests.kernels.limits import assert_each, assert_near, assert_nearest, sigmoid_error, softplus_error  # noqa: E402
from tests.numerics import UNIT, bound  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
SMALLEST = torch.finfo(torch.float32).smallest_normal
"""What a GPU may flush to zero: a gate this small, and its factor."""
EPS = 1e-6

pytestmark = [pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))]


@pytest.fixture(autouse=True)
def ignore_numpy_overflow():
    """The interpreter's exp is numpy's, which warns about infinity."""
    with np.errstate(over="ignore"):
        yield


def normal(*shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def cut(*shape, dtype, before=32, after=48):
    """Rows [T, ...] that are columns of a wider matrix."""
    wide = normal(shape[0], before + int(np.prod(shape[1:])) + after, dtype=dtype, seed=2)
    x = wide[:, before : wide.shape[1] - after].view(shape)
    assert shape[0] == 1 or not x.is_contiguous()
    return x


def each_of(form, x):
    """What ``form`` gives exactly, and how far float32 may be from it: rows of one number each."""
    exact, allowed = bound(lambda x: form(x).unsqueeze(-1), x)
    return exact.squeeze(-1), allowed


# ---- norms


def norm_of(found, norm, x):
    assert found.is_contiguous()
    assert_near(found, norm.float32, x)


@pytest.mark.parametrize(("t", "d"), [(1, 5120), (3, 2816), (2, 8192), (5, 128), (17, 256), (9, 80), (1, 16384)])
def test_rms_norm_of_rows(dtype, t, d):
    x, weight = normal(t, d, dtype=dtype), normal(d, seed=3) + 1
    found = basic.rms_norm(x, weight, EPS)
    assert found.dtype == dtype
    norm_of(found, RmsNorm(weight, d, EPS), x)
    norm_of(basic.rms_norm(x, None, EPS), RmsNorm(None, d, EPS, x.device), x)


@pytest.mark.parametrize(("t", "h", "d"), [(1, 48, 128), (7, 3, 256), (33, 5, 96), (2, 1, 512)])
def test_rms_norm_of_heads(dtype, t, h, d):
    x, weight = cut(t, h, d, dtype=dtype), normal(h, d, seed=3) + 1
    norm_of(basic.rms_norm(x, weight, EPS), RmsNorm(weight, d, EPS), x)
    norm_of(basic.rms_norm(x[:, :1], weight[0], EPS), RmsNorm(weight[0], d, EPS), x[:, :1])
    float32 = basic.rms_norm(x, weight, EPS, torch.float32)
    assert float32.dtype == torch.float32
    norm_of(float32, RmsNorm(weight, d, EPS), x)


def test_rms_norm_of_other_shapes(dtype):
    weight = normal(6, 64, seed=3)
    x = normal(2, 5, 6, 64, dtype=dtype)
    norm_of(basic.rms_norm(x, weight, EPS), RmsNorm(weight, 64, EPS), x)
    norm_of(basic.rms_norm(x[0, 0, 0], weight[0], EPS), RmsNorm(weight[0], 64, EPS), x[0, 0, 0])
    assert basic.rms_norm(x[:0], weight, EPS).shape == (0, 5, 6, 64)


def test_rms_norm_counts_eps(dtype):
    x, weight = normal(4, 128, dtype=dtype) * 1e-3, torch.ones(128, device=DEVICE)
    norm_of(basic.rms_norm(x, weight, 1e-5), RmsNorm(weight, 128, 1e-5), x)


@pytest.mark.parametrize(("t", "d"), [(1, 5120), (6, 2816), (3, 100), (1, 8192)])
def test_add_rms_norm(dtype, t, d):
    h, delta, weight = normal(t, d, dtype=dtype) * 8, cut(t, d, dtype=dtype), normal(d, seed=3) + 1
    total, found = basic.add_rms_norm(h, delta, weight, EPS)
    assert total.dtype == found.dtype == dtype
    assert total.is_contiguous()
    assert torch.equal(total, h + delta)
    norm_of(found, RmsNorm(weight, d, EPS), h + delta)


def test_the_norm_is_that_of_the_rounded_sum(dtype):
    """Columns that make up the whole norm lose half a step when they are rounded, which moves half of the others."""
    large = {torch.float16: 2048, torch.bfloat16: 256, torch.float32: 2.0**24}[dtype]
    h, delta = normal(1, 1024, dtype=dtype), torch.zeros(1, 1024, device=DEVICE, dtype=dtype)
    h[:, ::2], delta[:, ::2] = large, 0.99
    weight = torch.full((1024,), 100.0, device=DEVICE)
    total, found = basic.add_rms_norm(h, delta, weight, EPS)
    assert torch.equal(total[:, ::2], h[:, ::2])
    if dtype != torch.float32:  # there sums of another order differ as much
        assert_nearest(found[:, 1::2], *(x[:, 1::2] for x in each_of(RmsNorm(weight, 1024, EPS).float32, h.float())))


def head_major(t, h, d, dtype):
    """[t, h, d] whose heads are stored head-major."""
    x = normal(h, t, d, dtype=dtype).transpose(0, 1)
    assert x.stride(0) < x.stride(1)
    return x


def test_norms_of_strided_heads(dtype):
    x, weight = head_major(5, 3, 32, dtype), normal(3, 32, seed=3)
    norm_of(basic.rms_norm(x, weight, EPS), RmsNorm(weight, 32, EPS), x)
    one, none = torch.ones(5, 1, 8, device=DEVICE), torch.zeros(5, 1, 8, device=DEVICE)
    norm_of(basic.qk_norm_rope(x, weight, EPS, one, none), RmsNorm(weight, 32, EPS), x)


# ---- queries and keys


@pytest.mark.parametrize(
    ("t", "h", "d", "half"),
    [(1, 40, 128, 64), (5, 3, 256, 32), (3, 5, 512, 256), (19, 2, 64, 16), (2, 3, 96, 24), (4, 3, 80, 40)],
)  # fmt: skip
def test_qk_norm_rope(dtype, t, h, d, half):
    x, weight = cut(t, h, d, dtype=dtype), normal(h, d, seed=3) + 1
    positions = torch.arange(t, device=DEVICE) * 37 + 5
    cos, sin = plain_rope(2 * half, 1e6, torch.device(DEVICE)).tables(positions)
    cos, sin = cos * 1.25, sin * 1.25  # a magnitude, which the dims that stay must not get
    found = basic.qk_norm_rope(x, weight, EPS, cos, sin)
    assert found.dtype == dtype
    assert_near(found, lambda x: rotate(RmsNorm(weight, d, EPS).float32(x), cos, sin), x)
    assert found.is_contiguous()


# ---- gates


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("t", "f"), [(1, 17408), (5, 2112), (3, 704), (2, 100)])
def test_act_and_mul(dtype, activation, t, f):
    x = cut(t, 2 * f, dtype=dtype) * 3
    found = basic.act_and_mul(x, activation)
    assert found.dtype == dtype
    assert found.is_contiguous()
    exact, error = exact_act_and_mul(x, activation)
    assert_each(found, exact, error)
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "gelu_tanh":  # 1 + tanh, as torch has it, is rounded at 1 where the result is nearly nothing
        error = 3 * UNIT * (gate * up).abs() + 4 * UNIT * exact.abs()
    assert_each(torch_act_and_mul(x, activation), exact, error, roundings=2, factor=up)


@pytest.mark.parametrize(("t", "n"), [(1, 5760), (5, 100)])
def test_add_bias(dtype, t, n):
    x, biases, ids = cut(t, n, dtype=dtype), normal(3, n, dtype=dtype), (torch.arange(t) * 2 % 3).to(DEVICE)
    for bias, chosen in ((biases, ids), (biases[0], None)):
        found = basic.add_bias(x, bias, chosen)
        assert found.dtype == dtype
        exact = x.double() + (bias if chosen is None else bias[chosen]).double()
        assert_each(found, exact, UNIT * exact.abs())


def exact_act_and_mul(x, activation):
    """The result and its error in float32: of gelu's argument seven roundings, of the gate, of two products."""
    gate, up = x.double().chunk(2, dim=-1)
    gelu, clamped = activation == "gelu_tanh", activation == "swiglu_oai"
    if clamped:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
    inner = 2 * (2 / np.pi) ** 0.5 * gate * (1 + 0.044715 * gate * gate) if gelu else gate
    inner = 1.702 * gate if clamped else inner
    exact = gate * inner.sigmoid() * up
    relative = sigmoid_error(inner, 7 * UNIT if gelu else 2 * UNIT if clamped else 0.0) + 2 * UNIT
    added = UNIT * (gate * inner.sigmoid()).abs() * (1 + up.abs()) if clamped else 0.0
    return exact, relative * exact.abs() + added + SMALLEST * (1 + gate.abs()) * (1 + up.abs())


def test_act_and_mul_far_from_zero(dtype):
    gate = torch.tensor([[-500.0, -80.0, -12.0, 0.0, 12.0, 80.0, 500.0]], device=DEVICE)
    x = torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)
    for activation in ACTIVATIONS:
        assert_each(basic.act_and_mul(x, activation), *exact_act_and_mul(x, activation))


def test_unknown_activations_are_refused(dtype):
    with pytest.raises(ValueError, match="relu"):
        basic.act_and_mul(normal(1, 32, dtype=dtype), "relu")
    with pytest.raises(ValueError, match="silu"):
        basic.output_gate(normal(1, 2, 16, dtype=dtype), normal(1, 2, dtype=dtype), "silu")


def torch_gate(gate, kind):
    """As Attention has it."""
    return F.softplus(gate.float()).to(gate.dtype) if kind == "softplus" else torch.sigmoid(gate)


def exact_gate(gate, kind):
    """The same in float64, and the error of float32."""
    gate = gate.double()
    if kind == "softplus":
        return gate.clamp(min=0) + (-gate.abs()).exp().log1p(), softplus_error(gate)
    exact = gate.sigmoid()
    return exact, sigmoid_error(gate) * exact


def assert_output_gate(found, out, gate, kind, roundings=1):
    """``found`` is ``out`` [T, H, D] times the opened gate."""
    exact, error = exact_gate(gate.view(out.shape[0], out.shape[1], -1), kind)
    wanted, size = (out.double() * exact).flatten(1), (out.double().abs() * error).flatten(1)
    assert_each(found, wanted, size + UNIT * wanted.abs(), roundings=roundings, factor=out.flatten(1))


@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("t", "h", "d"), [(1, 24, 256), (5, 3, 128), (3, 7, 80), (2, 64, 128)])
def test_output_gate(dtype, kind, per_head, t, h, d):
    out = cut(t, h, d, dtype=dtype)
    gate = cut(t, h if per_head else h * d, dtype=dtype, before=17, after=31) * 4
    found = basic.output_gate(out, gate, kind)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert_output_gate(found, out, gate, kind)
    assert_output_gate((out * torch_gate(gate, kind).view(t, h, -1)).reshape(t, -1), out, gate, kind, roundings=2)


def test_output_gate_of_strided_heads(dtype):
    out, gate = head_major(5, 3, 32, dtype), normal(5, 3, dtype=dtype)
    assert_output_gate(basic.output_gate(out, gate, "sigmoid"), out, gate, "sigmoid")


def test_softplus_of_far_gates(dtype):
    """Where it is nearly nothing, nearly its argument, and on both sides of the border between its two forms."""
    gate = torch.tensor([[-60.0, -9.0, -4.875, -4.75, -1.0, 0.0, 1.0, 4.875, 19.0, 21.0, 80.0]], device=DEVICE)
    gate = gate.to(dtype)
    out = torch.ones(1, gate.shape[1], 16, device=DEVICE)
    assert_output_gate(basic.output_gate(out, gate, "softplus"), out, gate, "softplus")


# ---- all of them


def every(t, dtype, d=64):
    """One call of each kernel for t tokens of 4 heads of d."""
    h, wide, weight = normal(t, 4 * d, dtype=dtype), cut(t, 4, d, dtype=dtype), normal(4, d)
    cos, sin = plain_rope(d // 2, 1e4, torch.device(DEVICE)).tables(torch.arange(t, device=DEVICE))
    gates = normal(t, 4, dtype=dtype)
    return lambda: (
        basic.rms_norm(h, weight.view(-1), EPS),
        basic.rms_norm(wide, weight, EPS),
        *basic.add_rms_norm(h, h, weight.view(-1), EPS),
        basic.qk_norm_rope(wide, weight, EPS, cos, sin),
        basic.act_and_mul(h, "silu"),
        basic.output_gate(wide, gates, "softplus"),
    )


@pytest.mark.parametrize("t", [1, 3])
def test_nothing_is_written_past_a_result(dtype, t, monkeypatch):
    """A row that is too long would be overwritten by the next one, except for the last."""
    work, behind, empty = every(t, dtype, 24), [], torch.empty

    def guarded(shape, dtype, device):
        memory = torch.full((int(np.prod(shape)) + 4096,), 7.0, dtype=dtype, device=device)
        behind.append(memory[-4096:])
        return memory[:-4096].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(x.shape, x.dtype, x.device))
    found = work()
    monkeypatch.setattr(torch, "empty", empty)
    assert len(behind) == len(found)
    assert all(bool((x == 7.0).all()) for x in behind)


@pytest.mark.skipif(DEVICE == "cpu", reason="torch sees no GPU")
def test_a_graph_replays_them(dtype):
    work = every(3, dtype)
    wanted = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="torch sees no GPU")
def test_other_token_counts_compile_nothing(dtype):
    kernels = [getattr(basic, n) for n in dir(basic) if n.endswith("_kernel")]
    assert len(kernels) == 5

    def compiled():
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    every(2, dtype)()
    before = compiled()
    for t in (1, 3, 16, 48, 1000):
        every(t, dtype)()
    assert compiled() == before


@pytest.mark.parametrize("pages", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("t", "h", "d"), [(1, 4, 256), (5, 3, 64), (2, 8, 192)])
def test_write_pages(dtype, pages, t, h, d):
    """Rows are cut out of longer ones, as those of a product are; all other slots stay."""
    k, v = (cut(t, h * d, dtype=dtype).view(t, h, d) for _ in range(2))
    v = v + 1
    found = [normal(64 * 3, h, d, dtype=pages, seed=seed) for seed in (3, 4)]
    wanted = [one.clone() for one in found]
    slots = torch.randperm(64 * 3, generator=torch.Generator().manual_seed(5))[:t].to(DEVICE)
    for pool, rows in zip(wanted, (k, v), strict=True):
        pool.index_copy_(0, slots, rows.to(pages))
    basic.write_pages(*found, slots, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_pad_rows_are_not_written(dtype):
    k, v = (torch.full((5, 2, 64), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    k[:3], v[:3] = normal(3, 2, 64, dtype=dtype), normal(3, 2, 64, dtype=dtype, seed=1)
    found = [normal(64, 2, 64, dtype=dtype, seed=seed) for seed in (3, 4)]
    wanted = [one.clone() for one in found]
    slots = torch.tensor([7, 0, 63, -1, -1], device=DEVICE)
    for pool, rows in zip(wanted, (k, v), strict=True):
        pool.index_copy_(0, slots[:3], rows[:3])
    basic.write_pages(*found, slots, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
