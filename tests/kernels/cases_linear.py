"""Specialisations of the products with quantised matrices, by type, dtype of the activations and rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from daemons.ops.triton import launch, linear, nested
from daemons.weights.packed import empty_packed
from lucevisor.model.quant_types import BY_NAME
from tests.kernels.targets import ONE_EACH, TARGETS, Case, for_some

TYPES = {torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.float16: "*fp16"}


def random_packed(kind: str) -> tuple[dict[str, str], dict[str, None]]:
    """Element types of the packed tensors of ``kind``; None for those it does not have."""
    packed = empty_packed(BY_NAME[kind], 1, 256, torch.device("meta"))
    found = {name: getattr(packed, name) for name in ("codes", "high", "scales", "steps")}
    there = {name: TYPES[tensor.dtype] for name, tensor in found.items() if tensor is not None}
    return there, {name: None for name in found if name not in there}


def _multiply(
    kind: str,
    dtype: str,
    rows: int = 8,
    *,
    parts: bool = True,
    routed: bool = False,
    filled: bool = False,
    **fixed: int,
) -> Case:
    """``rows``: BM.  ``parts``: the row is split, sums are written in float32.  ``filled``: rows end within a chunk.
    ``fixed``: integers that are 1.
    """
    pointers, absent = random_packed(kind)
    pointers |= {"x": f"*{dtype}", "out": "*fp32" if parts else f"*{dtype}"}
    if kind == "Q8_0":
        absent |= {"sums": None}
    else:
        pointers |= {"sums": "*fp32"}
    if routed:
        pointers |= {"experts": "*i64"}
    else:
        absent |= {"experts": None}
    integers = ("n_rows", "n_out", "n_chunks", "width", "n_splits", "share")
    signature = pointers | {name: "i32" for name in integers if name not in fixed}
    how = launch.Tile()
    constants = absent | fixed | {"KIND": kind, "BM": rows, "BN": how.columns, "FILLED": filled}
    options = {"num_warps": how.n_warps, "num_stages": how.n_stages}
    how_called = f"{' routed' * routed}{'' if parts else ' direct'}{' narrow' * bool(fixed)}{' filled' * filled}"
    name = f"multiply {kind} {dtype} {rows}{how_called}"
    return Case(name, linear._multiply, signature, constants, (*pointers, "n_out", "width"), options)


def _multiply_nested(kind: str, rows: int = 8, *, out: str = "fp32", routed: bool = False) -> list[Case]:
    """One for each vendor: they fuse two multiply-adds in their own ways."""
    pointers, absent = random_packed(kind)
    del absent["steps"]
    pointers |= {"x": "*fp16", "factors": "*fp32", "totals": "*fp16", "out": f"*{out}"}
    if routed:
        pointers |= {"experts": "*i64"}
    else:
        absent |= {"experts": None}
    signature = pointers | dict.fromkeys(("n_rows", "n_out", "n_chunks", "n_splits", "share"), "i32")
    how = nested.tile(1 if routed else rows)
    options = {"num_warps": how.n_warps, "num_stages": how.n_stages}
    name = f"multiply nested {kind} {out} {rows}{' routed' * routed}"
    vendors = {
        "ptx": tuple(t for t in TARGETS if t.startswith("sm_")),
        "llvm": tuple(t for t in TARGETS if t.startswith("gfx")),
    }
    return [
        Case(
            f"{name} {fused}",
            nested._multiply_nested,
            signature,
            absent | {"KIND": kind, "BM": rows, "BN": how.columns, "FUSED": fused},
            (*pointers, "n_out"),
            options,
            targets,
        )
        for fused, targets in vendors.items()
    ]


def _prepare(dtype: str, lanes: int) -> Case:
    signature = {"x": f"*{dtype}", "numbers": "*fp16", "factors": "*fp32", "totals": "*fp16"}
    pointers = tuple(signature)
    signature |= {"n_rows": "i32", "n_chunks": "i32", "width": "i32"}
    constants = {"BM": lanes, "ROWS": nested.PREPARED}
    return Case(f"prepare {dtype} {lanes}", nested._prepare, signature, constants, pointers, {"num_warps": 4})


def for_one_each(cases: list[Case]) -> list[Case]:
    """The same cases, each for those of its targets that more specialisations are compiled for."""
    return [replace(case, targets=tuple(t for t in case.targets if t in ONE_EACH)) for case in cases]


def _expand(kind: str, dtype: str) -> Case:
    pointers, absent = random_packed(kind)
    pointers |= {"out": f"*{dtype}"}
    signature = pointers | dict.fromkeys(("first_row", "n_rows", "n_chunks"), "i32")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    constants = absent | {"KIND": kind, "BN": 8}
    return Case(f"expand {kind} {dtype}", linear._expand, signature, constants, tuple(pointers), options)


def _sum(dtype: str) -> Case:
    signature = {"parts": "*fp32", "out": f"*{dtype}", "n_splits": "i32", "size": "i32"}
    return Case(f"sum {dtype}", launch._sum, signature, {"BLOCK": 512}, ("parts", "out"), {"num_warps": 4})


def _group_sums(dtype: str) -> Case:
    signature = {"x": f"*{dtype}", "sums": "*fp32", "n_rows": "i32", "n_groups": "i32", "width": "i32"}
    constants = {"L": 32, "BM": 8, "BLOCK": linear.SUMMED}
    return Case(
        f"group sums {dtype}", linear._group_sums, signature, constants, ("x", "sums", "width"), {"num_warps": 4}
    )


CASES = [
    *(_multiply(kind, "bf16") for kind in ("Q6_K", "Q4_0", "Q8_0")),
    *_multiply_nested("Q4_K"),
    *_multiply_nested("Q5_K", out="bf16", routed=True),
    *for_one_each(_multiply_nested("Q4_K", 16, out="fp16")),
    *for_one_each(_multiply_nested("Q4_K", 64)),
    _prepare("bf16", 8),
    *for_some(
        _prepare("fp16", 1),
        _multiply("Q5_K", "fp32"),
        _multiply("Q6_K", "fp16", routed=True),
        _multiply("Q4_K", "fp32", parts=False),
        _multiply("Q6_K", "fp32"),
        _multiply("Q8_0", "fp16", routed=True, parts=False, n_chunks=1),
        _multiply("Q8_0", "bf16", routed=True, filled=True),
        _multiply("Q5_0", "bf16", routed=True, filled=True),
        *(_multiply(kind, "bf16") for kind in ("Q5_0", "Q4_1", "Q5_1")),
        *(_expand(kind, "bf16") for kind in ("Q5_0", "Q4_1", "Q5_1")),
    ),
    *(_expand(kind, "bf16") for kind in ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0")),
    _sum("bf16"),
    _group_sums("bf16"),
]
