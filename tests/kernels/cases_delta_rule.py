"""Specialisations of the delta net's kernels: heads of 16 and 48 times 128 as in the models, and narrow ones."""

from __future__ import annotations

from daemons.ops.triton.delta_rule import convolve_kernel, convolve_options, recur_kernel, recur_options
from tests.kernels.targets import Case, for_some

POINTERS = ("mixed", "gates", "convolution", "taps", "states", "decay", "dt", "norm")


def _cases(dtype: str, n_key: int, n_value: int, dim: int, n_taps: int = 4) -> list[Case]:
    name = f"{dtype} {n_key} {n_value} x {dim}"
    activations = {"y": f"*{dtype}", "out": f"*{dtype}"}
    signature = activations | dict.fromkeys(POINTERS, "*fp32")
    signature |= {"ids": "*i64", "eps": "fp32", "n": "i32", "y_stride": "i32"}
    found = []
    for what, kernel, options in (
        ("convolve", convolve_kernel, convolve_options(n_key, n_value, dim, n_taps)),
        ("recur", recur_kernel, recur_options(n_key, n_value, dim, n_taps)),
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
