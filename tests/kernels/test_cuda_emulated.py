"""CUDA C++ kernels on the cpu: their own sources, with C++ in place of PTX instructions (emulation/emulated_ptx.h).

Threads run in random orders and copies take random times, so a missing wait or barrier gives wrong numbers here too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from daemons.ops.basic import l2_scale
from daemons.ops.cuda import gemv
from daemons.ops.cuda.compiler import SOURCES
from daemons.ops.cuda.delta_net import batch_constants, constants
from daemons.ops.cuda.experts import ExpertsShape
from daemons.ops.cuda.gemm import GemmShape
from daemons.ops.cuda.limits import eight_rows_bytes
from daemons.ops.cuda.slabs import SlabShape
from daemons.ops.cuda.streamed import StreamedShape
from daemons.ops.operations import GatedDeltaNetParams, TorchOperations
from daemons.ops.triton.recurrent_delta_rule import L2_EPS
from daemons.weights.dequant import dequantise
from daemons.weights.packed import PackedWeights, repack
from lucevisor.model.quant_types import BY_NAME
from tests.daemons.tiny_models import random_blocks
from tests.kernels.delta_layers import Layer, form_of, make_states, one_by_one, only_last

Library = Callable[[str, tuple[str, ...]], ctypes.CDLL]
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
    library: ctypes.CDLL,
    packed: PackedWeights,
    x: Tensor,
    n_blocks: int,
    experts: Tensor | None,
    pairs_per_row: int,
    n_round: int = 4,
    n_out: int = 0,
    warps: int = 8,
) -> Tensor:
    """The result, twice as long: behind it lie sevens."""
    n_results, n_out = 1 if experts is None else len(experts), n_out or packed.n_rows
    out = torch.full((2, n_results, n_out), 7.0, dtype=x.dtype)
    arguments = (packed.tiles, x, experts, out)
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in arguments)
    sizes = (n_out, packed.n_chunks, x.shape[1], pairs_per_row, n_round)
    library.run_gemv(n_blocks, n_results, 32 * warps, n_blocks, *pointers, *sizes)
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
    warps = 12 if copies else 8
    kernel = library("gemv", (*gemv.gemv_constants(kind, warps, 3), *copies))
    for n, k, n_blocks, n_round in ((100, 2560, 3, 2), (31, 256, 4, 16), (16, 5120, 1, 1)):
        packed, numbers = matrix(kind, n, k)
        x = torch.randn(1, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        found = multiplied(kernel, packed, x, n_blocks, None, 1, n_round, warps=warps)
        check(found, x.double() @ numbers.t())


def test_a_gate(library):
    """silu(gate x) * (up x), rounded as by two kernels; for experts too."""
    kernel = library("gemv", gemv.gemv_constants("Q4_K", 12, 3, gated=True))
    for n, k, n_blocks, n_round, pairs in ((160, 1536, 4, 4, 1), (96, 512, 2, 16, 3)):
        packed, numbers = matrix("Q4_K", *((pairs,) if pairs > 1 else ()), n, k)
        x = torch.randn(1, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        gate, up = (x.double() @ numbers.mT).view(pairs, n).float().bfloat16().double().chunk(2, dim=1)
        experts = torch.arange(pairs) if pairs > 1 else None
        found = multiplied(kernel, packed, x, n_blocks, experts, pairs, n_round, n_out=n // 2, warps=12)
        wanted = torch.nn.functional.silu(gate) * up
        assert bool((found[1] == 7).all())
        assert (
            float((found[0].double() - wanted).norm() / wanted.norm()) < 2**-8
        )  # a unit of both factors and of the result


@pytest.mark.parametrize(("kind", "columns"), [("Q4_0", 352), ("Q6_K", 512)])
def test_expert_pairs_in_float16(kind, columns, library):
    """Rows that end within a chunk too."""
    packed, numbers = matrix(kind, 3, 20, columns)
    experts = torch.tensor([2, 0, 1, 1])
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(1)).half()
    constants = (*gemv.gemv_constants(kind, 8, 2), "FLOAT16_ACTIVATIONS")
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


@pytest.mark.parametrize(
    ("kind", "n_rows", "cluster", "side", "teams"), [("Q4_K", 12, 2, 1, 2), ("Q6_K", 9, 1, 3, 2), ("Q8_0", 20, 2, 3, 1)]
)
def test_streamed_rows(kind, n_rows, cluster, side, teams, library):
    """Blocks whose last tiles do not exist, teams and blocks with fewer chunks than others."""
    n, k, eights = 24, 1280, -(-n_rows // 8)
    shape = StreamedShape(eights, side, teams, cluster, 2, 3, 0, 0)
    packed, numbers = matrix(kind, n, k)
    x = torch.randn(n_rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.full((2, n_rows, n), 7.0, dtype=x.dtype)
    stream = torch.zeros(packed.n_chunks * eights * eight_rows_bytes(kind), dtype=torch.uint8)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed.tiles, x, stream, out))
    sizes = (n_rows, n, packed.n_chunks, k, side, teams)
    library("gemv_streamed", shape.constants(kind)).run_gemv_streamed(
        -(-n // (16 * side)) * cluster, n, *pointers, *sizes
    )
    check(out, x.double() @ numbers.t())


@pytest.mark.parametrize(("kind", "n_rows"), [(k, (5, 9, 20, 32)[i % 4]) for i, k in enumerate(sorted(gemv.KINDS))])
@pytest.mark.parametrize("from_shared", [False, True])
def test_products_in_slabs(kind, n_rows, from_shared, library):
    """Blocks that end within a slab and those that share one; slabs whose last tiles do not exist; splits."""
    for n, k, n_blocks, n_splits in ((300, 1280, 3, 1), (40, 1536, 4, 1), (530, 768, 2, 2), (256, 256, 1, 1)):
        packed, numbers = matrix(kind, n, k)
        x = torch.randn(n_rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        shape = SlabShape(False, -(-n_rows // 8), 2, n_splits, n_blocks, 0, from_shared)
        check(multiplied_in_slabs(library, shape, packed, x), x.double() @ numbers.t())


def test_products_in_slabs_beside_others(library):
    """In a part of longer rows; of a slab's parts more than a warp has lanes."""
    packed, numbers = matrix("Q4_K", 40, 10240)
    x = torch.randn(3, 10240, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiplied_in_slabs(library, SlabShape(False, 1, 2, 2, 20, 0, from_shared=False), packed, x, beside=24)
    assert bool((found[:, :, 40:] == 7).all())
    check(found[:, :, :40], x.double() @ numbers.t())


@pytest.mark.parametrize(("kind", "n_rows"), [("Q4_K", 8), ("Q6_K", 20)])
def test_a_gate_in_slabs(kind, n_rows, library):
    """As by two kernels; a last slab that is not full."""
    packed, numbers = matrix(kind, 320, 768)
    x = torch.randn(n_rows, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    shape = SlabShape(True, -(-n_rows // 8), 3, 1, 4, 0, n_rows > 8)
    found = multiplied_in_slabs(library, shape, packed, x)
    gate, up = (x.double() @ numbers.t()).float().bfloat16().double().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    assert bool((found[1] == 7).all())
    assert float((found[0].double() - wanted).norm() / wanted.norm()) < 2**-8


@pytest.mark.parametrize(
    ("kind", "eights"), [("Q4_0", 8), ("Q4_K", 16), ("Q5_0", 8), ("Q5_K", 8), ("Q6_K", 16), ("Q8_0", 8)]
)
def test_products_of_many_rows(kind, eights, library):
    """Slabs that lie in one block's piece, in two and in many; a last slab that is not full; a part of longer rows."""
    shapes = ((260, 512, 33, 2), (20, 768, 8 * eights + 2, 2))
    for n, k, n_rows, n_blocks in shapes if kind in ("Q4_0", "Q6_K", "Q8_0") else ((20, 512, 64, 1),):
        packed, numbers = matrix(kind, n, k)
        x = torch.randn(n_rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
        shape = GemmShape(eights, 2, 2, 0, n_blocks, -(-n_rows // (8 * eights)))
        n_eights = shape.n_row_blocks * eights
        out = torch.full((2, n_rows, n + 8), 7.0, dtype=x.dtype)
        stream = torch.zeros(packed.n_chunks * n_eights * eight_rows_bytes(kind), dtype=torch.uint8)
        parts = torch.full((shape.parts_bytes // 4 + 1,), torch.nan)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed.tiles, x, stream, out, parts))
        run = library("gemm", shape.constants(kind)).run_gemm
        run(n_blocks, n, *pointers, n_rows, n, packed.n_chunks, k, out.stride(1))
        assert bool(parts[-1].isnan()), "more than the parts was written"
        assert bool((out[0, :, n:] == 7).all())
        check(out[:, :, :n], x.double() @ numbers.t())


def multiplied_in_slabs(
    library: Library, shape: SlabShape, packed: PackedWeights, x: Tensor, beside: int = 0
) -> Tensor:
    """The result, twice as long: behind it lie sevens, and ``beside`` each row.  Parts that nobody wrote are NaN."""
    (n_rows, k), n = x.shape, packed.n_rows // (2 if shape.gated else 1)
    out = torch.full((2, n_rows, n + beside), 7.0, dtype=x.dtype)
    parts = torch.full((shape.parts_bytes(-(-packed.n_rows // 16)) // 4 + 1,), torch.nan)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed.tiles, x, out, parts))
    run = library("gemv_slabs", shape.constants(packed.kind.name)).run_gemv_slabs
    run(shape.n_blocks, shape.n_splits, n, *pointers, n_rows, n, packed.n_chunks, k, out.stride(1))
    assert bool(parts[-1].isnan()), "more than the parts was written"
    return out


@pytest.mark.parametrize(
    ("kind", "eights", "n_tokens", "pairs_per_row"), [("Q4_K", 1, 5, 2), ("Q6_K", 3, 30, 1), ("Q8_0", 2, 20, 1)]
)
def test_experts(kind, eights, n_tokens, pairs_per_row, library):
    """Experts of no row, of one and of more than a block multiplies at once; a tile that is not full."""
    n_experts, n, k, generator = 4, 40, 512, torch.Generator().manual_seed(n_tokens)
    packed, numbers = matrix(kind, n_experts, n, k)
    chosen = torch.randint(0, n_experts - 1, (n_tokens * pairs_per_row,), generator=generator)
    chosen[0] = n_experts - 1
    x = torch.randn(n_tokens, k, generator=generator).bfloat16()
    shape = ExpertsShape(eights, 4, 2, 2, 0)
    pairs, offsets = (
        torch.full((len(chosen) + 1,), -7, dtype=torch.int32),
        torch.full((n_experts + 2,), -7, dtype=torch.int32),
    )
    out = torch.full((2, len(chosen), n), 7.0, dtype=x.dtype)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed.tiles, x, chosen, pairs, offsets, out))
    sizes = (len(chosen), n_experts, n, packed.n_chunks, k, pairs_per_row)
    library("gemv_experts", shape.constants(kind)).run_gemv_experts(shape.n_blocks, n_tokens, *pointers, *sizes)
    assert offsets.tolist() == [0, *chosen.bincount(minlength=n_experts).cumsum(0).tolist(), -7]
    assert pairs[-1] == -7
    assert torch.equal(chosen[pairs[:-1].long()], chosen.sort().values)
    assert sorted(pairs[:-1].tolist()) == list(range(len(chosen)))
    check(out, torch.stack([x[p // pairs_per_row].double() @ numbers[e].t() for p, e in enumerate(chosen.tolist())]))


def delta_net(
    library: Library, a: Layer, y: Tensor, ids: list[int], kept: Tensor | None = None, blocks_each: int = 2
) -> Tensor:
    """Run the kernel; updates the states of ``a``: after the last token alone unless ``kept`` says which."""
    m, n = a.params, len(y) // len(ids)
    out = torch.full((len(y), m.n_value * m.dim), torch.nan, dtype=y.dtype)
    rows = only_last(ids, n) if kept is None else kept
    run = library("delta_net", constants(m, blocks_each)).run_delta_net
    call_delta_net(run, (len(ids), n), a.pools, a.params, (y, out), ids, rows, n)
    make_states(a.pools, ids, rows, TorchOperations())
    return out


def call_delta_net(
    function: Callable[..., None], first: tuple[int, int], pools: Sequence[Tensor], m: GatedDeltaNetParams,
    y_out: tuple[Tensor, Tensor], ids: list[int], rows: Tensor, n: int,
) -> None:  # fmt: skip
    states = torch.tensor(ids)
    tensors = (*y_out, *pools, states, rows, m.conv_weight, m.decay_rates, m.dt_bias, m.norm.weight)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    numbers = [ctypes.c_float(v) for v in (m.norm.epsilon, L2_EPS / m.dim, l2_scale(m.dim))]
    function(*first, *pointers, n, y_out[0].stride(0), *numbers)


@pytest.mark.parametrize(
    ("n_key", "n_value", "ids", "n_blocks"), [(2, 6, [6, 1, 4], 4), (1, 2, [3, 0, 1], 1), (2, 2, [5, 2, 1, 0, 3], 2)]
)
def test_the_delta_net_of_many_slices_gives_the_bits_of_few(n_key, n_value, ids, n_blocks, library):
    """Also where a state goes to another row, or nowhere."""
    a = Layer.random(n_key, n_value, 128, 4, (0.1, 8.0), 9)
    b, y = a.twin(), a.inputs(len(ids)).bfloat16()
    rows = torch.tensor([[state] for state in ids])
    rows[0], rows[-1] = 8, -1
    expected = delta_net(library, b, y, ids, rows)
    m, out = a.params, torch.full((len(y), n_value * 128), torch.nan, dtype=y.dtype)
    for seed in range(6):
        fresh = a.twin()
        run = library("delta_net_batch", batch_constants(m)).run_delta_net_batch
        call_delta_net(run, (n_blocks, seed), fresh.pools[:2], m, (y, out), ids, rows, len(ids))
        assert torch.equal(out, expected)
        assert torch.equal(fresh.states, b.states)
        assert torch.equal(fresh.conv_states, b.conv_states)


@pytest.mark.parametrize(("n_key", "n_value", "n", "ids"), [(1, 3, 1, [6, 1]), (2, 4, 3, [1, 0]), (1, 1, 5, [3])])
def test_delta_net(n_key, n_value, n, ids, library):
    a = Layer.random(n_key, n_value, 128, 4, (0.1, 8.0), 7)
    y = a.inputs(n * len(ids)).bfloat16()
    a.check(partial(delta_net, library, a), y, ids, one_by_one(a.net), form_of(a.net))


def test_a_slice_alone_gives_the_bits_of_one_among_others(library):
    """Its kernel has more registers, and all of its convolutions at once."""
    a = Layer.random(1, 2, 128, 4, (0.1, 8.0), 15)
    b, y, kept = a.twin(), a.inputs(11).bfloat16(), torch.tensor([[2, *range(5, 15)]])
    found = delta_net(library, a, y, [2], kept, blocks_each=1)
    assert torch.equal(found, delta_net(library, b, y, [2], kept))
    assert torch.equal(a.states[kept], b.states[kept])
    assert torch.equal(a.conv_states[kept], b.conv_states[kept])


def test_several_tokens_of_the_delta_net_give_the_bits_of_single_ones(library):
    """The state after each goes to any row, that which was read too; also where not all have one."""
    a = Layer.random(1, 2, 128, 4, (0.1, 8.0), 6)
    b, y, targets = a.twin(), a.inputs(4).bfloat16(), [5, 2, 1, 4]
    found = delta_net(library, a, y, [2], torch.tensor([targets]))
    rows, at = [], 2
    for i, target in enumerate((5, 3, 1, 4)):  # 3 in place of 2, which the first of them read
        rows.append(delta_net(library, b, y[i : i + 1], [at], torch.tensor([[target]])))
        at = target
    assert torch.equal(found, torch.cat(rows))
    for ours, theirs in zip(targets, (5, 3, 1, 4), strict=True):
        assert torch.equal(a.states[ours], b.states[theirs])
        assert torch.equal(a.conv_states[ours], b.conv_states[theirs])
