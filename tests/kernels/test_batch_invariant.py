"""Kernels of ``engine.deterministic``: any rows of any batch have the bits that they have alone.

The interpreter multiplies tiles with numpy's BLAS, whose sums depend on where in a tile a number is.  A GPU's matrix
units compute all numbers of a tile alike, so the interpreter does, too, here.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton")

from daemons.ops import triton_batch_invariant
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.operations import PagedQuery
from daemons.ops.triton.dense_gemm import dense_gemm
from daemons.ops.triton_batch_invariant import (
    BatchInvariantPackedExperts,
    BatchInvariantPackedLinear,
    BatchInvariantTritonOperations,
)
from tests.kernels.delta_layers import Layer, make_states
from tests.kernels.limits import assert_near
from tests.kernels.matrices import DEVICE, KINDS, Matrix, ignore_numpy_overflow, normal, on_gpu
from tests.kernels.test_paged_attention import Problem, Scene

__all__ = ["ignore_numpy_overflow"]  # a fixture
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [HALF, torch.float32]
EXAMPLES = 40 if DEVICE == "cuda" else 4
MOST = 200 if DEVICE == "cuda" else 40  # rows


@pytest.fixture(autouse=True, scope="module")
def tiles_are_summed_in_order():
    """The interpreter's products of tiles: each number by the same additions in the same order."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        for i in range(a.data.shape[1]):
            total += a.data[:, i : i + 1].astype(total.dtype) * b.data[i : i + 1].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


rows_of_a_batch = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=MOST)
"""Some rows, of which any may repeat, in any order."""


