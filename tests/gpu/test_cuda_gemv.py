"""The CUDA C++ GEMV against float64 products of the dequantised matrix, on an NVIDIA GPU from sm_80 on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.limits import UNITS
from tests.kernels.matrices import DEVICE, SHORT, Matrix, normal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(torch.version.hip) or torch.cuda.get_device_capability() < (8, 0),
        reason="needs an NVIDIA GPU from sm_80 on",
    ),
]

from daemons.ops.cuda.gemv import KINDS, CudaGemv, cuda_gemv  # noqa: E402
from daemons.ops.cuda.limits import DTYPES, DeviceLimits  # noqa: E402
from daemons.ops.cuda.slabs import SlabGemv, fitting_shape  # noqa: E402
from daemons.ops.expert_pairs import ExpertPairs  # noqa: E402
from daemons.ops.linear import ConcatLinear  # noqa: E402
from daemons.ops.packed_linear import PackedLinear  # noqa: E402
from daemons.ops.selection import KernelSelector  # noqa: E402
from daemons.ops.triton.basic import act_and_mul  # noqa: E402

SHAPES = (
    *((31, 256), (100, 3072), (1000, 6144), (48, 2048)),
    *((16480, 5120), (5120, 6144), (5120, 17408)),  # Qwen3.6 27B
    *((12352, 2048), (2048, 4096), (2048, 512)),  # Qwen3.6 35B-A3B, Laguna
    *((8192, 2816), (2816, 2112), (2816, 704)),  # Gemma 4
    *((6144, 4096), (4096, 12288)),  # Qwen3
)
"""Rows of W and columns: less than a tile, and those of the families."""
of_kinds = pytest.mark.parametrize("kind", sorted(KINDS))
of_dtypes = pytest.mark.parametrize("dtype", list(DTYPES), ids=str)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Within the rounding of the results, at most a unit of each, and a quarter more for the sums."""
    assert bool(found.isfinite().all())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1.25 * UNITS[found.dtype]


@pytest.mark.parametrize("defines", [(), ("NO_BULK_COPIES",)], ids=["sm_90", "sm_80"])
@of_dtypes
@of_kinds
def test_one_row(kind, dtype, defines):
    """On a newer GPU the copies of an older one too, which has no clusters."""
    gemv = CudaGemv(torch.device("cuda", 0), dtype, *defines)
    if defines:
        gemv.limits = replace(gemv.limits, clusters=False, wide_products=False)
    for n, k in SHAPES:
        if k % 256 and kind not in SHORT:
            continue
        m = Matrix.random(kind, n, k)
        x = (normal(1, k) * normal(1, k, seed=2) ** 3).to(dtype)
        assert gemv.prepare(m.packed)
        found = gemv(m.packed, x)
        assert_near(found, x.double() @ m.numbers.t())
        assert torch.equal(found, gemv(m.packed, x))


@pytest.mark.parametrize("n_rows", [2, 7, 8, 9, 16, 17, 24, 32])
@of_dtypes
@of_kinds
def test_several_rows(kind, dtype, n_rows):
    gemv = CudaGemv(torch.device("cuda", 0), dtype)
    for n, k in SHAPES:
        if k % 256 and kind not in SHORT:
            continue
        m = Matrix.random(kind, n, k)
        if gemv.prepare(m.packed) < n_rows:
            continue
        x = (normal(n_rows, k) * normal(n_rows, k, seed=2) ** 3).to(dtype)
        found = gemv(m.packed, x)
        assert_near(found, x.double() @ m.numbers.t())
        assert torch.equal(found, gemv(m.packed, x))


