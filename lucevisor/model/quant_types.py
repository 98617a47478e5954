"""GGML tensor types: id, name, elements and bytes of a block, from gguf's tables.

:func:`weight_format` is the single rule for the format of a tensor on a device, so placement planner and loader agree
about bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES

from lucevisor.model.values import Backend, Dtype


class GgmlType(NamedTuple):
    """A storage type: ``block_elements`` consecutive numbers of a row take ``block_bytes`` bytes."""

    id: int
    name: str
    block_elements: int
    block_bytes: int


TYPES: dict[int, GgmlType] = {
    kind.value: GgmlType(kind.value, kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()
}
BY_NAME: dict[str, GgmlType] = {t.name: t for t in TYPES.values()}

DENSE = frozenset({"F32", "F16", "BF16"})
FEW_BITS = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"})
"""Types of one to three and a half bits a weight, without kernels."""
NATIVE = FEW_BITS | {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
}  # fmt: skip
"""Quant types kept quantised on a GPU and dequantised on the fly."""

CODEBOOK = frozenset({"IQ4_NL", "IQ4_XS", "MXFP4"})
"""Types whose codes of four bits stand for numbers that are no sequence."""
REPACKED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}) | CODEBOOK
"""The types of :data:`NATIVE` that have kernels and are repacked on a GPU."""
CHUNK = 256
"""Row granularity of repacked weights: rows of 32-element blocks are zero-padded to a multiple of this."""
TILE_ROWS = 16
"""Rows of a tile of repacked weights: matrices take the memory of a multiple of this."""
CPU_TILE_ROWS = 32
"""The same of a cpu's tiles."""

CPU_INT4 = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Converted by a bfloat16 cpu shard to torch's packed int4, in groups of INT4_GROUP."""
INT4_GROUP = 32
"""Columns of packed int4 that share a scale and a zero."""
CPU_INT8 = FEW_BITS | {"Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
"""Converted by a bfloat16 cpu shard to int8 with one scale per row (torch's packed int8 product)."""
CPU_BLOCKS = frozenset({"MXFP4"})
"""Kept by a bfloat16 cpu shard as in the file: powers of two span too wide a range for one scale per row."""


EXPERT_ROWS = 64
"""Rows that torch packs together: expert matrices that are multiples of this can be packed as one."""


class WeightFormat(StrEnum):
    """Format of a matrix on a device."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    BLOCKS = "blocks"  # the file's own quant blocks
    PACKED = "packed"  # repacked blocks, rows padded; BLOCKS where kernels cannot be compiled
    # for a cpu: the file's codes and scales in tiles for C++ kernels, without a compiler torch's packed forms
    INT4 = "int4"
    INT8 = "int8"


def row_bytes(kind: GgmlType, n_columns: int) -> int:
    """Bytes of one row in the file.  Raises ValueError unless the row is a multiple of the block size."""
    if n_columns % kind.block_elements:
        raise ValueError(
            f"a row of {n_columns} numbers is not a multiple of the {kind.name} block size {kind.block_elements}"
        )
    return n_columns // kind.block_elements * kind.block_bytes


def weight_format(kind: GgmlType, shape: tuple[int, ...], backend: Backend, dtype: Dtype) -> WeightFormat:
    """Format of a tensor of ``shape`` (row-major, rows second to last) on a device of ``backend`` computing in
    ``dtype``.  Vectors stay float32.
    """
    if len(shape) < 2:
        return WeightFormat.FLOAT32
    if kind.name in DENSE or (dtype is Dtype.FLOAT32 and backend is Backend.CPU):
        return WeightFormat(dtype.value)
    if backend is Backend.CPU:
        if dtype is Dtype.BFLOAT16:
            if kind.name in CPU_INT4 and shape[-2] % (16 if len(shape) == 2 else EXPERT_ROWS) == 0:
                return WeightFormat.INT4
            if kind.name in CPU_INT8:
                return WeightFormat.INT8
            if kind.name in CPU_BLOCKS:
                return WeightFormat.BLOCKS
        return WeightFormat(dtype.value)
    if kind.name in REPACKED:
        return WeightFormat.PACKED
    return WeightFormat.BLOCKS if kind.name in NATIVE else WeightFormat(dtype.value)


def padded_columns(n_columns: int) -> int:
    """``n_columns`` rounded up to a multiple of :data:`CHUNK`."""
    return -(-n_columns // CHUNK) * CHUNK


def padded_rows(n_rows: int, tile_rows: int = TILE_ROWS) -> int:
    return -(-n_rows // tile_rows) * tile_rows


def format_bytes(kind: GgmlType, shape: tuple[int, ...], fmt: WeightFormat) -> int:
    """Bytes of a tensor on the device in that format; an upper bound for PACKED, INT4, INT8, BLOCKS of MXFP4 and
    quantised BFLOAT16."""
    n = 1
    for d in shape:
        n *= d
    rows = n // shape[-1] if shape else 0
    tiles = 0
    if kind.name in CPU_INT4 | CPU_INT8 | CPU_BLOCKS and shape[-1] % kind.block_elements == 0:
        tiles = padded_rows(rows, CPU_TILE_ROWS) * row_bytes(kind, shape[-1])
        tiles += tiles // 32 if kind.block_elements == CHUNK else 0  # scales of six bits take a byte
        tiles += tiles // 17 if kind.name in CPU_BLOCKS else 0  # and an exponent of a byte takes two
    match fmt:
        case WeightFormat.FLOAT32:
            return n * 4
        case WeightFormat.FLOAT16:
            return n * 2
        case WeightFormat.BFLOAT16:
            return max(n * 2, tiles)
        case WeightFormat.INT8:
            return max(n + rows * 2, tiles)
        case WeightFormat.INT4:
            return max(n // 2 + n // INT4_GROUP * 4, tiles)
        case WeightFormat.BLOCKS:
            return max(rows * row_bytes(kind, shape[-1]), tiles if kind.name in CPU_BLOCKS else 0)
        case WeightFormat.PACKED:
            matrices, last = (rows // shape[-2], shape[-2]) if len(shape) > 1 else (1, rows)
            return matrices * padded_rows(last) * row_bytes(kind, padded_columns(shape[-1]))
