"""CUDA C++ kernels on the cpu: their own sources, with C++ in place of PTX instructions (emulation/emulated_ptx.h).

Threads run in random orders and copies take random times, so a missing wait or barrier gives wrong numbers here too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from daemons.ops.cuda import gemv
from daemons.ops.cuda.compiler import SOURCES
from daemons.weights.dequant import dequantise
from daemons.weights.packed import PackedWeights, repack
from lucevisor.model.quant_types import BY_NAME
from tests.daemons.tiny_models import random_blocks

EMULATION = Path(__file__).parent / "emulation"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiles ``emulation/NAME.cpp`` as NAME.cu is compiled for a GPU, once for each set of constants."""
    made: dict[tuple[str, ...], ctypes.CDLL] = {}

    def get(name: str, constants: tuple[str, ...]) -> ctypes.CDLL:
        if (name, *constants) not in made:
            target = tmp_path_factory.mktemp("emulated") / f"{name}.so"
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{EMULATION}", f"-I{SOURCES}"]
            command = [
                "g++",
                *options,
                *(f"-D{c}" for c in constants),
                str(EMULATION / f"{name}.cpp"),
                "-o",
                str(target),
            ]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made[name, *constants] = ctypes.CDLL(str(target))
        return made[name, *constants]

    return get


def matrix(kind: str, *shape: int) -> tuple[PackedWeights, Tensor]:
    """[N, K] or [X, N, K]: packed weights, and the numbers in float64."""
    raw = torch.from_numpy(random_blocks(np.random.default_rng(sum(shape)), kind, int(np.prod(shape[:-1])), shape[-1]))
    numbers = dequantise(BY_NAME[kind], raw, torch.float32).double()
    return repack(BY_NAME[kind], raw.view(*shape[:-1], -1)), numbers.view(shape)


def multiplied(
    library: ctypes.CDLL, packed: PackedWeights, x: Tensor, n_blocks: int, experts: Tensor | None, pairs_per_row: int
) -> Tensor:
    """The result, twice as long: behind it lie sevens."""
    n_results = 1 if experts is None else len(experts)
    out = torch.full((2, n_results, packed.n_rows), 7.0, dtype=x.dtype)
    arguments = (packed.tiles, x, experts, out)
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in arguments)
    sizes = (packed.n_rows, packed.n_chunks, x.shape[1], pairs_per_row)
    library.run_gemv(n_blocks, n_results, 32 * gemv.WARPS, n_blocks, *pointers, *sizes)
    return out


def check(found: Tensor, wanted: Tensor) -> None:
    assert bool((found[1] == 7).all()), "more than the result was written"
    unit = torch.finfo(found.dtype).eps / 2
    assert float((found[0].double() - wanted).norm() / wanted.norm()) < 1.25 * unit


@pytest.mark.parametrize(
    ("kind", "copies"),
    [(kind, ("NO_BULK_COPIES",) if i % 2 else ()) for i, kind in enumerate(sorted(gemv.KINDS))],
)
def test_one_row(kind, copies, library):
    """Blocks of several tiles and of none, a tile that is not full, fewer and more chunks than warps."""
    for n, k, n_blocks in ((100, 2560, 3), (31, 256, 4), (16, 5120, 1)):
        packed, numbers = matrix(kind, n, k)
        x = torch.randn(1, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        found = multiplied(library("gemv", (*gemv.gemv_constants(kind, 3), *copies)), packed, x, n_blocks, None, 1)
        check(found, x.double() @ numbers.t())


@pytest.mark.parametrize(("kind", "columns"), [("Q4_0", 352), ("Q6_K", 512)])
def test_expert_pairs_in_float16(kind, columns, library):
    """Rows that end within a chunk too."""
    packed, numbers = matrix(kind, 3, 20, columns)
    experts = torch.tensor([2, 0, 1, 1])
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(1)).half()
    constants = (*gemv.gemv_constants(kind, 2), "FLOAT16_ACTIVATIONS")
    found = multiplied(library("gemv", constants), packed, x, 2, experts, 2)
    check(found, torch.stack([x[p // 2].double() @ numbers[e].t() for p, e in enumerate(experts.tolist())]))


@pytest.mark.parametrize(
    ("kind", "n_rows", "copies"),
    [(k, (5, 16)[i % 2], ("NO_BULK_COPIES",) if i % 3 else ()) for i, k in enumerate(sorted(gemv.KINDS))],
)
def test_several_rows(kind, n_rows, copies, library):
    """As many splits as there are, some teams without a tile, a tile that is not full."""
    for n, k, n_blocks, n_splits in ((100, 2560, 2, 1), (31, 1280, 1, 2)):
        packed, numbers = matrix(kind, n, k)
        x = torch.randn(n_rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        shape = gemv.RowsShape(-(-n_rows // 8), 2, 0, n_splits)
        out, parts = torch.full((2, n_rows, n), 7.0, dtype=x.dtype), torch.full((n_splits + 1, n_rows, n), 7.0)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed.tiles, x, out, parts))
        run = library("gemv_rows", (*gemv.rows_constants(kind, shape), *copies)).run_gemv_rows
        run(n_blocks, n_splits, 32 * gemv.ROWS_WARPS, n, *pointers, n_rows, n, packed.n_chunks, k)
        if n_splits > 1:
            assert bool((out == 7).all())
            out[0] = parts[:-1].sum(dim=0)
        assert bool((parts[-1] == 7).all()), "more than the parts was written"
        check(out, x.double() @ numbers.t())
