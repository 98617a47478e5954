"""Router, top-k and MoE combine kernels match their torch forms."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from daemons.ops.operations import MAX_DECODE_TOKENS, TorchOperations  # noqa: E402
from daemons.ops.router import Router  # noqa: E402
from daemons.ops.triton.moe import moe_combine, router_gemv, select_experts  # noqa: E402
from daemons.ops.triton_operations import TritonOperations  # noqa: E402
from tests.kernels.limits import DIVISION, assert_near, sigmoid_error  # noqa: E402
from tests.numerics import UNIT  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.fixture(autouse=True)
def ignore_numpy_overflow():
    """The interpreter computes with numpy, which warns about infinity and NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def normal(*shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def router_of(n_experts, width, k, *, gating="softmax", normalise=True, scale=1.0, more=(), has_shared_gate=False):
    bias = normal(n_experts, seed=5) / 4 if "bias" in more else None
    expert_scale = normal(n_experts, seed=6).abs() + 0.5 if "expert_scale" in more else None
    weight = normal(n_experts + has_shared_gate, width, seed=7) / width**0.5
    return Router(weight, k, gating, normalise, scale, bias, expert_scale, has_shared_gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "n_scores"), [(1, 2048, 257), (3, 2816, 128), (16, 96, 5), (2, 40, 1)])
def test_router_gemv(dtype, tokens, width, n_scores):
    x, weight = normal(tokens, width, dtype=dtype), normal(n_scores, width, seed=3)
    bias = normal(n_scores, seed=4)
    assert_near(router_gemv(x, weight), lambda x: x @ weight.t(), x)
    assert_near(router_gemv(x, weight, bias), lambda x: x @ weight.t() + bias, x)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    "router",
    [
        router_of(256, 64, 8, has_shared_gate=True),
        router_of(256, 64, 8, gating="sigmoid", scale=2.5, more=("bias",)),
        router_of(128, 64, 8, more=("expert_scale",)),
        router_of(6, 16, 3, normalise=False, has_shared_gate=True),
        router_of(5, 16, 5, gating="sigmoid", more=("bias", "expert_scale"), has_shared_gate=True),
        router_of(1, 16, 1),
    ],
    ids=["qwen35moe", "laguna", "gemma4", "few", "all", "one"],
)
def test_select_experts(router, tokens):
    scores = router.scores(normal(tokens, router.weight.shape[1], seed=11))
    found, wanted = select_experts(router, scores), router.select_experts(scores)
    assert torch.equal(found.experts, wanted.experts)
    assert_near(found.weights, lambda scores: router.select_experts(scores).weights, scores)
    assert (found.shared_gate is None) == (not router.has_shared_gate)
    if router.has_shared_gate:
        gate = scores[:, -1]
        exact = gate.double().sigmoid()
        assert bool(((found.shared_gate.double() - exact).abs() <= sigmoid_error(gate) * exact).all())


def test_ties_go_to_the_first_expert_and_none_repeats():
    router = router_of(40, 16, 8)
    scores = torch.zeros(1, 40, device=DEVICE)
    scores[0, [3, 17]] = 2.0
    found = select_experts(router, scores)
    assert found.experts.tolist() == [[3, 17, 0, 1, 2, 4, 5, 6]]
    # seven additions and a quotient
    assert abs(float(found.weights.double().sum()) - 1) <= 7 * UNIT + DIVISION


def test_nan_scores_select_existing_experts():
    """The result is NaN, but only the experts' memory is read."""
    router = router_of(5, 16, 2)
    experts = select_experts(router, torch.full((2, 5), float("nan"), device=DEVICE)).experts
    assert ((experts >= 0) & (experts < 5)).all()


def test_tiny_weights_stay_finite():
    router = router_of(4, 2, 2, gating="sigmoid")
    assert torch.isfinite(select_experts(router, torch.full((1, 4), -400.0, device=DEVICE)).weights).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 8, 2048), (5, 3, 300), (3, 1, 96)])
@pytest.mark.parametrize("beside", ["nothing", "shared", "gated"])
def test_moe_combine(dtype, tokens, k, width, beside):
    results, weights = normal(tokens, k, width, dtype=dtype), normal(tokens, k, seed=2).softmax(dim=1)
    wide = normal(tokens, width + 16, dtype=dtype, seed=3)
    shared = None if beside == "nothing" else wide[:, :width]
    shared_gate = torch.sigmoid(normal(tokens, seed=4)) if beside == "gated" else None
    found = moe_combine(results, weights, shared, shared_gate)
    assert found.dtype == dtype

    def form(results, weights, beside):
        return (results * weights.unsqueeze(2)).sum(1) + beside

    added = torch.zeros(1, device=DEVICE)
    if shared is not None:
        added = shared.float() * (
            1.0 if shared_gate is None else shared_gate.unsqueeze(1)
        )  # rounded once more: an ulp of it
    assert_near(found, form, results, weights, added)
    # the plain form rounds each product and each sum to the dtype
    largest = float((results.abs().float() * weights.unsqueeze(2)).sum(1).max() + added.abs().max())
    assert_near(
        TorchOperations().moe_combine(results, weights, shared, shared_gate),
        form,
        results,
        weights,
        added,
        rounded=4 * largest,
    )


@pytest.mark.parametrize("tokens", [1, MAX_DECODE_TOKENS, MAX_DECODE_TOKENS + 1])
def test_decode_and_prefill_select_the_same_experts(tokens):
    router = router_of(32, 96, 4, has_shared_gate=True)
    x = normal(tokens, 96, seed=9)
    found, wanted = TritonOperations().router(router)(x), TorchOperations().router(router)(x)
    assert torch.equal(found.experts, wanted.experts)
    for chosen in (found, wanted):
        assert_near(chosen.weights, lambda x: router(x).weights, x)
        assert_near(chosen.shared_gate.unsqueeze(1), lambda x: router(x).shared_gate.unsqueeze(1), x)
