"""Specialisations of RMSNorm, QK norm with RoPE, act-and-mul and output gates that models use."""

from __future__ import annotations

from daemons.ops.triton import basic
from tests.kernels.targets import Case


def _norm(name: str, dtype: str, d: int, n_heads: int | None, has_weight: bool = True) -> Case:
    """A norm over rows of d; ``n_heads`` None: rows without heads, whose count of heads the launcher makes a 1."""
    block, rows, warps = basic.norm_tile(d)
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "n_rows": "i32", "eps": "fp32"}
    signature |= {"token_stride": "i32", "head_stride": "i32", "weight_stride": "i32"}
    constants = {"D": d, "BLOCK": block, "ROWS": rows}
    if has_weight:
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


def _qk_norm_rope(name: str, dtype: str, d: int, half: int) -> Case:
    block_half, block_rest, rows = basic.qk_norm_rope_tile(d, half)
    pointers = {"x": f"*{dtype}", "weight": "*fp32", "cos": "*fp32", "sin": "*fp32", "out": f"*{dtype}"}
    strides = {"token_stride": "i32", "head_stride": "i32"}
    signature = pointers | strides | {"n_rows": "i32", "n_heads": "i32", "eps": "fp32"}
    constants = {"D": d, "HALF": half, "BLOCK_HALF": block_half, "BLOCK_REST": block_rest, "ROWS": rows}
    return Case(name, basic.qk_norm_rope_kernel, signature, constants, (*pointers, *strides), {"num_warps": 4})


def _act_and_mul(dtype: str, activation: str) -> Case:
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "n_columns": "i32", "row_stride": "i32"}
    constants = {"ACTIVATION": activation, "BLOCK": basic.TILE}
    name, kernel = f"gated {activation} {dtype}", basic.act_and_mul_kernel
    return Case(name, kernel, signature, constants, tuple(signature), {"num_warps": 4})


def _add_bias(dtype: str) -> Case:
    signature = {"x": f"*{dtype}", "bias": f"*{dtype}", "ids": "*i64", "out": f"*{dtype}"}
    signature |= {"n_columns": "i32", "row_stride": "i32"}
    name, constants = f"add_bias {dtype}", {"BLOCK": basic.TILE}
    return Case(name, basic.add_bias_kernel, signature, constants, tuple(signature), {"num_warps": 4})


def _write_pages(dtype: str, pages: str) -> Case:
    signature = {"k": f"*{dtype}", "v": f"*{dtype}", "slots": "*i64", "keys": f"*{pages}", "values": f"*{pages}"}
    signature |= dict.fromkeys(("n_columns", "k_stride", "v_stride"), "i32")
    constants = {"BLOCK": basic.TILE}
    name = f"write_pages {dtype} as {pages}"
    return Case(name, basic.write_pages_kernel, signature, constants, tuple(signature), {"num_warps": 4})


def _output_gate(name: str, dtype: str, d: int, per_head: bool, softplus: bool) -> Case:
    signature = dict.fromkeys(("x", "gate", "out"), f"*{dtype}")
    signature |= dict.fromkeys(("n_columns", "token_stride", "head_stride", "gate_stride"), "i32")
    constants = {"D": d, "PER_HEAD": per_head, "SOFTPLUS": softplus, "BLOCK": basic.TILE}
    return Case(name, basic.output_gate_kernel, signature, constants, tuple(signature), {"num_warps": 4})


CASES = [
    _norm("rms_norm rows fp16", "fp16", 5120, None),
    _norm("rms_norm heads fp32, no weight", "fp32", 128, 16, has_weight=False),
    _add_norm("bf16", 2816),
    _qk_norm_rope("qk_norm_rope fp16", "fp16", 128, 64),
    _qk_norm_rope("qk_norm_rope bf16, a part rotated", "bf16", 256, 32),
    _act_and_mul("bf16", "gelu_tanh"),
    _act_and_mul("bf16", "swiglu_oai"),
    _add_bias("bf16"),
    _write_pages("bf16", "fp16"),
    _output_gate("output_gate bf16, softplus a head", "bf16", 128, per_head=True, softplus=True),
]
