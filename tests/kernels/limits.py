"""How far a kernel's result may be from its torch form: float32 in any order, and the rounding of the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.numerics import BFLOAT16, FLOAT16, UNIT, Bound, bound

UNITS = {torch.float32: 0.0, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
"""Of the rounding of a result that was computed in float32."""

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
    print("USE", float(over.max()))
    assert bool((over <= 1).all()), f"{what} is {float(over.max()):.2f} times as far as rounding explains"
