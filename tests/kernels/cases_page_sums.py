"""Specialisations of the sums that pages are ranked by, by head dim, dtype of the pages and queries of a block."""

from __future__ import annotations

from daemons.ops.triton.page_sums import MAX_QUERIES, PAGES, resident_pages_kernel, sketched_pages_kernel
from tests.kernels.targets import Case, for_some


def _sketched(dtype: str, d: int, m: int) -> Case:
    signature = {
        "q": f"*{dtype}",
        "means": "*bf16",
        "signs": "*u8",
        "factors": "*bf16",
        "rows": "*i64",
        "sums": "*fp32",
    }
    aligned = tuple(name for name in signature if name != "rows")
    signature |= dict.fromkeys(("n_pages", "n_rows", "n_host"), "i32")
    constants = {"D": d, "BYTES": -(-d // 8), "WIDTH": 1 << (d - 1).bit_length(), "M": m, "PAGES": PAGES}
    options = {"num_warps": 4 if d <= 128 else 8}
    return Case(f"sketched_pages {dtype} {d} {m}", sketched_pages_kernel, signature, constants, aligned, options)


def _resident(dtype: str, kv: str, d: int, m: int) -> Case:
    quantised = kv == "q8_0"
    signature = {"q": f"*{dtype}", "keys": "*i8" if quantised else f"*{kv}", "pages": "*i64", "sums": "*fp32"}
    stored = -(-d // 32) * 32 if quantised else d
    constants = {"K": 8, "D": d, "STORED": stored, "WIDTH": 1 << (stored - 1).bit_length(), "M": m}
    if quantised:
        signature["scales"] = "*fp16"
    else:
        constants["scales"] = None
    aligned = tuple(name for name in signature if name != "pages")
    signature |= dict.fromkeys(("n_pages", "n_rows"), "i32")
    name = f"resident_pages {dtype} over {kv} {d} {m}"
    return Case(name, resident_pages_kernel, signature, constants, aligned, {"num_warps": 4 if d <= 128 else 8})


CASES = [
    _sketched("bf16", 256, 16),
    _sketched("fp16", 128, MAX_QUERIES),
    _resident("bf16", "bf16", 256, 16),
    _resident("fp16", "q8_0", 128, MAX_QUERIES),
    *for_some(
        _sketched("fp32", 64, 16),
        _sketched("bf16", 512, MAX_QUERIES),
        _resident("bf16", "bf16", 512, MAX_QUERIES),
        _resident("fp32", "fp32", 128, 16),
        _resident("bf16", "q8_0", 80, 16),
    ),
]
