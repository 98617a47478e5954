"""Find NaN and infinities in weights, by the numbers that scale the file's own blocks.

Reads one byte of each scale, so a check costs a small part of reading the tensor.  Knows formats, no files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lucevisor.model.quant_types import GgmlType

HALVES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the float16 numbers of a block lie: its scale, and its minimum."""
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checks_blocks(kind: GgmlType) -> bool:
    """Return whether ``any_invalid`` knows a type; the numbers of others are looked at when they are dequantised."""
    return kind.name in HALVES or kind.name in _DENSE or kind.name == "MXFP4"


def any_invalid(kind: GgmlType, raw: Tensor) -> Tensor:
    """Return whether rows ``raw`` [rows, row_bytes] uint8 have a number that is NaN or infinite: bool [], on the same
    device.
    """
    if kind.name in _DENSE:
        return any_not_finite(raw.view(_DENSE[kind.name]))
    blocks = raw.view(-1, kind.block_bytes)
    if kind.name == "MXFP4":
        return (blocks[:, 0] == 255).any()  # NaN of e8m0
    found = [((blocks[:, at + 1] & 0x7C) == 0x7C).any() for at in HALVES[kind.name]]
    return torch.stack(found).any()


def any_not_finite(numbers: Tensor) -> Tensor:
    """Return whether any of the numbers is NaN or infinite: bool []."""
    return ~numbers.isfinite().all()
