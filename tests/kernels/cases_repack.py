"""Specialisations of packing quant blocks, by quant type."""

from __future__ import annotations

from daemons.ops.triton.repack import ROWS, repack_kernel
from daemons.weights.packed import tile_bytes
from tests.kernels.cases_gemv import random_packed
from tests.kernels.targets import Case, for_some


def _repack(kind: str) -> Case:
    pointers, absent = random_packed(kind)
    pointers |= {"raw": "*i16"}
    signature = pointers | dict.fromkeys(("first", "n_raw", "width", "n_rows", "n_tiles", "n_chunks"), "i32")
    constants = absent | {"KIND": kind, "TILE": tile_bytes(kind), "ROWS": ROWS}
    return Case(f"repack {kind}", repack_kernel, signature, constants, tuple(pointers), {"num_warps": 4})


CASES = [
    *(_repack(kind) for kind in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "IQ4_XS")),
    *for_some(*(_repack(kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"))),
]
