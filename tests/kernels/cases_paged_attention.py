"""Specialisations of paged attention that models use, by head dim, dtype of the pages and query rows."""

from __future__ import annotations

from daemons.ops.triton.paged_attention import (
    MOST_ROWS,
    DeviceLimits,
    attention_tile,
    paged_attention_kernel,
    paged_attention_merge_kernel,
)
from tests.kernels.targets import Case, for_some

SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
H200, SMALL = DeviceLimits(132, 227 << 10, 2), DeviceLimits(60, 64 << 10, 2)


def _attention(
    dtype: str,
    kv: str,
    d: int,
    group: int,
    n: int,
    *,
    capped: bool = False,
    drafts: bool = False,
    sinks: bool = False,
    split: int = 0,
    device: DeviceLimits = SMALL,
) -> Case:
    """``n`` tokens a slice; ``kv``: dtype of the pages, or q8_0.  One that merges; a single split writes ``dtype``.
    ``split``: positions of a split, with a tile for any number of rows; 0: those share what is visible.
    """
    quantised = kv == "q8_0"
    pages = "*i8" if quantised else f"*{kv}"
    signature = {"q": f"*{dtype}", "keys": pages, "values": pages, "partials": "*fp32", "sums": "*fp32"}
    signature |= {"tables": "*i32", "table_rows": "*i64", "starts": "*i64", "scale": "fp32", "softcap": "fp32"}
    signature |= dict.fromkeys(("window", "n", "n_splits", "n_rows"), "i32")
    signature |= dict.fromkeys(("table_stride", "token_stride", "head_stride"), "i32")
    tile = attention_tile(MOST_ROWS if split else group * n, d, SIZES[dtype], device)
    stored = -(-d // 32) * 32 if quantised else d
    width = 1 << (stored - 1).bit_length()
    constants = {"K": 8, "G": group, "D": d, "DV": d, "DK_STORED": stored, "DV_STORED": stored, "CAPPED": capped}
    constants["CAUSAL"] = not drafts
    if drafts:
        signature["lows"] = "*i64"
    else:
        constants["lows"] = None
    if sinks:
        signature["sinks"] = "*fp32"
    else:
        constants["sinks"] = None
    constants |= {"M": tile.rows, "N": tile.tokens, "WIDTH": width, "VALUE_WIDTH": width, "SPLIT": split}
    for scales in ("key_scales", "value_scales"):
        if quantised:
            signature[scales] = "*fp16"
        else:
            constants[scales] = None
    loose = ("table_rows", "starts", "lows", "window", "n", "n_splits", "n_rows", "table_stride", "scale", "softcap")
    aligned = tuple(name for name in signature if name not in loose)
    options = {"num_warps": tile.n_warps, "num_stages": tile.n_stages}
    return Case(
        f"paged_attention {dtype} over {kv} {d} {group}x{n}"
        + (" of drafts" if drafts else " with sinks" if sinks else "")
        + (" split" if split else ""),
        paged_attention_kernel,
        signature,
        constants,
        aligned,
        options,
    )


def _merge(dtype: str, d: int) -> Case:
    signature = {"partials": "*fp32", "sums": "*fp32", "out": f"*{dtype}", "n_splits": "i32", "n_rows": "i32"}
    constants = {"D": d, "SPLITS": 64, "WIDTH": 64}
    return Case(
        f"merge {dtype} {d}",
        paged_attention_merge_kernel,
        signature,
        constants,
        ("partials", "sums", "out"),
        {"num_warps": 4},
    )


CASES = [
    _attention("fp16", "fp16", 128, 4, 1, device=DeviceLimits(60, 64 << 10, 0)),
    _attention("bf16", "bf16", 256, 6, 1),
    _attention("bf16", "bf16", 128, 4, 8, drafts=True),
    _attention("fp16", "q8_0", 80, 8, 4),
    _attention("bf16", "bf16", 64, 8, 1, sinks=True),
    *for_some(
        _attention("bf16", "bf16", 256, 8, 1, device=H200),
        _attention("bf16", "bf16", 128, 6, 16, capped=True, device=H200),
        _attention("bf16", "q8_0", 256, 6, 1, device=H200),
        _attention("bf16", "bf16", 512, 8, 5),
        _attention("bf16", "bf16", 128, 8, 16, split=512, device=H200),
        _attention("fp32", "fp32", 256, 4, 1),
    ),
    _merge("bf16", 256),
]
