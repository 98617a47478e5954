"""What takes the place of torch's forms on a cpu with ``engine.deterministic``: right, and the same in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daemons.device import CPU
from daemons.errors import LoadError
from daemons.ops.cpu.batch_invariant import BatchInvariantCpuOperations, BatchInvariantInt8Linear
from daemons.ops.cpu.library import cpu_kernels
from daemons.ops.operations import TorchOperations
from daemons.ops.router import Router
from daemons.ops.selection import KernelSelector
from daemons.sampling import Sampler
from lucevisor.protocol.steps import SamplingParams, Slice
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.numerics import BFLOAT16, UNIT

pytestmark = needs_cpu_kernels
ROWS = 37
some_rows = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS)


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(1)


def operations() -> BatchInvariantCpuOperations:
    return BatchInvariantCpuOperations(cpu_kernels())


def check_rows(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Any rows of ``x`` have the bits that they have among all; the results of all."""
    whole = work(x)

    @settings(max_examples=25, deadline=None)
    @given(some_rows)
    def check(rows: list[int]) -> None:
        assert torch.equal(work(x[rows]), whole[rows])

    check()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_out", "width"), [(7, 5), (70, 100), (33, 256)])
def test_products_with_plain_matrices(n_out: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS, width).to(dtype), torch.randn(n_out, width).to(dtype)
    found = check_rows(lambda x: cpu_kernels().multiply_dense(x, weight), x)
    exact, sizes = F.linear(x.double(), weight.double()), F.linear(x.double().abs(), weight.double().abs())
    rounding = 0.0 if dtype == torch.float32 else BFLOAT16
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + width * UNIT * sizes).all())


def test_products_with_int8_matrices() -> None:
    x, weight = torch.randn(ROWS, 96).bfloat16(), torch.randint(-127, 128, (40, 96), dtype=torch.int8)
    linear = BatchInvariantInt8Linear(cpu_kernels(), weight, torch.rand(40).bfloat16())
    found = check_rows(linear, x)
    exact = F.linear(x.double(), weight.double() * linear.scale.double().unsqueeze(1))
    assert float((found.double() - exact).abs().max()) <= BFLOAT16 * float(exact.abs().max())


@pytest.mark.parametrize("has_shared_gate", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_routers(gating: str, has_shared_gate: bool) -> None:
    bias = torch.rand(21) if gating == "sigmoid" else None
    router = Router(torch.randn(21 + has_shared_gate, 64), 5, gating, True, 1.5, bias, has_shared_gate=has_shared_gate)
    route, x = operations().router(router), torch.randn(ROWS, 64).bfloat16()
    check_rows(lambda x: torch.cat((route(x).weights, route(x).experts), dim=1), x)
    found, wanted = route(x), router(x)
    assert torch.equal(found.experts, wanted.experts)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6)
    assert (found.shared_gate is None) == (wanted.shared_gate is None) == (not has_shared_gate)
    if found.shared_gate is not None and wanted.shared_gate is not None:
        torch.testing.assert_close(found.shared_gate, wanted.shared_gate, rtol=1e-5, atol=1e-6)


def test_elementwise_operations() -> None:
    mine, torchs = operations(), TorchOperations()
    logits = torch.randn(ROWS, 333).mul_(40)
    found = check_rows(lambda x: mine.softcap(x, 30.0), logits)
    torch.testing.assert_close(found, torchs.softcap(logits, 30.0), rtol=0, atol=30 * 8 * UNIT)
    x = torch.randn(ROWS, 50).bfloat16()
    found = check_rows(mine.gelu, x)
    torch.testing.assert_close(found, torchs.gelu(x), rtol=2 * BFLOAT16, atol=1e-6)
    steps = torch.arange(ROWS).float()
    torch.testing.assert_close(check_rows(mine.log1p, steps), torchs.log1p(steps))


@pytest.mark.parametrize("gated", [True, False])
def test_sums_of_experts(gated: bool) -> None:
    results, weights = torch.randn(ROWS, 6, 40).bfloat16(), torch.rand(ROWS, 6)
    shared, gate = torch.randn(ROWS, 40).bfloat16(), torch.rand(ROWS) if gated else None
    at = torch.arange(ROWS).unsqueeze(1)

    def combine(at: Tensor) -> Tensor:
        i = at[:, 0]
        return operations().moe_combine(results[i], weights[i], shared[i], None if gate is None else gate[i])

    exact = (results.double() * weights.double().unsqueeze(2)).sum(1)
    exact += shared.double() * (1.0 if gate is None else gate.double().unsqueeze(1))
    assert float((check_rows(combine, at).double() - exact).abs().max()) <= BFLOAT16 * float(exact.abs().max())


def test_log_probabilities_and_draws_row_by_row() -> None:
    """Of two sequences at once and of each alone, by one thread and by two."""
    logits = torch.randn(2, 40_001).mul_(3)
    settings_ = [SamplingParams(temperature=1.0, top_p=0.9, seed=s, n_top_logprobs=2) for s in (3, 4)]
    slices = [Slice(i, 9, [1], True) for i in range(2)]

    def drawn(chosen: list[int]) -> list[tuple[int, float | None]]:
        sampler = Sampler(logits.shape[1], CPU, by_row=True)
        for i in chosen:
            sampler.open(i, settings_[i], [])
        return [(s.token, s.logprob) for s in sampler.sample([slices[i] for i in chosen], logits[chosen].clone())]

    n, together = torch.get_num_threads(), drawn([0, 1])
    torch.set_num_threads(3 - min(n, 2))
    try:
        assert [*drawn([1]), *drawn([0])] == together[::-1]
    finally:
        torch.set_num_threads(n)
    wanted = torch.log_softmax(logits.double(), dim=-1)
    for i, (token, logprob) in enumerate(together):
        assert logprob == pytest.approx(float(wanted[i, token]), abs=1e-4)


def test_what_it_does_not_hold_for_is_refused() -> None:
    with pytest.raises(LoadError, match="a cpu computes float32 with torch alone"):
        KernelSelector(CPU, torch.float32, batch_invariant=True)
    selector = KernelSelector(CPU, torch.bfloat16, batch_invariant=True)
    with pytest.raises(LoadError, match="Q4_0 with so many rows have no kernel"):
        selector.int4({"Q4_0"}, torch.empty(0), torch.empty(0))
