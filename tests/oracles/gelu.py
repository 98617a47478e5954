"""GELU as a stock build of ggml computes it on a processor: both sides of the curve are rounded to half precision.

ggml looks the curve up in a table of 65,536 halves (GGML_GELU_FP16 in its ggml-cpu/vec.h), between -10 and 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

_EXACT = functional.gelu


def by_table(x: Tensor, approximate: str = "none") -> Tensor:
    """The tanh form of GELU of a half-precision ``x``, itself in half precision."""
    assert approximate == "tanh", "ggml's table holds the tanh form"
    found = _EXACT(x.to(torch.float16).to(torch.float32), approximate="tanh").to(torch.float16).to(torch.float32)
    return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, found))


@contextmanager
def gelu_of(stock: bool) -> Iterator[None]:
    """Within it our float32 path takes its GELU from the table, if ``stock``."""
    functional.gelu = by_table if stock else _EXACT
    try:
        yield
    finally:
        functional.gelu = _EXACT
