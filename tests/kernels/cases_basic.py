"""Specialisations of the small kernels that models use."""

from __future__ import annotations

from daemons.ops.triton import basic
from tests.kernels.targets import Case


def _norm(name: str, dtype: str, d: int, n_heads: int | None, weighted: bool = True) -> Case:
    """A norm over rows of d; ``n_heads`` None: rows without heads, whose count of heads the launcher makes a 1."""
    block, rows, warps = basic.norm_tile(d)
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "n_rows": "i32", "eps": "fp32"}
    signature |= {"token_stride": "i32", "head_stride": "i32", "weight_stride": "i32"}
    constants = {"D": d, "BLOCK": block, "ROWS": rows}
    if weighted:
        signature["weight"] = "*fp32"
    else:
        constants["weight"] = None
    if n_heads is None:
        constants["n_heads"] = 1
    else:
        signature["n_heads"] = "i32"
    aligned = [n for n in ("x", "weight", "out", "token_stride", "head_stride", "weight_stride") if n in signature]
    return Case(name, basic.rms_norm_kernel, signature, constants, tuple(aligned), {"num_warps": warps})


def _add_norm(dtype: str, d: int) -> Case:
    block, _, warps = basic.norm_tile(d)
    signature = dict.fromkeys(("h", "delta", "total", "out"), f"*{dtype}") | {"weight": "*fp32", "eps": "fp32"}
    signature |= {"h_stride": "i32", "delta_stride": "i32"}
    aligned = tuple(n for n in signature if n != "eps")
    constants = {"D": d, "BLOCK": block}
    return Case(f"add_rms_norm {dtype}", basic.add_rms_norm_kernel, signature, constants, aligned, {"num_warps": warps})


def _query_key(name: str, dtype: str, d: int, half: int) -> Case:
    block_half, block_rest, rows = basic.query_key_tile(d, half)
    pointers = {"x": f"*{dtype}", "weight": "*fp32", "cos": "*fp32", "sin": "*fp32", "out": f"*{dtype}"}
    strides = {"token_stride": "i32", "head_stride": "i32"}
    signature = pointers | strides | {"n_rows": "i32", "n_heads": "i32", "eps": "fp32"}
    constants = {"D": d, "HALF": half, "BLOCK_HALF": block_half, "BLOCK_REST": block_rest, "ROWS": rows}
    return Case(name, basic.query_key_kernel, signature, constants, (*pointers, *strides), {"num_warps": 4})


def _gated(dtype: str, gelu: bool) -> Case:
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "n_columns": "i32", "row_stride": "i32"}
    constants = {"GELU": gelu, "BLOCK": basic.TILE}
    return Case(f"gated {dtype}", basic.gated_kernel, signature, constants, tuple(signature), {"num_warps": 4})


def _gate_heads(name: str, dtype: str, d: int, per_head: bool, softplus: bool) -> Case:
    signature = dict.fromkeys(("x", "gate", "out"), f"*{dtype}")
    signature |= dict.fromkeys(("n_columns", "token_stride", "head_stride", "gate_stride"), "i32")
    constants = {"D": d, "PER_HEAD": per_head, "SOFTPLUS": softplus, "BLOCK": basic.TILE}
    return Case(name, basic.gate_heads_kernel, signature, constants, tuple(signature), {"num_warps": 4})


CASES = [
    _norm("rms_norm rows fp16", "fp16", 5120, None),
    _norm("rms_norm heads fp32, no weight", "fp32", 128, 16, weighted=False),
    _add_norm("bf16", 2816),
    _query_key("query_key fp16", "fp16", 128, 64),
    _query_key("query_key bf16, a part rotated", "bf16", 256, 32),
    _gated("bf16", gelu=True),
    _gate_heads("gate_heads bf16, softplus a head", "bf16", 128, per_head=True, softplus=True),
]
