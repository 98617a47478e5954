"""CUDA C++ becomes machine code for every supported architecture, without a GPU, by NVRTC."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from daemons.ops.code_cache import kept
from daemons.ops.cuda import compiler as compilation
from daemons.ops.cuda.compiler import CompileError, compile_kernel, nvrtc, start
from daemons.ops.cuda.delta_net import compile_delta_net, compile_delta_net_batch
from daemons.ops.cuda.experts import compile_experts, experts_shape
from daemons.ops.cuda.gemm import compile_gemm, gemm_shape
from daemons.ops.cuda.gemv import (
    KINDS,
    RowsShape,
    compile_gemv,
    compile_gemv_rows,
    gemv_constants,
    gemv_shape,
    rows_shape,
    shape_of_rows,
)
from daemons.ops.cuda.limits import DTYPES, DeviceLimits, eight_rows_bytes
from daemons.ops.cuda.slabs import WARPS, SlabShape, compile_slabs, fitting_shape
from daemons.ops.cuda.streamed import MAX_STREAMED_ROWS, StreamedShape, compile_streamed, shapes, streamed_shape
from daemons.weights.packed import tile_bytes
from tests.kernels.delta_layers import Layer

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
CLUSTERS = ("sm_90", "sm_100")
H200 = DeviceLimits(132, 233472, 232448, clusters=True)
HOPPER = replace(H200, wide_products=True, fast_memory=True)
ADA = DeviceLimits(128, 102400, 101376, clusters=False)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lucevisor"


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        nvrtc()
    except CompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_compiles(architecture):
    """Depths, gates, warps and dtypes in turn: each of them for some kind."""
    variants = itertools.cycle(itertools.product((4, 3, 2), ((False, 12), (True, 8)), DTYPES))
    for kind, (depth, (gated, warps), dtype) in zip(sorted(KINDS), variants, strict=False):
        constants = gemv_constants(kind, warps, depth, gated=gated)
        assert compile_gemv(architecture, constants, dtype).startswith(b"\x7fELF")


def test_copies_of_older_gpus_compile_for_newer_ones():
    """So that a test on a newer GPU can run them."""
    assert compile_gemv("sm_90", gemv_constants("Q6_K", 12, 3), torch.bfloat16, "NO_BULK_COPIES")


def test_a_failure_says_what_the_compiler_said():
    with pytest.raises(CompileError, match=r"gemv.cu for sm_90: (.|\n)*error"):
        compile_gemv("sm_90", gemv_constants("Q4_K", 8, 4), torch.bfloat16, "COLUMNS=1")
    with pytest.raises(CompileError, match="sm_1"):
        compile_gemv("sm_1", gemv_constants("Q4_K", 8, 4), torch.bfloat16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_compile(architecture):
    variants = itertools.cycle(itertools.product((0.5, 4, 10, 16), DTYPES))
    for kind, (rows, dtype) in zip(sorted(KINDS), variants, strict=False):
        shape = experts_shape(kind, 2, 64, rows, H200)
        assert shape is not None
        assert compile_experts(architecture, kind, shape, dtype).startswith(b"\x7fELF")


@pytest.mark.parametrize("architecture", CLUSTERS)
def test_streamed_rows_and_the_delta_net_compile(architecture):
    for kind, n_rows, dtype in (
        ("Q4_K", 32, torch.bfloat16),
        ("Q6_K", 16, torch.float16),
        ("Q8_0", 24, torch.bfloat16),
    ):
        shape = streamed_shape(kind, n_rows, 20, 2176, H200)
        assert shape is not None
        assert compile_streamed(architecture, kind, shape, dtype).startswith(b"\x7fELF")
    params = Layer.random(2, 6, 128, 4, (0.1, 8.0), 1).params
    for compiled in (compile_delta_net, partial(compile_delta_net, blocks_each=1), compile_delta_net_batch):
        assert compiled(architecture, params, torch.bfloat16).startswith(b"\x7fELF")


def test_products_in_slabs_compile():
    """1 to 4 eights of rows, depths, gates and dtypes in turn: each of them for some kind."""
    variants = itertools.cycle(itertools.product((1, 2), (False, True), DTYPES))
    for i, (kind, (depth, gated, dtype)) in enumerate(zip(sorted(KINDS), variants, strict=False)):
        shape = SlabShape(gated, i % 4 + 1, depth + 1, 1, 132, 0, i % 3 > 0)
        assert compile_slabs(kind, shape, dtype).startswith(b"\x7fELF")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_products_of_many_rows_compile(kind):
    for n_rows in (64, 256):
        shape = gemm_shape(kind, n_rows, 20, 2176, HOPPER)
        assert shape is not None
        assert shape.shared_bytes <= HOPPER.block_shared_bytes
        assert shape.n_blocks * shape.n_row_blocks <= HOPPER.n_processors
        dtype = torch.float16 if kind == "Q4_K" else torch.bfloat16
        assert compile_gemm(kind, shape, dtype).startswith(b"\x7fELF")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_slab_shapes_fit(kind):
    """Rings and a block's chunks of rows in its shared memory; no more blocks than run at once, each with a chunk."""
    for n_rows, n_chunks, n_tiles in ((2, 20, 2176), (16, 68, 320), (24, 8, 772), (32, 1, 64), (32, 20, 15520)):
        shape, slabs = fitting_shape(kind, n_rows, n_chunks, n_tiles, HOPPER), -(-n_tiles // WARPS)
        assert shape is not None
        assert shape.shared_bytes <= HOPPER.block_shared_bytes
        assert shape.n_blocks * shape.n_splits <= HOPPER.n_processors
        assert 1 <= shape.n_splits <= n_chunks
        for split in range(shape.n_splits):
            length = (split + 1) * n_chunks // shape.n_splits - split * n_chunks // shape.n_splits
            assert shape.n_blocks <= slabs * length
            kept = min(length, -(-slabs * length // shape.n_blocks))
            rings = WARPS * shape.depth * (tile_bytes(kind) + 8)
            assert rings + kept * shape.tiles_of_rows * eight_rows_bytes(kind) <= shape.shared_bytes


def test_each_number_of_rows_has_the_kernel_that_is_fastest():
    """As measured on an H200: rows that do not fit beside the rings, and from 9 rows on all but matrices of few chunks
    of which blocks get few.
    """

    def chosen(kind: str, n: int, k: int, n_rows: int, limits: DeviceLimits = HOPPER) -> type:
        return type(shape_of_rows(kind, k // 256, n // 16, n_rows, limits))

    assert chosen("Q4_K", 34816, 5120, 8) is RowsShape
    assert {chosen("Q4_K", 34816, 5120, n) for n in range(9, 33)} == {SlabShape}
    assert {chosen("Q4_K", 5120, 17408, n) for n in range(2, 33)} == {SlabShape}
    assert chosen("Q8_0", 5120, 17408, 32) is StreamedShape  # too many splits
    assert chosen("Q6_K", 248320, 5120, 32) is StreamedShape  # parts would take too much memory
    assert chosen("Q8_0", 34816, 5120, 16) is SlabShape
    assert chosen("Q4_K", 5120, 6144, 8) is RowsShape
    assert chosen("Q4_K", 5120, 6144, 16) is SlabShape
    assert chosen("Q4_K", 12352, 2048, 16) is RowsShape
    assert chosen("Q4_K", 34816, 5120, 32, H200) is StreamedShape  # a GPU whose matrix units read registers alone
    assert chosen("Q4_K", 34816, 5120, 16, ADA) is type(None)
    slower = replace(HOPPER, fast_memory=False)  # an H100, which waits for memory
    assert chosen("Q4_K", 34816, 5120, 32, slower) is StreamedShape


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_streamed_shapes_fit(kind):
    """Every shape: rings in a block, every tile in some block; the first ones use most multiprocessors."""
    for n_rows, n_chunks, n_tiles in (
        (9, 20, 2176),
        (16, 68, 320),
        (24, 8, 772),
        (32, 1, 64),
        (MAX_STREAMED_ROWS, 20, 15520),
    ):
        found = shapes(kind, n_rows, n_chunks, n_tiles, H200)
        assert found
        for shape in found:
            assert shape.shared_bytes <= H200.block_shared_bytes
            assert shape.cluster <= n_chunks
            assert shape.n_blocks % shape.cluster == 0
            assert shape.n_blocks // shape.cluster * shape.n_side >= n_tiles
            assert shape.n_side * shape.n_teams <= shape.warps
        assert n_tiles < 300 or found[0].n_blocks >= 96
    assert streamed_shape(kind, 32, 20, 2176, ADA) is None  # no clusters
    assert streamed_shape(kind, 8, 20, 2176, H200) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_rows_compile(architecture):
    """8 and 16 rows, depths and dtypes in turn."""
    variants = itertools.cycle(itertools.product((1, 2), (3, 2), DTYPES))
    for kind, (tiles, depth, dtype) in zip(sorted(KINDS), variants, strict=False):
        assert compile_gemv_rows(architecture, kind, RowsShape(tiles, depth, 0, 1), dtype).startswith(b"\x7fELF")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_fit_shared_memory_in_the_fewest_splits(kind):
    for n_rows in (2, 8, 9, 16):
        before = 1
        for n_chunks in (1, 8, 20, 24, 68):
            shape = rows_shape(kind, n_chunks, n_rows, H200)
            if shape is None:
                assert n_rows > 8
                assert n_chunks == 68
                continue
            assert shape.shared_bytes <= H200.block_shared_bytes
            assert shape.tiles_of_rows == -(-n_rows // 8)
            assert before <= shape.n_splits <= n_chunks
            before = shape.n_splits
    assert rows_shape(kind, 68, 8, ADA) is None


@pytest.mark.parametrize("limits", [H200, ADA], ids=["h200", "ada"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_blocks_fit_a_multiprocessor(kind, limits):
    deepest = 5
    for n_chunks in (1, 8, 20, 24, 68, 112):
        shape = gemv_shape(kind, n_chunks, limits)
        if shape is None:
            assert limits is ADA
            continue
        assert shape.shared_bytes <= limits.block_shared_bytes
        assert shape.per_processor * (shape.shared_bytes + 1024) <= limits.shared_bytes
        assert shape.depth <= deepest or shape.per_processor == 1
        deepest = shape.depth
    assert gemv_shape(kind, 1 << 12, limits) is None  # too wide for any block


def test_shared_memory_is_filled_with_tiles_in_flight():
    found = [gemv_shape("Q4_K", n_chunks, H200) for n_chunks in (20, 24, 68, 128)]
    assert [(s.depth, s.per_processor) for s in found if s is not None] == [(3, 2), (3, 2), (2, 2), (4, 1)]


def test_machine_code_is_kept_for_the_next_process(cache, monkeypatch):
    made = compile_gemv("sm_90", gemv_constants("Q4_K", 8, 4), torch.bfloat16)
    [file] = cache.iterdir()
    assert file.read_bytes() == made
    monkeypatch.setattr(compilation, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert compile_gemv("sm_90", gemv_constants("Q4_K", 8, 4), torch.bfloat16) == made


def test_another_option_or_source_is_other_machine_code(cache, monkeypatch):
    compile_gemv("sm_90", gemv_constants("Q4_K", 8, 4), torch.bfloat16)
    compile_gemv("sm_90", gemv_constants("Q4_K", 8, 3), torch.bfloat16)
    assert len([*cache.iterdir()]) == 2
    monkeypatch.setattr(compilation, "_sources", lambda: b"changed")
    compile_gemv("sm_90", gemv_constants("Q4_K", 8, 3), torch.bfloat16)
    assert len([*cache.iterdir()]) == 3


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_kernel_compiles_meanwhile_and_a_failure_waits_for_who_needs_it(has_threads, monkeypatch):
    if not has_threads:
        monkeypatch.setattr(compilation, "_threads", mock.Mock(side_effect=MemoryError))
    code = start(compile_gemv, "sm_90", gemv_constants("Q4_K", 8, 4), torch.bfloat16)
    failed = start(compile_kernel, "gemv.cu", "sm_90", ("KIND=NONE", "TILE_BYTES=0"))
    assert code.done() is not has_threads
    assert code.result().startswith(b"\x7fELF")
    with pytest.raises(CompileError, match=r"gemv.cu for sm_90"):
        failed.result()


def test_a_kernel_that_two_need_compiles_once(monkeypatch):
    names = list[str]()

    def compiled(file, options):
        names.append(file)
        time.sleep(0.1)
        return b"code"

    monkeypatch.setattr(compilation, "_compiled", compiled)
    futures = [start(compile_kernel, "gemv.cu", "sm_90", ("A=1",)) for _ in range(3)]
    assert [future.result() for future in futures] == [b"code"] * 3
    assert names == ["gemv.cu"]


def test_without_a_cache_code_is_made_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept("name", lambda: b"1") == b"1"
    assert kept("name", lambda: b"2") == b"2"
