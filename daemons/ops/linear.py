"""Linear layers ``y [T, N] = x [T, K] W'`` and embedding tables, one class per weight layout.

``selection`` decides which class a matrix gets, the loader fills it.  Invariant: y has the dtype of x, but from
``in_float32``, and nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.weights.dequant import dequantise
from lucevisor.model.quant_types import INT4_GROUP, GgmlType
from lucevisor.model.workspace import DEQUANT_ELEMENTS, INT8_GEMV_ROWS

GEMV_ROWS = 8
"""Rows up to which a float32 product on a cpu is bound by reading the weights, where a batched product is faster."""

ROW_MULTIPLE = 256
"""Rows are dequantised in multiples of this: GPU libraries are several times slower on unaligned results."""


def rows_at_a_time(n_columns: int) -> int:
    """Rows of a quantised matrix that are dequantised at a time."""
    return max(ROW_MULTIPLE, DEQUANT_ELEMENTS // n_columns // ROW_MULTIPLE * ROW_MULTIPLE)


Product = Callable[[Tensor, Tensor], Tensor]
"""x [T, K] times a matrix [N, K] of its dtype -> [T, N]."""


class Linear(Protocol):
    """A matrix of ``n_out`` rows that takes ``n_bytes`` on its device."""

    n_out: int
    n_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class InPlaceLinear(Protocol):
    """A linear layer that can write the product with rows [T, K] to a place [T, N] in longer rows."""

    def writes_in_place(self, n_rows: int) -> bool:
        """Whether it can for so many rows, as it was made."""

    def into(self, x: Tensor, out: Tensor) -> None: ...


@runtime_checkable
class WideLinear(Protocol):
    """A linear layer whose product is float32 before it is rounded to the dtype of x, and can be left so."""

    def in_float32(self, x: Tensor) -> Tensor: ...


def logits_product(lm_head: Linear) -> Callable[[Tensor], Tensor]:
    """The product with an output matrix, in float32 where its kernels can leave it so.

    Rounded to bfloat16, logits about 20 are multiples of 1/8, and the best two are often equal.
    """
    return lm_head.in_float32 if isinstance(lm_head, WideLinear) else lm_head


class DenseLinear:
    """A plain matrix ``[N, K]`` of the activations' dtype."""

    def __init__(self, weight: Tensor, product: Product = F.linear) -> None:
        self.weight, self.product = weight, product
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class Float32CpuLinear:
    """A float32 matrix on the cpu.

    Few rows are multiplied as a batched product with slices of W: MKL's batched gemm reads W at memory speed (30 GB/s
    per core measured), its gemv at 12 GB/s.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes
        self.parts = next((s for s in (16, 8, 4, 2) if self.n_out % s == 0), 1)
        self.split = weight.view(self.parts, self.n_out // self.parts, weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > GEMV_ROWS or self.parts == 1:
            return F.linear(x, self.weight)
        # column-major on purpose: with a row-major [K, 1] operand MKL is seven times slower
        columns = x.contiguous().as_strided((self.parts, x.shape[1], rows), (0, 1, x.shape[1]))
        out = torch.bmm(self.split, columns)
        return out.view(1, self.n_out) if rows == 1 else out.view(self.n_out, rows).t().contiguous()


class Bfloat16CpuLinear:
    """A bfloat16 matrix on the cpu in oneDNN's packed layout: 2.7 times as fast as a plain one for a decode row."""

    def __init__(self, weight: Tensor) -> None:
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return out


class BlockLinear:
    """Quant blocks as in the file, raw ``[N, row_bytes]`` uint8, dequantised to x's dtype at each call."""

    def __init__(self, kind: GgmlType, raw: Tensor, n_columns: int, product: Product = F.linear) -> None:
        self.kind, self.raw, self.n_columns, self.product = kind, raw, n_columns, product
        self.n_out, self.n_bytes = raw.shape[0], raw.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        step = rows_at_a_time(self.n_columns)
        if step >= self.n_out:
            return self.product(x, dequantise(self.kind, self.raw, x.dtype))
        out = x.new_empty(x.shape[0], self.n_out)
        for at in range(0, self.n_out, step):
            part = dequantise(self.kind, self.raw[at : at + step], x.dtype)
            out[:, at : at + step] = self.product(x, part)
        return out


class Int4CpuLinear:
    """torch's packed int4 for bfloat16 activations: groups of 32 columns, ``w = (q - 8) scale + zero``.

    ``packed`` uint8 [N, K / 2] in the order of torch's kernel for this cpu; ``affine`` bfloat16 [K / 32, N, 2].
    """

    def __init__(self, packed: Tensor, affine: Tensor) -> None:
        self.packed, self.affine = packed, affine
        self.n_out, self.n_bytes = packed.shape[0], packed.nbytes + affine.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self.packed, INT4_GROUP, self.affine)


class Int8CpuLinear:
    """int8 with one bfloat16 scale a row, for bfloat16 activations: ``w = q scale``."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= INT8_GEMV_ROWS:
            return torch._weight_int8pack_mm(x, self.weight, self.scale)
        return F.linear(x, self.weight.to(x.dtype)).mul_(self.scale)


class ConcatLinear:
    """The outputs of several linear layers on one input, concatenated; written side by side where all can do that."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.sizes = [p.n_out for p in parts]
        self.in_place = [p for p in parts if isinstance(p, InPlaceLinear)]
        self.n_out, self.n_bytes = sum(p.n_out for p in parts), sum(p.n_bytes for p in parts)

    def __call__(self, x: Tensor) -> Tensor:
        n_rows = x.shape[0]
        if len(self.in_place) == len(self.parts) and all(p.writes_in_place(n_rows) for p in self.in_place):
            out = x.new_empty(n_rows, self.n_out)
            for part, place in zip(self.in_place, out.split_with_sizes(self.sizes, dim=1), strict=True):
                part.into(x, place)
            return out
        return torch.cat([p(x) for p in self.parts], dim=-1)


# ---- lookups


class Table(Protocol):
    """A table of rows by id that takes ``n_bytes`` on its device."""

    n_bytes: int

    def __call__(self, ids: Tensor) -> Tensor: ...


class DenseTable:
    """Rows of a plain matrix [V, E], in ``dtype``."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype, self.n_bytes = weight, dtype, weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids).to(self.dtype)


class QuantTable:
    """Rows of a table of quant blocks, dequantised after the lookup."""

    def __init__(self, kind: GgmlType, raw: Tensor, dtype: torch.dtype) -> None:
        self.kind, self.raw, self.dtype, self.n_bytes = kind, raw, dtype, raw.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return dequantise(self.kind, self.raw.index_select(0, ids), self.dtype)
