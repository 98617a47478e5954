"""Error bounds of GEMV with packed weights: the roundings of the kernels' own sums.

A kernel sums codes, not weights, and in half precision codes plus a BIAS that is subtracted again, so its partial sums,
whose roundings count, are larger than the result.  Roundings are taken as independent, in the worst order of summation
(docs/numerics.md); no number may be more than ``DEVIATIONS`` standard deviations off.  GPUs' matrix units truncate
instead of rounding, always to one side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daemons.ops.triton.gemv import UNBIASED
from daemons.weights.dequant import dequantise
from daemons.weights.packed import repack, unpack
from lucevisor.model.quant_types import CHUNK, GgmlType
from tests.kernels.limits import UNITS, assert_each, assert_near
from tests.numerics import UNIT, Narrow, narrow_error

DEVIATIONS = 6.0
"""Of 10^5 numbers, one is farther off by chance in 5,000 runs."""
BIAS = {torch.float32: 0, torch.float16: 1024, torch.bfloat16: 128}
"""Added to codes in the mantissa of a dtype; not for types in UNBIASED."""
OFFSET = {"Q6_K": 32, "Q5_0": 16, "Q4_0": 8}
"""The code of zero, for types without minima."""
FLOAT16_KINDS = ("Q4_K", "Q5_K")
"""Types whose half precision gemv sums code x scale, a chunk at a time."""


class Product(NamedTuple):
    """``exact`` float64 [T, N], the standard ``deviation`` of what roundings make of it, and their common ``drift``."""

    exact: Tensor
    deviation: Tensor
    drift: Tensor

    @property
    def allowed(self) -> Tensor:
        return DEVIATIONS * self.deviation + self.drift


def assert_gemv(found: Tensor, x: Tensor, kind: GgmlType, raw: Tensor) -> None:
    """Every number of ``found`` is that of :func:`product` within its bound, rounded to the dtype of ``x``."""
    wanted = product(kind, raw, x)
    assert found.dtype == x.dtype
    assert_each(found, wanted.exact, wanted.allowed)


def assert_gemm(found: Tensor, x: Tensor, numbers: Tensor) -> None:
    """``found`` is the library's product of ``x`` [..., T, K] with ``numbers`` float32 [..., N, K] in the dtype of x:
    in float32 each number, in half precision the norm of all."""
    assert found.dtype == x.dtype
    if x.dtype == torch.float32:
        assert_near(found, lambda x, numbers: x @ numbers.mT, x, numbers)
    else:
        exact, allowed = x.double() @ numbers.double().mT, narrow_error(x, numbers, Narrow(UNITS[x.dtype]))
        assert float((found.double() - exact).norm()) <= float(allowed.norm())


def _variance(n: int, squares: Tensor, result: Tensor) -> Tensor:
    """Of the error of sums of ``n`` terms, of which the squares' sum and the result are given: u^2 / 3 of the square of
    every partial sum, which grows with its length's root where signs are mixed, and with its length where they are not.
    """
    return UNIT**2 * n * (squares / 6 + (result.square() - squares).clamp(min=0) / 9)


def product(kind: GgmlType, raw: Tensor, x: Tensor) -> Product:
    """Of ``x`` [T, K] with the matrix of blocks ``raw`` [N, row_bytes]."""
    numbers, step, zero = _affine(kind, raw)
    float16 = kind.name in FLOAT16_KINDS and x.dtype != torch.float32
    bias = 0 if float16 or kind.name in UNBIASED else BIAS[x.dtype]
    offset = OFFSET.get(kind.name, 0)
    size = CHUNK if float16 else 16 if kind.name == "Q6_K" else 32
    cut = x.dtype != torch.float32 and x.device.type == "cuda"
    x = x.double()
    exact = x @ numbers.t()
    minima = zero + offset * step if kind.name not in UNBIASED else torch.zeros_like(zero)
    counted = numbers - minima  # step times code less offset
    codes = counted + (bias + offset) * step

    # each group's sum; it starts or ends with what BIAS and offset add to it, a product that is rounded
    groups = _variance(size + 1, _grouped(codes.square(), x.square(), size), _grouped(codes, x, size))
    groups += ((bias + offset) * UNIT * _grouped(step, x, size)).square() / 3
    drift = (3 * (size + 1) * groups).sqrt().sum(dim=-1) if cut else torch.zeros_like(exact)

    # the sums of x that these products and the minima are made of; for the float16 gemv two float16 numbers, 22 bits
    taken, lows = (bias + offset) * step.abs() + minima.abs(), _grouped(minima, x, 32)
    totals = _variance(32, _grouped(taken.square(), x.square(), 32), _grouped(taken, x, 32))
    totals += ((4 if float16 else 1) * UNIT * lows).square() / 3

    # all groups together, and all minima; each number is multiplied by a scale or two before
    parts = _grouped(counted, x, size)
    variance = groups.sum(dim=-1) + totals.sum(dim=-1)
    for part in (parts, lows):
        n = parts.shape[-1] + lows.shape[-1] + 4
        variance += _variance(n, part.square().sum(dim=-1), part.sum(dim=-1))

    if float16:  # x in float16: numbers 2^34 times smaller than their chunk's largest vanish
        largest = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).abs().amax(dim=-1)
        ones = torch.ones_like(x[:1])
        drift += (largest.unsqueeze(1) * _grouped(counted.abs(), ones, size)).sum(dim=-1) * 2.0**-34
    return Product(exact, variance.sqrt(), drift)


def _affine(kind: GgmlType, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, and for each the step from one code to the next and the number of code 0, float64 [N, K]."""
    packed, n_columns = repack(kind, raw), raw.shape[1] // kind.block_bytes * kind.block_elements

    def of_code(code: int) -> Tensor:
        packed.codes.fill_(code if kind.name == "Q8_0" else code * 0x11111111)
        if packed.high is not None:
            packed.high.zero_()
        return dequantise(kind, unpack(packed, n_columns), torch.float32).double()

    return dequantise(kind, raw, torch.float32).double(), of_code(1) - of_code(0), of_code(0)


def _grouped(weight: Tensor, x: Tensor, size: int) -> Tensor:
    """The products of ``x`` [T, K] and ``weight`` [N, K] group by group, [T, N, groups]."""
    missing = -x.shape[1] % size
    x, weight = (torch.nn.functional.pad(y, (0, missing)).unflatten(1, (-1, size)) for y in (x, weight))
    return torch.einsum("tgl,ngl->tng", x, weight)
