"""Specialisations of the router, top-k and MoE combine that models use."""

from __future__ import annotations

from daemons.ops.triton import moe
from tests.kernels.targets import Case, for_some


def _scores(dtype: str, width: int, *, biased: bool = False) -> Case:
    signature = {"x": f"*{dtype}", "weight": "*fp32", "out": "*fp32", "n_scores": "i32"}
    constants = {"E": width, "ROWS": moe.ROUTER_ROWS, "BLOCK": moe.ROUTER_BLOCK}
    if biased:
        signature["bias"] = "*fp32"
    else:
        constants["bias"] = None
    name = f"scores {dtype} {width}{' biased' * biased}"
    return Case(name, moe.router_gemv_kernel, signature, constants, ("x", "weight", "out"))


def _choose(name: str, n_experts: int, k: int, *, sigmoid: bool, more: dict[str, str], has_shared_gate: bool) -> Case:
    """``more``: which of bias and expert_scale there are, and their types."""
    signature = {"scores": "*fp32", "experts": "*i64", "weights": "*fp32", "scale": "fp32", "min_sum": "fp32"} | more
    if has_shared_gate:
        signature["shared_gate"] = "*fp32"
    constants = {name: None for name in ("bias", "expert_scale", "shared_gate") if name not in signature}
    constants |= {
        "X": n_experts,
        "BLOCK": 1 << (n_experts - 1).bit_length(),
        "K": k,
        "SLOTS": 1 << (k - 1).bit_length(),
    }
    constants |= {"SIGMOID": sigmoid, "NORMALISE": True, "HAS_SHARED_GATE": has_shared_gate}
    aligned = tuple(n for n, kind in signature.items() if kind.startswith("*"))
    return Case(f"choose {name}", moe.router_topk_kernel, signature, constants, aligned, {"num_warps": 1})


def _weighted(name: str, dtype: str, *, shared: bool, shared_gate: bool) -> Case:
    signature = dict.fromkeys(("results", "out"), f"*{dtype}") | {"weights": "*fp32", "n_columns": "i32"}
    constants: dict[str, object] = {"K": 8, "BLOCK": moe.COMBINE_BLOCK}
    signature["shared_stride"] = "i32"
    if shared:
        signature["shared"] = f"*{dtype}"
    else:
        constants["shared"] = None
    if shared_gate:
        signature["shared_gate"] = "*fp32"
    else:
        constants["shared_gate"] = None
    return Case(f"weighted {name}", moe.moe_combine_kernel, signature, constants, tuple(signature))


CASES = [
    _scores("fp16", 2048),
    _choose("256 softmax", 256, 8, sigmoid=False, more={}, has_shared_gate=True),
    _weighted("shared, gated", "fp16", shared=True, shared_gate=True),
    *for_some(
        _scores("bf16", 2048),
        _scores("fp32", 2816),
        _choose("256 sigmoid", 256, 8, sigmoid=True, more={"bias": "*fp32"}, has_shared_gate=False),
        _choose("128 scaled", 128, 8, sigmoid=False, more={"expert_scale": "*fp32"}, has_shared_gate=False),
        _weighted("shared", "bf16", shared=True, shared_gate=False),
        _weighted("alone", "bf16", shared=False, shared_gate=False),
    ),
]
