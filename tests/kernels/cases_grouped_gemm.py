"""Specialisations of the grouped GEMM."""

from __future__ import annotations

from daemons.ops.triton import dense_gemm, grouped_gemm
from daemons.ops.triton_batch_invariant import TILES
from daemons.weights.packed import tile_bytes
from lucevisor.model.quant_types import CHUNK, CODEBOOK
from tests.kernels.cases_gemv import random_packed
from tests.kernels.targets import Case, for_some


def _grouped(kind: str, dtype: str, n_pairs: int, *, padded: bool = False) -> Case:
    """``n_pairs``: of 64 experts; what the launch is chosen by.  ``padded``: rows end within a chunk."""
    pointers, absent = random_packed(kind)
    pointers |= {"x": f"*{dtype}", "sorted_pairs": "*i64", "offsets": "*i64", "out": f"*{dtype}"}
    signature = pointers | dict.fromkeys(("n_out", "n_chunks", "width", "pairs_per_row"), "i32")
    config = grouped_gemm.grouped_gemm_config(n_pairs, 64)
    constants = absent | {
        "KIND": kind,
        "TILE": tile_bytes(kind),
        "BM": config.rows,
        "BN": config.columns,
        "PADDED": padded,
    }
    options = {"num_warps": config.n_warps, "num_stages": config.n_stages}
    name = f"grouped {kind} {dtype} {config.rows}x{config.columns}{' padded' * padded}"
    return Case(name, grouped_gemm.grouped_gemm_kernel, signature, constants, (*pointers, "n_out", "width"), options)


def _one_matrix(kind: str, dtype: str, tile: grouped_gemm.GroupedGemmConfig) -> Case:
    """The product whose rows do not depend on others."""
    pointers, absent = random_packed(kind)
    pointers |= {"x": f"*{dtype}", "out": f"*{dtype}"}
    signature = pointers | dict.fromkeys(("n_rows", "n_out", "n_chunks", "n_splits", "splits_each", "width"), "i32")
    constants = absent | {"KIND": kind, "TILE": tile_bytes(kind), "BM": tile.rows, "BN": tile.columns, "PADDED": False}
    options = {"num_warps": tile.n_warps, "num_stages": tile.n_stages}
    name, aligned = f"batch-invariant {kind} {dtype} {tile.rows}", (*pointers, "n_out", "width")
    return Case(name, grouped_gemm.packed_gemm_kernel, signature, constants, aligned, options)


def _plain(dtype: str, tile: dense_gemm.DenseTile) -> Case:
    sizes = ("n_rows", "n_out", "n_splits", "splits_each", "width", "weight_stride", "out_stride")
    signature = dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | dict.fromkeys(sizes, "i32")
    constants = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "PADDED": False, "SIZE": CHUNK}
    aligned = ("x", "weight", "out", "n_out", "width", "weight_stride", "out_stride")
    options = {"num_warps": tile.n_warps, "num_stages": tile.n_stages}
    return Case(
        f"batch-invariant {dtype} {tile.rows}", dense_gemm.dense_gemm_kernel, signature, constants, aligned, options
    )


CASES = [
    _grouped("Q4_K", "bf16", 1024 * 8),
    _grouped("Q6_K", "fp16", 64 * 8),
    *for_some(
        *(_grouped(kind, "bf16", 1024 * 8) for kind in ("Q5_K", "Q4_0", "Q4_1", "Q5_1", "Q8_0")),
        *(_grouped(kind, "bf16", 1024 * 8, padded=kind != "IQ4_XS") for kind in sorted(CODEBOOK)),
        _grouped("Q4_K", "bf16", 64 * 8),
        _grouped("Q5_0", "bf16", 1024 * 8, padded=True),
        _grouped("Q4_K", "fp32", 1024 * 8),
        *(_one_matrix(kind, "bf16", tile) for kind in ("Q4_K", "Q6_K", "Q8_0") for tile in TILES),
        *(_plain("bf16", tile) for tile in (dense_gemm.FEW, dense_gemm.MANY)),
        _plain("fp32", dense_gemm.FEW),
    ),
]
