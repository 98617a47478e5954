"""Specialisations of the chunked gated delta net: 16 key and 48 value heads of 128, as in the models."""

from __future__ import annotations

from daemons.ops.triton.chunked_delta_rule import (
    delta_rule_solve_kernel,
    delta_rule_state_kernel,
    solve_options,
    state_options,
)
from tests.kernels.targets import TARGETS, Case

POINTERS = ("qkv", "gates", "pairs", "decays", "conv_states", "states", "norm")
TF32 = tuple(t for t in TARGETS if t.startswith("sm_") and t != "sm_75")
OTHERS = tuple(t for t in TARGETS if t not in TF32)
SIZES = ("n", "n_chunks")


def _cases(dtype: str, n_key: int, n_value: int, dim: int, precision: str) -> list[Case]:
    name = f"{dtype} {n_key} {n_value} x {dim} {precision}"
    activations = {"y": f"*{dtype}", "out": f"*{dtype}"}
    signature = activations | dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(SIZES, "i32")
    signature |= {"ids": "*i64", "spans": "*i64", "eps": "fp32", "y_stride": "i32"}
    heads = (n_key, n_value, dim)
    found = []
    for what, kernel, options in (
        ("solve", delta_rule_solve_kernel, solve_options(*heads, precision)),
        ("carry", delta_rule_state_kernel, state_options(*heads, 4, precision)),
    ):
        own = {k: v for k, v in signature.items() if k in kernel.arg_names}
        aligned = tuple(k for k in own if k in (*activations, *POINTERS, "y_stride"))
        launch = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
        targets = OTHERS if precision == "ieee" else TF32
        found.append(Case(f"delta {what} {name}", kernel, own, dict(options), aligned, launch, targets))
    return found


CASES = [
    *_cases("bf16", 16, 48, 128, "tf32x3"),
    *_cases("fp16", 16, 48, 128, "ieee"),
]
