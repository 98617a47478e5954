"""Products with a resting matrix: ``y [T, N] = x [T, K] W'`` for each form W may rest in.

Which class a matrix gets is decided by ``choose``; how its bytes came into memory is the loader's affair.
Invariant: y has the dtype of x; nothing here synchronises the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.weights.dequant import dequantise
from daemons.weights.packed import PackedWeights, unpack
from lucevisor.model.quant_types import INT4_GROUP, GgmlType
from lucevisor.model.workspace import DEQUANT_ELEMENTS, INT8_GEMV_ROWS

GEMV_ROWS = 8
"""Rows up to which a float32 product on a cpu is bound by reading the weights, where a batched product is faster."""

PART_ROWS = 256
"""Parts are whole multiples of this: results that start at odd places cost a GPU's library four times the time."""


def part_rows(n_columns: int) -> int:
    """Rows of a quantised matrix that are expanded at a time."""
    return max(PART_ROWS, DEQUANT_ELEMENTS // n_columns // PART_ROWS * PART_ROWS)


class Linear(Protocol):
    """A resting matrix of ``n_out`` rows; ``n_bytes`` on its device."""

    n_out: int
    n_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """A plain matrix ``[N, K]`` of the activations' dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Float32CpuLinear:
    """A float32 matrix on the cpu.

    For few rows the product is asked for as a batch of products with parts of W: MKL's batched product reads W at
    memory speed (30 GB/s a core measured, its matrix-vector product 12).
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
        # column-major on purpose: as a row-major [K, 1] operand MKL takes a path that is seven times slower
        columns = x.contiguous().as_strided((self.parts, x.shape[1], rows), (0, 1, x.shape[1]))
        out = torch.bmm(self.split, columns)
        return out.view(1, self.n_out) if rows == 1 else out.view(self.n_out, rows).t().contiguous()


class Bfloat16CpuLinear:
    """A bfloat16 matrix on the cpu in oneDNN's packed layout: 2.7 times faster for a decode row than a plain one."""

    def __init__(self, weight: Tensor) -> None:
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return out


class BlockLinear:
    """The file's quant blocks, raw ``[N, row_bytes]`` uint8, expanded to x's dtype at each call."""

    def __init__(self, kind: GgmlType, raw: Tensor, n_columns: int) -> None:
        self.kind, self.raw, self.n_columns = kind, raw, n_columns
        self.n_out, self.n_bytes = raw.shape[0], raw.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        step = part_rows(self.n_columns)
        if step >= self.n_out:
            return F.linear(x, dequantise(self.kind, self.raw, x.dtype))
        out = x.new_empty(x.shape[0], self.n_out)
        for at in range(0, self.n_out, step):
            part = dequantise(self.kind, self.raw[at : at + step], x.dtype)
            out[:, at : at + step] = F.linear(x, part)
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
    """Products of one input side by side: the columns of the parts in order."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.n_out, self.n_bytes = sum(p.n_out for p in parts), sum(p.n_bytes for p in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([p(x) for p in self.parts], dim=-1)


# ---- lookups


class Table(Protocol):
    """Rows by id; ``n_bytes`` on its device."""

    n_bytes: int

    def __call__(self, ids: Tensor) -> Tensor: ...


class DenseTable:
    """Rows of a plain matrix [V, E], in ``dtype``."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype, self.n_bytes = weight, dtype, weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids).to(self.dtype)


class BlockTable:
    """Rows of a quantised table, expanded after the lookup."""

    def __init__(self, kind: GgmlType, raw: Tensor, dtype: torch.dtype) -> None:
        self.kind, self.raw, self.dtype, self.n_bytes = kind, raw, dtype, raw.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return dequantise(self.kind, self.raw.index_select(0, ids), self.dtype)


class PackedTable:
    """Rows of a quantised table that is packed because it is the output matrix too."""

    def __init__(self, kind: GgmlType, packed: PackedWeights, n_columns: int, dtype: torch.dtype) -> None:
        self.kind, self.packed, self.n_columns, self.dtype = kind, packed, n_columns, dtype
        self.n_bytes = packed.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        rows = self.packed.map(lambda tensor: tensor.index_select(0, ids))
        return dequantise(self.kind, unpack(self.kind, rows, self.n_columns), self.dtype)
