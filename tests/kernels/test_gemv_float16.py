"""GEMV in float16 for Q4_K and Q5_K: scaling x to float16, and numbers of every size."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from daemons.ops.triton import gemv_float16  # noqa: E402
from daemons.ops.triton.gemv import packed_gemv  # noqa: E402
from daemons.weights.packed import PackedWeights, repack  # noqa: E402
from lucevisor.model.quant_types import BY_NAME  # noqa: E402
from tests.daemons.tiny_models import random_blocks  # noqa: E402
from tests.kernels.gemv_error import assert_gemv  # noqa: E402
from tests.numerics import FLOAT16, UNIT  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
of_kinds = pytest.mark.parametrize("kind", sorted(gemv_float16.FLOAT16_KINDS))


@pytest.fixture(autouse=True)
def ignore_numpy_overflow():
    """The interpreter computes with numpy, which warns about infinity and NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def matrix(kind: str, n: int, k: int) -> tuple[PackedWeights, torch.Tensor]:
    """Packed weights and their blocks; minima are half the range of codes below zero."""
    raw = random_blocks(np.random.default_rng(n + k), kind, n, k)
    ends = raw.reshape(n, -1, BY_NAME[kind].block_bytes)[..., :4].view(np.float16)
    ends[..., 1] = ends[..., 0] * (7.5 if kind == "Q4_K" else 15.5)
    blocks = torch.from_numpy(raw).to(DEVICE)
    return repack(BY_NAME[kind], blocks), blocks


def prepared(x, block_rows):
    """Numbers [T, chunks, 256], factors [T, chunks], totals [T, chunks, 16]."""
    n_rows, width = x.shape
    n_chunks, blocks = -(-width // 256), -(-n_rows // block_rows)
    numbers = torch.full((n_rows, n_chunks, 256), float("nan"), dtype=torch.float16, device=DEVICE)
    factors = torch.zeros(blocks, n_chunks, block_rows, device=DEVICE)
    totals = torch.zeros(blocks, n_chunks, block_rows, 16, dtype=torch.float16, device=DEVICE)
    grid = (n_chunks, -(-n_rows // gemv_float16.PREPARE_ROWS))
    gemv_float16.gemv_float16_prepare_kernel[grid](
        *(x, numbers, factors, totals, n_rows, n_chunks, width, block_rows, gemv_float16.PREPARE_ROWS),
        PDL=False,
        num_warps=4,
    )
    by_row = factors.transpose(1, 2).flatten(0, 1), totals.transpose(1, 2).flatten(0, 1)
    return numbers, *(t[:n_rows].float() for t in by_row)


@of_dtypes
@pytest.mark.parametrize(("n_rows", "width", "block_rows"), [(1, 512, 8), (11, 768, 16), (5, 352, 1)])
def test_x_comes_to_float16_without_loss(dtype, n_rows, width, block_rows):
    sizes = torch.logspace(-5, 5, n_rows, base=10, device=DEVICE).unsqueeze(1)
    x = (normal(n_rows, width) * sizes).to(dtype)
    numbers, factors, totals = prepared(x, block_rows)
    back = (numbers.float() * factors.unsqueeze(2)).flatten(1)
    finite = x.isfinite().all(dim=1)
    assert bool(finite.any())
    assert torch.equal(back[finite, :width], x.float()[finite])
    assert not bool(back[:, width:].any())
    assert bool(((factors.log2() % 1) == 0).all())
    sums = numbers.double().view(n_rows, -1, 8, 32).sum(-1)
    both = totals[..., :8].double() + totals[..., 8:].double()
    largest = numbers.double().abs().amax(dim=2)[finite]
    assert bool(((largest >= 512) & (largest < 1024)).all())
    # 31 additions, and what a float16 left of them as another one
    size = numbers.double().abs().view(n_rows, -1, 8, 32).sum(-1)
    allowed = 31 * UNIT * size + FLOAT16**2 * sums.abs() + 2.0**-25
    assert bool(((both - sums).abs() <= allowed)[finite].all())


@of_dtypes
@of_kinds
@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
def test_numbers_of_every_size(kind, dtype, scale):
    """A result is as exact as its chunk's largest number allows, for one row or many."""
    packed, raw = matrix(kind, 70, 512)
    x = (normal(3, 512) * scale).to(dtype)
    x[1, ::2] *= 2.0**-12
    x[2] = 0
    x[2, 300] = scale
    found = packed_gemv(packed, x)
    assert_gemv(found, x, BY_NAME[kind], raw)


@of_kinds
def test_rows_of_zeros_give_zeros(kind):
    packed, _ = matrix(kind, 40, 256)
    found = packed_gemv(packed, torch.zeros(2, 256, dtype=torch.float16, device=DEVICE))
    assert not bool(found.any())


@of_kinds
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_stay_in_their_row(kind, value):
    """And only in its own row."""
    packed, raw = matrix(kind, 40, 512)
    x = normal(2, 512, dtype=torch.float16)
    x[0, 300] = value
    found = packed_gemv(packed, x)
    assert not bool(found[0].isfinite().any())
    assert_gemv(found[1:], x[1:], BY_NAME[kind], raw)


@of_dtypes
@of_kinds
@pytest.mark.parametrize("n_rows", [1, 8, 16, 33, 64])
def test_a_row_does_not_depend_on_others(kind, dtype, n_rows):
    """Other rows change neither its factor nor its sums, as long as the config is the same."""
    packed, _ = matrix(kind, 40, 512)
    x = normal(64, 512, dtype=dtype)[:n_rows].contiguous()
    others = x.clone()
    others[: n_rows // 2] *= 1000
    found, again = (packed_gemv(packed, rows) for rows in (x, others))
    assert torch.equal(found[n_rows // 2 :], again[n_rows // 2 :])