@pytest.mark.parametrize("n_rows", [2, 8, 9, 17, 32])
@of_dtypes
@of_kinds
def test_products_in_slabs(kind, dtype, n_rows):
    """Also where others are faster: few chunks, many splits; with a gate as by two kernels."""
    gemv, limits = SlabGemv(torch.device("cuda", 0), dtype), DeviceLimits.of(torch.device("cuda", 0))
    if not limits.wide_products:
        pytest.skip("this GPU's matrix units read no factor from shared memory")
    for n, k in ((31, 256), (1024, 3072), (16480, 5120), (5120, 17408), (2048, 4096)):
        m = Matrix.random(kind, n, k)
        x = (normal(n_rows, k) * normal(n_rows, k, seed=2) ** 3).to(dtype)
        shape = fitting_shape(kind, n_rows, m.packed.n_chunks, -(-n // 16), limits)
        assert shape is not None
        found = gemv(shape, m.packed, x)
        assert_near(found, x.double() @ m.numbers.t())
        assert torch.equal(found, gemv(shape, m.packed, x))
        if n % 32 == 0:
            gated = gemv(replace(shape, gated=True), m.packed, x)
            assert_near(gated, act_and_mul(found, "silu").double())


@pytest.mark.parametrize("n_rows", [33, 64, 65, 200, 256])
@of_dtypes
@of_kinds
def test_many_rows(kind, dtype, n_rows):
    """Also as a part of longer rows."""
    gemv = CudaGemv(torch.device("cuda", 0), dtype)
    for n, k in SHAPES:
        if k % 256 and kind not in SHORT:
            continue
        m = Matrix.random(kind, n, k)
        if gemv.prepare(m.packed) < n_rows:
            pytest.skip("this GPU's matrix units read no factor from shared memory")
        x = (normal(n_rows, k) * normal(n_rows, k, seed=2) ** 3).to(dtype)
        found, wide = gemv(m.packed, x), torch.full((n_rows, n + 8), 7.0, dtype=dtype, device=DEVICE)
        assert_near(found, x.double() @ m.numbers.t())
        gemv.into(m.packed, x, wide[:, :n])
        assert torch.equal(found, wide[:, :n])
        assert bool((wide[:, n:] == 7).all())


@of_dtypes
@of_kinds
def test_expert_pairs(kind, dtype):
    gemv = cuda_gemv(torch.device("cuda", 0), dtype)
    experts = torch.tensor([3, 0, 6, 6, 1, 2, 5, 4] * 2, device=DEVICE)
    for n, k, pairs_per_row in ((1024, 2048, 8), (2048, 512, 1), (40, 256, 2)):
        m = Matrix.random(kind, 7 * n, k).experts(7)
        x = normal(len(experts) // pairs_per_row, k, dtype=dtype)
        gemv.prepare(m.packed)
        found = gemv(m.packed, x, experts, pairs_per_row)
        wanted = [x[p // pairs_per_row].double() @ m.numbers[e].t() for p, e in enumerate(experts.tolist())]
        assert_near(found, torch.stack(wanted))


@pytest.mark.parametrize("n_tokens", [4, 40, 300])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_experts_by_their_pairs(kind, n_tokens):
    """Experts without a row, with a few, and with more than a block multiplies at once."""
    gemv, n_experts, generator = (
        cuda_gemv(torch.device("cuda", 0), torch.bfloat16),
        32,
        torch.Generator().manual_seed(1),
    )
    chosen = torch.randint(0, n_experts - 1, (n_tokens * 2,), generator=generator).to(DEVICE)
    for n, k, pairs_per_row in ((1024, 2048, 2), (2048, 512, 1), (40, 256, 2)):
        m = Matrix.random(kind, n_experts * n, k).experts(n_experts)
        x = normal(len(chosen) // pairs_per_row, k, dtype=torch.bfloat16)
        if not gemv.groups(m.packed, len(chosen)):
            assert n_tokens == 300
            continue
        found = gemv.grouped(m.packed, x, ExpertPairs(chosen, n_experts), pairs_per_row)
        wanted = [x[p // pairs_per_row].double() @ m.numbers[e].t() for p, e in enumerate(chosen.tolist())]
        assert_near(found, torch.stack(wanted))


@of_dtypes
def test_a_gate(dtype):
    """The product and the activation as two kernels, whose exponential function is another."""
    gemv = cuda_gemv(torch.device("cuda", 0), dtype)
    for kind, n, k in (("Q4_K", 34816, 5120), ("Q4_K", 1024, 2048), ("Q6_K", 96, 512), ("Q8_0", 8192, 2816)):
        m = Matrix.random(kind, n, k)
        x = normal(1, k, dtype=dtype)
        assert_near(gemv.gated(m.packed, x), act_and_mul(gemv(m.packed, x), "silu").double())
        x = normal(16, k, dtype=dtype)
        if gemv.prepare(m.packed) >= 16 and gemv.gates(m.packed, 16):
            assert_near(gemv.gated(m.packed, x), act_and_mul(gemv(m.packed, x), "silu").double())
    experts, x = torch.tensor([3, 0, 6], device=DEVICE), normal(1, 2048, dtype=dtype)
    m = Matrix.random("Q4_K", 7 * 1024, 2048).experts(7)
    assert_near(gemv.gated(m.packed, x, experts, 3), act_and_mul(gemv(m.packed, x, experts, 3), "silu").double())


def test_products_side_by_side_in_one_row():
    matrices = [Matrix.random("Q6_K", 70, 512), Matrix.random("Q4_K", 40, 512), Matrix.random("Q8_0", 31, 512)]
    gemv = cuda_gemv(torch.device("cuda", 0), torch.bfloat16)
    for m in matrices:
        gemv.prepare(m.packed)
    x = normal(1, 512, dtype=torch.bfloat16)
    joined = ConcatLinear([PackedLinear(m.packed, 512, gemv) for m in matrices])
    assert torch.equal(joined(x), torch.cat([gemv(m.packed, x) for m in matrices], dim=1))


def test_a_graph_of_dependent_products_reads_what_the_one_before_wrote():
    """They start before it ended: each waits for it."""
    gemv = cuda_gemv(torch.device("cuda", 0), torch.bfloat16)
    m = Matrix.random("Q4_K", 4096, 4096)
    gemv.prepare(m.packed)
    x = normal(1, 4096, dtype=torch.bfloat16)
    scale = float(1 / m.numbers.std() / 64)

    def chain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = gemv(m.packed, gemv(m.packed, x) * scale)
            x = x * scale
        return x

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for seed in (5, 6):
        x.copy_(normal(1, 4096, seed=seed))
        graph.replay()
        wanted = x
        for _ in range(20):
            wanted = gemv(m.packed, wanted)
            torch.cuda.synchronize()
            wanted = gemv(m.packed, wanted * scale)
            torch.cuda.synchronize()
            wanted = wanted * scale
        assert torch.equal(found, wanted)


def test_a_gpu_selects_it_and_says_so():
    selector = KernelSelector(torch.device("cuda", 0), torch.bfloat16)
    assert selector.warnings == []
    selector.packed_linear(Matrix.random("Q4_K", 40, 512).packed, 512)
    selector.finish()
    assert selector.selected["cuda:0 linear Q4_K"].startswith("packed, cuda c++ to")
    assert KernelSelector(torch.device("cuda", 0), torch.float32).warnings == []
