"""Specialisations of the recurrent gated delta net: heads as in the models, and narrow ones."""

from __future__ import annotations

from daemons.ops.triton.recurrent_delta_rule import (
    apply_updates_kernel,
    causal_conv1d_kernel,
    conv1d_options,
    delta_rule_recurrent_kernel,
    gated_norm_options,
    gated_rms_norm_kernel,
    recurrent_options,
    updates_options,
)
from daemons.ops.triton_batch_invariant import DELTA_NET_TOKENS
from tests.kernels.targets import Case, for_some

POINTERS = ("qkv", "gates", "conv_states", "conv_weight", "states", "updates", "decay_rates", "dt_bias", "norm")


def _cases(dtype: str, n_key: int, n_value: int, dim: int, conv_width: int = 4) -> list[Case]:
    name = f"{dtype} {n_key} {n_value} x {dim}"
    activations = {"y": f"*{dtype}", "out": f"*{dtype}"}
    signature = activations | dict.fromkeys(POINTERS, "*fp32")
    signature |= {"ids": "*i64", "kept": "*i64", "rows": "*i64", "eps": "fp32"}
    sizes = ("n", "n_rows", "y_stride", "source", "target", "states_stride", "updates_stride")
    signature |= dict.fromkeys(sizes, "i32")
    found, heads = [], (n_key, n_value, dim, conv_width)
    for what, kernel, options in (
        ("convolve", causal_conv1d_kernel, conv1d_options(*heads, keep=True)),
        ("convolve long", causal_conv1d_kernel, conv1d_options(*heads, keep=False)),
        ("recur", delta_rule_recurrent_kernel, recurrent_options(*heads)),
        ("recur long", delta_rule_recurrent_kernel, recurrent_options(*heads, DELTA_NET_TOKENS)),
        ("gate", gated_rms_norm_kernel, gated_norm_options(n_key, n_value, dim)),
        ("make states", apply_updates_kernel, updates_options(n_key, n_value, dim)),
    ):
        own = {k: v for k, v in signature.items() if k in kernel.arg_names}
        aligned = tuple(k for k in own if k in (*activations, *POINTERS, "y_stride"))
        warps = {"num_warps": options.pop("num_warps")}
        found.append(Case(f"delta {what} {name}", kernel, own, options, aligned, warps))
    return found


CASES = [
    *_cases("bf16", 16, 48, 128),
    *_cases("fp16", 2, 6, 48),
    *for_some(*_cases("fp16", 16, 48, 128), *_cases("fp32", 16, 32, 128)),
]
