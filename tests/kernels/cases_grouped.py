"""Specialisations of the products with experts' matrices that rows are grouped for."""

from __future__ import annotations

from daemons.ops.triton import grouped
from tests.kernels.cases_linear import random_packed
from tests.kernels.targets import Case, for_some


def _grouped(kind: str, dtype: str, n_pairs: int, *, filled: bool = False) -> Case:
    """``n_pairs``: of 64 experts; what the launch is chosen by.  ``filled``: rows end within a chunk."""
    pointers, absent = random_packed(kind)
    pointers |= {"x": f"*{dtype}", "order": "*i64", "bounds": "*i64", "out": f"*{dtype}"}
    signature = pointers | dict.fromkeys(("n_out", "n_chunks", "width", "share"), "i32")
    how = grouped.grouped_shape(n_pairs, 64)
    constants = absent | {"KIND": kind, "BM": how.rows, "BN": how.columns, "FILLED": filled}
    options = {"num_warps": how.n_warps, "num_stages": how.n_stages}
    name = f"grouped {kind} {dtype} {how.rows}x{how.columns}{' filled' * filled}"
    return Case(name, grouped._grouped, signature, constants, (*pointers, "n_out", "width"), options)


CASES = [
    _grouped("Q4_K", "bf16", 1024 * 8),
    _grouped("Q6_K", "fp16", 64 * 8),
    *for_some(
        *(_grouped(kind, "bf16", 1024 * 8) for kind in ("Q5_K", "Q4_0", "Q4_1", "Q5_1", "Q8_0")),
        _grouped("Q4_K", "bf16", 64 * 8),
        _grouped("Q5_0", "bf16", 1024 * 8, filled=True),
        _grouped("Q4_K", "fp32", 1024 * 8),
    ),
]
