"""Grouped GEMM against exact products, and what it reads and writes.

The exact products are of matrices rounded to the dtype, as the kernel rounds them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton")

from daemons.ops.basic import act_and_mul
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import UNLIMITED_PAIRS
from daemons.ops.moe import ExpertMlp
from daemons.ops.operations import TorchOperations
from daemons.ops.packed_linear import MAX_GEMV_PAIRS_PER_EXPERT, PackedExperts
from daemons.ops.triton.grouped_gemm import GroupedGemmConfig, grouped_gemm_config, packed_grouped_gemm
from tests.kernels.limits import assert_near
from tests.kernels.matrices import DEVICE, DTYPES, KINDS, SHORT, Matrix, ignore_numpy_overflow, normal, on_gpu
from tests.kernels.test_packed_linear import experts_of

__all__ = ["ignore_numpy_overflow"]  # a fixture

SMALL = GroupedGemmConfig(16, 32, 4, 2, 2)


def pairs_of(pairs: list[int], n_experts: int) -> ExpertPairs:
    return ExpertPairs(torch.tensor(pairs, device=DEVICE), n_experts)


def check(
    m: Matrix, pairs: list[int], pairs_per_row: int, dtype: torch.dtype, config: GroupedGemmConfig | None = SMALL
) -> Tensor:
    """``m``: matrices [X, N, K]."""
    x = normal(len(pairs) // pairs_per_row, m.numbers.shape[-1], dtype=dtype)
    found = packed_grouped_gemm(m.packed, x, pairs_of(pairs, m.numbers.shape[0]), pairs_per_row, config)
    assert found.dtype == dtype
    near(found, m.numbers, x[torch.arange(len(pairs)) // pairs_per_row], pairs)
    return found


def near(found: Tensor, matrices: Tensor, x: Tensor, pairs: list[int]) -> None:
    """``found`` [P, N] are the rows x [P, K] times the matrices [X, N, K] of their pairs."""
    for expert in set(pairs):
        of, matrix = [p for p, e in enumerate(pairs) if e == expert], matrices[expert].to(x.dtype).float()
        assert_near(found[of], partial(linear, weight=matrix), x[of])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_type(kind, dtype):
    """More columns than a program takes, and experts with no pair, one, and more than their programs take at a time."""
    m = Matrix.random(kind, 4 * 40, 512).experts(4)
    check(m, [2] * 17 + [0] + [2, 3] * 14 + [2] * 18, 2, dtype)


@pytest.mark.parametrize("kind", SHORT)
def test_rows_that_end_within_a_chunk(kind):
    check(Matrix.random(kind, 3 * 33, 352).experts(3), [1, 0, 0, 2, 1, 1], 1, torch.float16)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_configs(rows):
    n_experts = 3
    n_pairs = rows // 2 * n_experts + (0 if rows < 64 else 3)
    config = grouped_gemm_config(n_pairs, n_experts)
    assert config.rows == rows
    pairs = [i * i % n_experts for i in range(n_pairs)]
    check(Matrix.random("Q4_K", n_experts * 9, 256).experts(n_experts), pairs, 1, torch.float32, config)


def test_all_rows_to_one_expert():
    check(Matrix.random("Q6_K", 5 * 20, 256).experts(5), [4] * 70, 1, torch.float32)


def test_only_routed_rows_are_read_and_all_results_written(monkeypatch):
    """Rows around the activations are NaN, and so are experts without pairs."""
    m = Matrix.random("Q8_0", 4 * 20, 256)
    packed = m.experts(4).packed
    assert packed.steps is not None
    packed.steps[1] = float("nan")
    wide = torch.full((20, 256), float("nan"), dtype=torch.float16, device=DEVICE)
    wide[3:13] = normal(10, 256, dtype=torch.float16)
    pairs = [0, 2, 3, 0, 2, 2, 3, 2, 0, 2]
    real = Tensor.new_empty

    def filled(x: Tensor, *shape: int, **options: object) -> Tensor:
        return real(x, *shape, **options).fill_(float("nan"))

    with monkeypatch.context() as patch:
        if DEVICE == "cuda":  # the interpreter makes tensors too
            patch.setattr(Tensor, "new_empty", filled)
        found = packed_grouped_gemm(packed, wide[3:13], pairs_of(pairs, 4), 1, SMALL)
    assert bool(found.isfinite().all())
    near(found, m.experts(4).numbers, wide[3:13], pairs)


def test_pairs_are_sorted_by_expert():
    pairs = pairs_of([3, 0, 3, 1, 0, 3], 5)
    order, offsets = pairs.sorted_by_expert
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    assert offsets.tolist() == [0, 2, 3, 3, 6, 6]
    assert pairs.sorted_by_expert is pairs.sorted_by_expert


FEW_ROWS = int(3 * MAX_GEMV_PAIRS_PER_EXPERT / 2)


@pytest.mark.parametrize("n_rows", [FEW_ROWS, FEW_ROWS + 1])
def test_an_mlp_by_gemv_and_by_grouped_gemm(n_rows):
    up, down = experts_of("Q4_0", 3, 64, 256), experts_of("Q8_0", 3, 24, 32)
    mlp = ExpertMlp(up.packed, down.packed, "silu", TorchOperations())
    x = normal(n_rows, 256)
    chosen = torch.stack((torch.arange(n_rows) % 3, (torch.arange(n_rows) + 1) % 3), dim=1).to(DEVICE)
    matrices = [experts.blocks.dequantised(chosen.flatten(), torch.float32) for experts in (up, down)]

    def form(x: Tensor) -> Tensor:
        both = torch.bmm(matrices[0], x.repeat_interleave(2, dim=0).unsqueeze(2))
        return torch.bmm(matrices[1], act_and_mul(both.squeeze(2), "silu").unsqueeze(2)).view(n_rows, 2, -1)

    assert_near(mlp.results(x, chosen), form, x)
    assert PackedExperts.max_async_pairs == UNLIMITED_PAIRS


@on_gpu
def test_a_graph_reads_routing_at_replay():
    """Nothing synchronises with the host, and a replay follows other routing."""
    up, down = experts_of("Q4_K", 8, 512, 256), experts_of("Q6_K", 8, 64, 256)
    mlp = ExpertMlp(up.packed, down.packed, "silu", TorchOperations())
    x = normal(300, 256, dtype=torch.bfloat16)
    routes = [torch.rand(300, 8, generator=torch.Generator().manual_seed(i)).topk(2).indices.cuda() for i in range(2)]
    wanted = [mlp.results(x, chosen) for chosen in routes]
    chosen = routes[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mlp.results(x, chosen)
    for each, result in zip(routes, wanted, strict=True):
        chosen.copy_(each)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, result)
