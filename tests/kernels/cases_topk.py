"""Specialisations of the kernels that choose among logits and candidates."""

from __future__ import annotations

from typing import Any

from daemons.ops.topk import TOP_K_CHUNK
from daemons.ops.triton import topk
from tests.kernels.targets import Case, for_some

KEYS = {"keys": "*i64", "n": "i32"}
FOUND = {"tokens": "*i64", "probabilities": "*fp32"}


def _case(
    kernel: Any, signature: dict[str, str], constants: dict[str, int], name: str = "", *, num_warps: int = 4
) -> Case:
    names = tuple(argument for argument, kind in signature.items() if kind.startswith("*") or argument == "stride")
    return Case(f"{kernel.__name__}{name}", kernel, signature, constants, names, {"num_warps": num_warps})


def _logits(dtype: str) -> list[Case]:
    x = {"x": f"*{dtype}", "stride": "i32"} | KEYS
    chunks = {"BLOCK": topk.BLOCK, "CHUNK": TOP_K_CHUNK}
    found = x | {"best": "*fp32", "tokens": "*i64"}
    return [
        _case(topk.chunk_keys_kernel, x, chunks, f" {dtype}"),
        _case(topk.best_of_chunks_kernel, found, {"K": 16, "BK": 16, **chunks}, f" {dtype}"),
        _case(topk.best_and_sums_kernel, x | {"sums": "*fp32"}, {"BLOCK": topk.BLOCK}, f" {dtype}"),
    ]


def _path(dtype: str) -> Case:
    signature = {"best": "*fp32", "candidates": "*i64", **FOUND, "n": "i32"}
    signature |= dict.fromkeys(("first", "before", "after", "gate"), f"*{dtype}")
    return _case(topk.select_path_kernel, signature, {"K": 16, "R": 256, "BK": 16, "BR": 256}, f" {dtype}")


CASES = [
    *_logits("fp32"),
    _case(topk.likeliest_kernel, KEYS | FOUND | {"sums": "*fp32"}, {"BLOCK": 128}, num_warps=1),
    _path("bf16"),
    *for_some(*_logits("bf16"), _path("fp16")),
]
