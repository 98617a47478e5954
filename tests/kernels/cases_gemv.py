"""Specialisations of GEMV and dequantisation, by quant type, dtype of the activations and rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from daemons.ops.triton import dequant, gemv, gemv_float16, split_k
from daemons.weights.packed import empty_packed, tile_bytes
from lucevisor.model.quant_types import BY_NAME
from tests.kernels.targets import ONE_EACH, TARGETS, Case, for_some

TYPES = {torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.float16: "*fp16"}


def random_packed(kind: str) -> tuple[dict[str, str], dict[str, None]]:
    """Element types of the packed tensors of ``kind``; None for those it does not have."""
    packed = empty_packed(BY_NAME[kind], 1, 256, torch.device("meta"))
    found = {name: getattr(packed, name) for name in ("codes", "high", "scales", "steps")}
    there = {name: TYPES[tensor.dtype] for name, tensor in found.items() if tensor is not None}
    return there, {name: None for name in found if name not in there}


def _gemv(
    kind: str,
    dtype: str,
    rows: int = 8,
    *,
    parts: bool = True,
    per_expert: bool = False,
    padded: bool = False,
    **fixed: int,
) -> Case:
    """``rows``: BM.  ``parts``: the row is split, sums are written in float32.  ``padded``: rows end within a chunk.
    ``fixed``: integers that are 1.
    """
    pointers, absent = random_packed(kind)
    pointers |= {"x": f"*{dtype}", "out": "*fp32" if parts else f"*{dtype}"}
    if kind in gemv.UNBIASED:
        absent |= {"sums": None}
    else:
        pointers |= {"sums": "*fp32"}
    if per_expert:
        pointers |= {"experts": "*i64"}
    else:
        absent |= {"experts": None}
    integers = ("n_rows", "n_out", "n_chunks", "width", "n_splits", "pairs_per_row")
    signature = pointers | {name: "i32" for name in integers if name not in fixed}
    config = split_k.GemvTile()
    constants = (
        absent | fixed | {"KIND": kind, "TILE": tile_bytes(kind), "BM": rows, "BN": config.columns, "PADDED": padded}
    )
    options = {"num_warps": config.n_warps, "num_stages": config.n_stages}
    suffix = f"{' experts' * per_expert}{'' if parts else ' direct'}{' narrow' * bool(fixed)}{' padded' * padded}"
    name = f"gemv {kind} {dtype} {rows}{suffix}"
    return Case(name, gemv.gemv_kernel, signature, constants, (*pointers, "n_out", "width"), options)


def _gemv_float16(kind: str, rows: int = 8, *, out: str = "fp32", per_expert: bool = False) -> list[Case]:
    """One for each vendor: they fuse two multiply-adds in their own ways."""
    pointers, absent = random_packed(kind)
    del absent["steps"]
    pointers |= {"x": "*fp16", "factors": "*fp32", "totals": "*fp16", "out": f"*{out}"}
    if per_expert:
        pointers |= {"experts": "*i64"}
    else:
        absent |= {"experts": None}
    signature = pointers | dict.fromkeys(("n_rows", "n_out", "n_chunks", "n_splits", "pairs_per_row"), "i32")
    config = gemv_float16.float16_tile(1 if per_expert else rows)
    options = {"num_warps": config.n_warps, "num_stages": config.n_stages}
    name = f"gemv float16 {kind} {out} {rows}{' experts' * per_expert}"
    vendors = {
        "ptx": tuple(t for t in TARGETS if t.startswith("sm_")),
        "llvm": tuple(t for t in TARGETS if t.startswith("gfx")),
    }
    return [
        Case(
            f"{name} {fma_backend}",
            gemv_float16.gemv_float16_kernel,
            signature,
            absent | {"KIND": kind, "TILE": tile_bytes(kind), "BM": rows, "BN": config.columns, "FMA": fma_backend},
            (*pointers, "n_out"),
            options,
            targets,
        )
        for fma_backend, targets in vendors.items()
    ]


def _prepare(dtype: str, block_rows: int) -> Case:
    signature = {"x": f"*{dtype}", "numbers": "*fp16", "factors": "*fp32", "totals": "*fp16"}
    pointers = tuple(signature)
    signature |= {"n_rows": "i32", "n_chunks": "i32", "width": "i32"}
    constants = {"BM": block_rows, "ROWS": gemv_float16.PREPARE_ROWS}
    return Case(
        f"prepare {dtype} {block_rows}",
        gemv_float16.gemv_float16_prepare_kernel,
        signature,
        constants,
        pointers,
        {"num_warps": 4},
    )


def for_one_each(cases: list[Case]) -> list[Case]:
    """The same cases, each for those of its targets that more specialisations are compiled for."""
    return [replace(case, targets=tuple(t for t in case.targets if t in ONE_EACH)) for case in cases]


def _dequantise(kind: str, dtype: str, *, lookup: bool = False) -> Case:
    pointers, absent = random_packed(kind)
    if lookup:
        pointers |= {"ids": "*i64"}
    else:
        absent |= {"ids": None}
    pointers |= {"out": f"*{dtype}"}
    signature = pointers | dict.fromkeys(("first_row", "n_rows", "n_chunks"), "i32")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    constants = absent | {"KIND": kind, "TILE": tile_bytes(kind), "BN": 8}
    name = f"{'lookup' if lookup else 'dequantise'} {kind} {dtype}"
    return Case(name, dequant.dequantise_kernel, signature, constants, tuple(pointers), options)


def split_sum_kernel(dtype: str) -> Case:
    signature = {"parts": "*fp32", "out": f"*{dtype}", "n_splits": "i32", "size": "i32"}
    return Case(f"sum {dtype}", split_k.split_sum_kernel, signature, {"BLOCK": 512}, ("parts", "out"), {"num_warps": 4})


def group_sums_kernel(dtype: str) -> Case:
    signature = {"x": f"*{dtype}", "sums": "*fp32", "n_rows": "i32", "n_groups": "i32", "width": "i32"}
    constants = {"L": 32, "BM": 8, "BLOCK": gemv.SUM_BLOCK}
    return Case(
        f"group sums {dtype}", gemv.group_sums_kernel, signature, constants, ("x", "sums", "width"), {"num_warps": 4}
    )


CASES = [
    *(_gemv(kind, "bf16") for kind in ("Q6_K", "Q4_0", "Q8_0", "MXFP4", "IQ4_XS", "IQ4_NL")),
    *_gemv_float16("Q4_K"),
    *_gemv_float16("Q5_K", out="bf16", per_expert=True),
    *for_one_each(_gemv_float16("Q4_K", 16, out="fp16")),
    *for_one_each(_gemv_float16("Q4_K", 64)),
    _prepare("bf16", 8),
    *for_some(
        _prepare("fp16", 1),
        _gemv("Q5_K", "fp32"),
        _gemv("Q6_K", "fp16", per_expert=True),
        _gemv("Q4_K", "fp32", parts=False),
        _gemv("Q6_K", "fp32"),
        _gemv("Q8_0", "fp16", per_expert=True, parts=False, n_chunks=1),
        _gemv("Q8_0", "bf16", per_expert=True, padded=True),
        _gemv("Q5_0", "bf16", per_expert=True, padded=True),
        *(_gemv(kind, "bf16") for kind in ("Q5_0", "Q4_1", "Q5_1")),
        *(_dequantise(kind, "bf16") for kind in ("Q5_0", "Q4_1", "Q5_1")),
        *(_dequantise(kind, "bf16", lookup=True) for kind in ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0")),
        *(_dequantise(kind, "fp16", lookup=True) for kind in ("Q5_0", "Q4_1", "Q5_1")),
    ),
    *(_dequantise(kind, "bf16") for kind in ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0", "MXFP4", "IQ4_XS", "IQ4_NL")),
    split_sum_kernel("bf16"),
    group_sums_kernel("bf16"),
]
