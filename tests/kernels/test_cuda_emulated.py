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
from daemons.weights.packed import PackedWeights, repack, tile_bytes
from lucevisor.model.quant_types import BY_NAME
from tests.daemons.tiny_models import random_blocks

EMULATION = Path(__file__).parent / "emulation"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiles ``emulation/gemv.cpp`` as gemv.cu is compiled for a GPU, once for each set of constants."""
    made: dict[tuple[str, ...], ctypes.CDLL] = {}

    def get(kind: str, depth: int, *defines: str) -> ctypes.CDLL:
        constants = (
            f"KIND={kind}",
            f"TILE_BYTES={tile_bytes(kind)}",
            f"DEPTH={depth}",
            f"WARPS={gemv.WARPS}",
            *defines,
        )
        if constants not in made:
            target = tmp_path_factory.mktemp("emulated") / "gemv.so"
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{EMULATION}", f"-I{SOURCES}"]
            command = ["g++", *options, *(f"-D{c}" for c in constants), str(EMULATION / "gemv.cpp"), "-o", str(target)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made[constants] = ctypes.CDLL(str(target))
        return made[constants]

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
        found = multiplied(library(kind, 3, *copies), packed, x, n_blocks, None, 1)
        check(found, x.double() @ numbers.t())


@pytest.mark.parametrize(("kind", "columns"), [("Q4_0", 352), ("Q6_K", 512)])
def test_expert_pairs_in_float16(kind, columns, library):
    """Rows that end within a chunk too."""
    packed, numbers = matrix(kind, 3, 20, columns)
    experts = torch.tensor([2, 0, 1, 1])
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(1)).half()
    found = multiplied(library(kind, 2, "FLOAT16_ACTIVATIONS"), packed, x, 2, experts, 2)
    check(found, torch.stack([x[p // 2].double() @ numbers[e].t() for p, e in enumerate(experts.tolist())]))
