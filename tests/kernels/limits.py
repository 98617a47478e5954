"""How far a kernel's result may be from its torch form: float32 in any order, and the rounding of the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.numerics import BFLOAT16, FLOAT16, Bound, bound

UNITS = {torch.float32: 0.0, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
"""Of the rounding of a result that was computed in float32."""


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