def assert_same_bits(work, x: Tensor, rows: list[int]) -> None:
    assert torch.equal(work(x[rows].contiguous()), work(x)[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_packed_matrices(kind: str, dtype: torch.dtype) -> None:
    m = Matrix.random(kind, 40, 512)
    product, x = BatchInvariantPackedLinear(m.packed, 512), normal(MOST, 512, dtype=dtype)
    assert_near(product(x), lambda x: linear(x, m.numbers.to(dtype).float()), x)

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(rows_of_a_batch)
    def check(rows: list[int]) -> None:
        assert_same_bits(product, x, rows)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_out", "width"), [(70, 100), (33, 256)])
def test_products_with_plain_matrices(n_out: int, width: int, dtype: torch.dtype) -> None:
    weight, x = normal(n_out, width, dtype=dtype, seed=2), normal(MOST, width, dtype=dtype)
    assert_near(dense_gemm(x, weight), lambda x: linear(x, weight.float()), x)

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(rows_of_a_batch)
    def check(rows: list[int]) -> None:
        assert_same_bits(lambda x: dense_gemm(x, weight), x, rows)

    check()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", None])
def test_splits_of_a_long_inner_dimension_have_one_order(kind: str | None) -> None:
    """Few rows compute the splits side by side, more than 64 one after another, more than 128 of numbers."""
    width = 1792
    if kind is None:
        weight = normal(40, width, dtype=HALF, seed=2)
        product, numbers = partial(dense_gemm, weight=weight), weight
    else:
        m = Matrix.random(kind, 40, width)
        product, numbers = BatchInvariantPackedLinear(m.packed, width), m.numbers.to(HALF)
    x = normal(130, width, dtype=HALF)
    whole = product(x)
    assert_near(whole, lambda x: linear(x, numbers.float()), x)
    for rows in ([0], [129], [*range(20)], [*range(3, 67)], [*range(70)]):
        assert torch.equal(product(x[rows]), whole[rows])


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.sampled_from([(0, 1), (2, 0), (3, 2), (1, 3)]), min_size=1, max_size=MOST))
def test_experts(routes: list[tuple[int, int]]) -> None:
    experts = BatchInvariantPackedExperts(Matrix.random("Q4_K", 4 * 20, 256).experts(4).packed, 256)
    x = normal(len(routes), 256, dtype=HALF)

    def products(of: list[int]) -> Tensor:
        chosen = torch.tensor([routes[i] for i in of], device=DEVICE)
        return experts.grouped_gemm(x[of], ExpertPairs(chosen.flatten(), 4), 2).view(len(of), 2, -1)

    together = products([*range(len(routes))])
    for i in {0, len(routes) // 2, len(routes) - 1}:
        assert torch.equal(products([i])[0], together[i])


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize(("kv", "softcap"), [(HALF, 0.0), (None, 0.0), (HALF, 3.0)])
def test_attention(kv: torch.dtype | None, softcap: float, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 40 tokens over two splits, whole, or in parts, or its rows alone, or a few beside another sequence."""
    n, scene = 40, Scene(Problem((600, 90), 40, dtype=HALF, kv=kv, window=window, softcap=softcap))
    attend = BatchInvariantTritonOperations().paged_attention(window=window, scale=0.1, softcap=softcap)
    assert attend is not None

    def run(slices: list[int], first: int, count: int, bound: int) -> Tensor:
        q = torch.cat([scene.q[b * n + first : b * n + first + count] for b in slices])
        where = PagedQuery(scene.tables, scene.table_rows[slices], scene.starts[slices] + first, count, bound)
        return attend(q, scene.keys, scene.values, where).view(len(slices), count, *scene.q.shape[1:])

    whole = run([0], 0, n, 1024)[0]
    monkeypatch.setattr(triton_batch_invariant, "PARTIAL_BYTES", 0)
    assert torch.equal(run([0], 0, n, 1024)[0], whole)
    for first, count, slices, bound in [
        (0, 1, [0], 1024),
        (39, 1, [0], 4096),
        (17, 5, [0, 1], 1024),
        (3, 30, [1, 0], 600),
    ]:
        found = run(slices, first, count, bound)
        assert torch.equal(found[slices.index(0)], whole[first : first + count])


def test_the_delta_net_of_long_slices_is_that_of_single_tokens_and_of_verified_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_batch_invariant, "DELTA_NET_TOKENS", 32)
    a = Layer.random(1, 2, 32, 4, (0.1, 8.0), 8)
    b, c = a.twin(), a.twin()
    y, ids = a.inputs(40).to(HALF), torch.tensor([3], device=DEVICE)
    operations = BatchInvariantTritonOperations()
    whole = operations.gated_delta_net(a.params)(y, a.pools, ids, ids.new_empty(1, 0), torch.tensor([[0, 40]]))
    net = operations.gated_delta_net(b.params)
    alone = [net(y[i : i + 1], b.pools, ids, ids.view(1, 1), ids.new_empty(1, 0)) for i in range(40)]
    assert torch.equal(torch.cat(alone), whole)
    found, kept = (
        [net(y[:35], c.pools, ids, ids.new_empty(1, 0), torch.tensor([[0, 35]]))],
        torch.tensor([[3, 4, 5, 6, 7]]),
    )
    kept = kept.to(DEVICE)
    found.append(net(y[35:], c.pools, ids, kept, ids.new_empty(1, 0)))
    make_states(c.pools, [3], kept, operations)
    assert torch.equal(torch.cat(found), whole)
    for pool in ("conv_states", "states"):
        assert torch.equal(getattr(b, pool)[3], getattr(a, pool)[3])
        assert torch.equal(getattr(c, pool)[7], getattr(a, pool)[3])


@pytest.mark.parametrize("width", [40, 256, 1100])
def test_a_norm_behind_an_addition_is_the_norm_of_the_sum(width: int) -> None:
    norm = BatchInvariantTritonOperations().norm(normal(width), width, 1e-6)
    x, y = normal(5, width, dtype=HALF), normal(5, width, dtype=HALF, seed=2)
    total, normed = norm.fused_add(x, y)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm(total))
    assert torch.equal(norm(total[3:4]), normed[3:4])


@on_gpu
def test_full_size_rows_on_a_gpu() -> None:
    """Shapes of a large model, in which a library's products differ."""
    for kind, n, k in (("Q4_K", 5120, 5120), ("Q6_K", 17408, 5120)):
        m, x = Matrix.random(kind, n, k), normal(2048, k, dtype=HALF)
        product = BatchInvariantPackedLinear(m.packed, k)
        whole = product(x)
        for rows in ([0], [1, 2047], [*range(64)], [*range(5, 700)]):
            assert torch.equal(product(x[rows]), whole[rows])
    weight, x = normal(5120, 5120, dtype=HALF), normal(2048, 5120, dtype=HALF, seed=2)
    whole = dense_gemm(x, weight)
    for rows in ([0], [1, 2047], [*range(64)], [*range(5, 700)]):
        assert torch.equal(dense_gemm(x[rows], weight), whole[rows])
