"""Error bounds of kernels against their torch forms: float32 in any order, and the rounding of the result."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from tests.numerics import BFLOAT16, FLOAT16, UNIT, Bound, bound

UNITS = {torch.float32: 0.0, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
"""Unit roundoff of a result computed in float32."""

EXP = 4 * UNIT
"""Of exp2 on a GPU, relative to its result: 2^-22 (PTX: ex2.approx.f32)."""
DIVISION = 4 * UNIT
"""Of a quotient, relative to it: 2 ulp (PTX: div.full.f32)."""


def sigmoid_error(x: Tensor, relative: float = 0.0) -> Tensor:
    """How far 1 / (1 + exp(-x)) in float32 may be from the exact one, relative to it.  ``relative``: the error of x.

    exp(-x) is exp2 of -x log2(e), whose factor and product are rounded: an error of the argument is one of the result
    relative to it, of which 1 - sigmoid(x) is left.  The sum is rounded and divided by.
    """
    return (1 - x.double().sigmoid()) * (x.double().abs() * (2 * UNIT + relative) + EXP) + UNIT + DIVISION


def softplus_error(x: Tensor) -> Tensor:
    """How far max(x, 0) + log(1 + e), where e is exp(-|x|), may be in float32 from the exact softplus.

    An error of e counts e / (1 + e) times.  From 2^-7 on 1 + e is rounded, and log2 of 1 to 2 is off by 2^-22 at most
    (PTX: lg2.approx.f32); below, the series of three terms is cut off at e^3 / 4, less than an ulp, and rounded twice.
    Then a factor and a sum are rounded.
    """
    size = x.double().abs()
    e = (-size).exp()
    logarithm = torch.where(e >= 2.0**-7, UNIT + 4 * UNIT * log(2), 4 * UNIT * e)
    softplus = x.double().clamp(min=0) + e.log1p()
    return e / (1 + e) * (size * 2 * UNIT + EXP) + logarithm + 3 * UNIT * softplus


def assert_each(
    found: Tensor, exact: Tensor, error: Tensor, *, roundings: int = 1, factor: Tensor | float = 0.0
) -> None:
    """Every number of ``found`` is the ``exact`` one but for ``error``, and for each of the ``roundings`` to its dtype
    half a step; ``factor``: of a number that was rounded before it was multiplied, and may have been subnormal.
    """
    assert found.shape == exact.shape
    kind = torch.finfo(found.dtype)
    smallest = kind.smallest_normal * kind.eps * (1 + torch.as_tensor(factor).double().abs())
    over = (found.double() - exact).abs() / (error + roundings * UNITS[found.dtype] * exact.abs() + smallest)
    assert bool((over <= 1).all()), f"{float(over.max()):.2f} times as far as rounding explains"


def assert_nearest(found: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """``found`` is a number of its dtype nearest to one within ``allowed`` of ``exact``: nothing is rounded twice.

    Numbers nearly half-way between two, which either may stand for, are no more than half of all.
    """
    low, high = (exact - allowed).to(found.dtype), (exact + allowed).to(found.dtype)
    decided = low == high
    assert float(decided.float().mean()) > 0.5
    assert torch.equal(found[decided], low[decided])


def assert_near(found: Tensor, form: Callable[..., Tensor], *args: Tensor, rounded: float = 0.0) -> None:
    """``found`` is what ``form`` gives of ``args``, taken as float32, as near as two float32 runs are, and its dtype.

    ``rounded``: the largest number that the kernel rounds to the dtype on the way.
    """
    assert_within(found, bound(form, *(x.float() for x in args)), rounded=rounded)


def assert_within(found: Tensor, bound: Bound, *, rounded: float = 0.0, what: str = "the result") -> None:
    """``found`` is the exact result as near as ``bound`` and its dtype allow; ``rounded`` as in :func:`assert_near`."""
    exact, allowed = bound
    assert found.shape == exact.shape
    smallest = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    limit = allowed.unsqueeze(-1) + UNITS[found.dtype] * (exact.abs() + rounded) + smallest
    over = (found.double() - exact).abs() / limit
    assert bool((over <= 1).all()), f"{what} is {float(over.max()):.2f} times as far as rounding explains"
