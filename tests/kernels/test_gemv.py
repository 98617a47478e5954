"""GEMV with packed weights against float64 products of the dequantised matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from daemons.ops.triton import dequant, gemv, gemv_float16, split_k
from daemons.ops.triton.dequant import dequantise_packed
from daemons.ops.triton.gemv import MAX_GEMV_ROWS, UNBIASED, packed_gemv
from daemons.ops.triton.split_k import GemvConfig
from daemons.weights.dequant import dequantise
from daemons.weights.packed import PackedWeights, repack
from lucevisor.model.quant_types import BY_NAME
from tests.kernels.gemv_error import assert_gemv, product
from tests.kernels.limits import UNITS
from tests.kernels.matrices import (
    DEVICE,
    DTYPES,
    SHORT,
    Matrix,
    extreme,
    halves,
    ignore_numpy_overflow,
    normal,
    of_kinds,
    on_gpu,
)
from tests.numerics import FLOAT16, UNIT

__all__ = ["ignore_numpy_overflow"]  # a fixture

SHAPES = [(1, 31), (2, 40), (8, 1), (16, 31), (9, 100), (17, 40), (33, 31), (64, 1)]
"""Rows and columns: one more and one less than a tile, one, many."""


# ---- multiplied


@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [(*shape, dtype) for i, shape in enumerate(SHAPES) for dtype in (DTYPES if DEVICE == "cuda" else [DTYPES[i % 2]])],
    ids=lambda v: str(v).removeprefix("torch."),
)
@of_kinds
def test_rows_and_columns(kind, rows, n, dtype):
    Matrix.random(kind, n, 256).check(normal(rows, 256, dtype=dtype))


@pytest.mark.parametrize(
    ("k", "config", "dtype"),
    [
        (768, GemvConfig(16, 1, 2, 3), torch.float32),
        (2048, None, torch.float16),
    ],
    ids=lambda v: str(v).removeprefix("torch."),
)
@of_kinds
def test_split_k(kind, k, config, dtype):
    Matrix.random(kind, 20, k).check(normal(3, k, dtype=dtype), config)


@pytest.mark.parametrize(("rows", "k", "dtype"), [(1, 96, DTYPES[1]), (3, 352, DTYPES[0]), (17, 704, DTYPES[-1])])
@pytest.mark.parametrize("kind", SHORT)
def test_rows_that_end_within_a_chunk(kind, rows, k, dtype):
    m = Matrix.random(kind, 40, k)
    for config in (None, GemvConfig(32, 2, 2, 2)):
        m.check(normal(rows, k, dtype=dtype), config)


@pytest.mark.parametrize(
    "config", [GemvConfig(32, 2, 3, 1), GemvConfig(64, 4, 1, 2), GemvConfig(32, 2, 3, 5)], ids=lambda h: h.n_splits
)
def test_uneven_and_empty_splits(config):
    Matrix.random("Q8_0", 20, 768).check(normal(3, 768), config)


@pytest.mark.parametrize("n_units", [1, 132])
def test_no_split_is_without_chunks(monkeypatch, n_units):
    monkeypatch.setattr(split_k, "n_processors", lambda device: n_units)
    device = torch.device("cpu")
    for n_out in (1, 40, 1000, 5120, 150_000):
        for n_chunks in (1, 2, 3, 10, 20, 68):
            for deep in (1, 8, 64):
                config = split_k.gemv_config(split_k.GemvTile(), deep, n_out, n_chunks, device)
                assert 1 <= config.n_splits <= max(1, n_chunks // split_k.MIN_CHUNKS)
                programs = -(-n_out // config.columns) * deep * config.n_splits
                assert config.n_splits == 1 or programs * config.n_warps <= split_k.WARPS_PER_PROCESSOR * n_units


@of_kinds
def test_nothing_but_the_result_is_rounded(kind):
    """All float16 results but a few near half-way cases are nearest to the exact product."""
    m = Matrix.random(kind, 40, 512)
    x = normal(8, 512, dtype=torch.float16)
    wanted = product(m.kind, m.raw, x)
    other = m.check(x) != wanted.exact.half()
    # an error moves as many numbers to the next one as it is parts of a step; a drift has a random sign in each group
    step = FLOAT16 * 2 ** (wanted.exact.abs().log2().floor() + 1)
    groups = 512 // (16 if kind == "Q6_K" else 32)
    size = (2 / math.pi) ** 0.5 * wanted.deviation + wanted.drift / groups**0.5
    n = float((size / step).clamp(max=1).sum())
    assert int(other.sum()) <= n + 5 * n**0.5


@pytest.mark.parametrize("dtype", DTYPES[1:])
@of_kinds
def test_an_offset_of_the_activations_leaves_the_result(kind, dtype):
    """Codes are numbers BIAS, whose product with the sum of x is taken off again: here it is 1024 times 50 times 32,
    and a result a few thousandths of it.  float32 keeps 24 bits of it, so what is lost is still far below a float16's.
    """
    m = Matrix.random(kind, 32, 512)
    x = (normal(4, 512) + 50).to(dtype)
    found = m.check(x)
    wanted = x.double() @ m.numbers.t()
    assert float((found.double() - wanted).norm() / wanted.norm()) < UNITS[dtype]


@of_kinds
def test_a_large_activation_leaves_the_small_ones(kind):
    """Outliers, as layers have them.  A group of 32 is a float32 sum of (code + 1024) x, so an outlier costs its group
    bits even where its weight is 0: each later addition rounds by u (code + 1024) step |x| at most, all
    by sqrt(32 / 3) of that in the standard deviation, five of which are 16: a fifth of what the others add up to.
    """
    m = Matrix.random(kind, 32, 512)
    x = normal(4, 512, dtype=torch.float16)
    others = x.double() @ m.numbers.t()
    x[:, 5], x[1, 40] = 3000.0, -2000.0
    found, wanted = packed_gemv(m.packed, x), x.double() @ m.numbers.t()
    over = (found.double() - wanted).abs() - UNITS[x.dtype] * wanted.abs()
    if kind in UNBIASED:
        most = m.numbers.abs().max()
    else:
        n_codes = 1 << int(kind[1])
        most = (1024 + n_codes) * 2 * m.numbers.abs().max() / n_codes
    allowed = 16 * UNIT * most * x.double().abs().sum(dim=1, keepdim=True)
    assert bool((over <= allowed).all()), float((over / allowed).max())
    assert float(allowed.max()) < 0.2 * float(others.std())


@of_kinds
def test_extreme_scales(kind):
    m = Matrix.of(kind, extreme(kind))
    x = normal(3, 256)
    found = m.check(x)
    assert not bool(found[:, :2].any())  # zero blocks
    assert bool(found[:, [2, 3, 4, 5, 6, 7, 8, 10, 11]].all())
    if kind in ("Q6_K", "Q4_0", "Q8_0"):
        assert torch.equal(found[:, 2].sign(), (x.double() @ m.numbers[2]).sign().float())


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0"])
def test_lowest_codes_and_scales(kind):
    """-128 as a code of Q8_0, as a scale of Q6_K; all bits set elsewhere."""
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        raw = np.full((4, 256 // BY_NAME[kind].block_elements * BY_NAME[kind].block_bytes), byte, dtype=np.uint8)
        halves(raw, kind)[:] = 0.01
        Matrix.of(kind, raw).check(normal(2, 256, dtype=torch.float16))


def test_a_row_does_not_depend_on_others():
    m = Matrix.random("Q4_K", 31, 256)
    x = normal(6, 256, dtype=torch.float16)
    together = packed_gemv(m.packed, x)
    x[3] = 60000
    beside = packed_gemv(m.packed, x)
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(together[keep], beside[keep])
    assert not torch.equal(together[3], beside[3])


# ---- experts


@pytest.mark.parametrize(
    ("experts", "pairs_per_row"),
    [([1], 1), ([2, 0, 1, 1], 2), ([0, 2, 2], 1)],
    ids=["one", "several of a row", "rows of their own"],
)
@of_kinds
def test_expert_pairs(kind, experts, pairs_per_row):
    check_routed(Matrix.random(kind, 3 * 20, 256).experts(3), experts, pairs_per_row, torch.float16)


@pytest.mark.parametrize("kind", SHORT)
def test_expert_pairs_of_padded_rows(kind):
    check_routed(Matrix.random(kind, 3 * 20, 352).experts(3), [2, 0, 1, 1], 2, torch.float16)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_expert_pairs_with_split_k(kind):
    check_routed(Matrix.random(kind, 4 * 20, 768).experts(4), [3, 3], 1, torch.float32, GemvConfig(16, 1, 2, 3))
    check_routed(Matrix.random(kind, 4 * 33, 256).experts(4), [3, 0], 2, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_many_pairs(dtype):
    check_routed(
        Matrix.random("Q4_0", 7 * 9, 256).experts(7),
        [i * i % 7 for i in range(40 if DEVICE == "cuda" else 20)],
        4,
        dtype,
    )


def test_more_pairs_than_gemv_rows():
    n = MAX_GEMV_ROWS + 5
    check_routed(Matrix.random("Q8_0", 2 * 3, 256).experts(2), [i % 2 for i in range(n)], 1, torch.float32)


def check_routed(
    m: Matrix, experts: list[int], pairs_per_row: int, dtype: torch.dtype, config: GemvConfig | None = None
) -> None:
    x = normal(len(experts) // pairs_per_row, m.numbers.shape[-1], dtype=dtype)
    found = packed_gemv(m.packed, x, torch.tensor(experts, device=DEVICE), pairs_per_row, config)
    assert found.shape == (len(experts), m.numbers.shape[1])
    for p, expert in enumerate(experts):
        assert_gemv(found[p : p + 1], x[p // pairs_per_row : p // pairs_per_row + 1], m.kind, m.blocks_of(expert))


# ---- memory


class Guarded:
    """Allocates tensors of NaN surrounded by sevens, and checks afterwards what was written where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []
        real, real_empty = torch.full, Tensor.new_empty

        def make(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            n = int(np.prod(shape))
            whole = real((n + 512,), 7.0, dtype=dtype, device=device)
            self.made.append((whole, whole[256 : 256 + n].fill_(float("nan"))))
            return whole[256 : 256 + n].view(shape)

        def like(x: Tensor, *shape: int, **options: torch.device) -> Tensor:
            if options:  # the interpreter's own
                return real_empty(x, *shape, **options)
            return make(*shape, dtype=x.dtype, device=x.device)

        class Torch:
            """What the launchers use of torch."""

            empty, float32 = staticmethod(make), torch.float32

        for module in (gemv, dequant):
            monkeypatch.setattr(module, "torch", Torch)
        monkeypatch.setattr(Tensor, "new_empty", like)

    def check(self) -> None:
        assert self.made
        for whole, inner in self.made:
            assert bool(inner.isfinite().all()), "not all of it was written"
            around = torch.cat((whole[:256], whole[-256:]))
            assert bool((around == 7.0).all()), "more than it was written"


@pytest.mark.parametrize("config", [GemvConfig(32, 2, 3, 1), GemvConfig(16, 1, 2, 2)], ids=["whole", "parts"])
@pytest.mark.parametrize(("kind", "k"), [("Q5_K", 512), ("Q6_K", 512), ("Q8_0", 512), ("Q8_0", 480), ("Q5_0", 288)])
def test_gemv_reads_and_writes_nothing_else(kind, k, config, monkeypatch):
    """Activations and rows of the matrix have neighbours of NaN."""
    m = Matrix.random(kind, 64, k)
    raw = m.raw.cpu().numpy().copy()
    halves(raw, kind)[:16] = np.nan
    halves(raw, kind)[16 + 28 :] = np.nan
    packed = PackedWeights(m.kind, repack(m.kind, torch.from_numpy(raw).to(DEVICE)).tiles[1:3], 28)
    wide = torch.full((9, k), float("nan"), dtype=torch.float16, device=DEVICE)
    wide[2:5] = normal(3, k, dtype=torch.float16)
    x = wide[2:5]
    with monkeypatch.context() as patch:
        guarded = Guarded(patch)
        found = packed_gemv(packed, x, config=config)
    guarded.check()
    assert_gemv(found, x, m.kind, m.raw[16 : 16 + 28])


def test_gemv_of_expert_pairs_writes_nothing_else(monkeypatch):
    m = Matrix.random("Q4_K", 3 * 20, 512).experts(3)
    experts, x = torch.tensor([2, 1, 2], device=DEVICE), normal(3, 512, dtype=torch.float16)
    with monkeypatch.context() as patch:
        guarded = Guarded(patch)
        packed_gemv(m.packed, x, experts, 1, GemvConfig(16, 1, 2, 2))
    guarded.check()


@of_kinds
def test_dequantisation_writes_nothing_else(kind, monkeypatch):
    m = Matrix.random(kind, 7, 256)
    with monkeypatch.context() as patch:
        guarded = Guarded(patch)
        dequantise_packed(m.packed, torch.float16, 1, 3)
    guarded.check()


# ---- as a server runs it


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@of_kinds
def test_a_graph_reads_activations_at_replay(kind, dtype):
    m, stacked = Matrix.random(kind, 200, 2048), Matrix.random(kind, 5 * 40, 2048).experts(5)
    x, experts = normal(4, 2048, dtype=dtype), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], device=DEVICE)
    packed_gemv(m.packed, x)  # compiled before the capture
    packed_gemv(stacked.packed, x, experts, 2)
    dequantise_packed(m.packed, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed_gemv(m.packed, x)
        pairs = packed_gemv(stacked.packed, x, experts, 2)
        numbers = dequantise_packed(m.packed, dtype)
    for seed in (5, 6):
        x.copy_(normal(4, 2048, seed=seed))
        experts.copy_(experts.flip(0) if seed == 5 else torch.full_like(experts, 3))
        graph.replay()
        assert_gemv(found, x, m.kind, m.raw)
        for p, expert in enumerate(experts.tolist()):
            assert_gemv(pairs[p : p + 1], x[p // 2 : p // 2 + 1], stacked.kind, stacked.blocks_of(expert))
        assert torch.equal(numbers, dequantise(m.kind, m.raw, dtype))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_other_row_and_pair_counts_compile_nothing(kind):
    m, stacked = Matrix.random(kind, 200, 2048), Matrix.random(kind, 5 * 40, 2048).experts(5)

    def compiled() -> int:
        products = (gemv.gemv_kernel, gemv_float16.gemv_float16_kernel, gemv_float16.gemv_float16_prepare_kernel)
        kernels = (*products, gemv.group_sums_kernel, split_k.split_sum_kernel, dequant.dequantise_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(rows: range, counts: range) -> None:
        for n in rows:
            packed_gemv(m.packed, normal(n, 2048, dtype=torch.float16))
        for n in counts:
            experts = torch.arange(16 * n, device=DEVICE)[: n * 2] % 5
            packed_gemv(stacked.packed, normal(n, 2048, dtype=torch.float16), experts, 2)
            packed_gemv(stacked.packed, normal(2 * n, 2048, dtype=torch.float16), experts)
        for first in (0, 1, 16):
            dequantise_packed(m.packed, torch.float16, first, 200 - 2 * first)

    def gemv_config(block_rows: int, n_splits: int) -> GemvConfig:
        tile = gemv_float16.float16_tile(block_rows) if kind == "Q4_K" else split_k.GemvTile()
        return GemvConfig(tile.columns, tile.n_warps, tile.n_stages, n_splits)

    for n_splits in (1, 4):  # a sum is needed, or none
        packed_gemv(m.packed, normal(3, 2048, dtype=torch.float16), config=gemv_config(8, n_splits))
        packed_gemv(m.packed, normal(9, 2048, dtype=torch.float16), config=gemv_config(16, n_splits))
        experts = torch.tensor([1, 2], device=DEVICE)
        packed_gemv(stacked.packed, normal(1, 2048, dtype=torch.float16), experts, 2, gemv_config(1, n_splits))
    dequantise_packed(m.packed, torch.float16, 3, 5)
    before = compiled()
    assert before > 0
    run(range(1, 17), range(1, 40))
    assert compiled() == before
