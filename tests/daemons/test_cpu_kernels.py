"""C++ kernels of the cpu against float64 arithmetic and against torch's forms of the same operations."""

import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.ops.cpu import compiler
from daemons.ops.cpu.library import KINDS, Tiles, cpu_kernels
from daemons.ops.cpu.linear import MAX_TILED_ROWS, TiledLinear
from daemons.weights.dequant import dequantise
from lucevisor.model.quant_types import BY_NAME, format_bytes, weight_format
from lucevisor.model.values import Backend, Dtype
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.tiny_models import random_blocks
from tests.numerics import BFLOAT16, product_error

pytestmark = needs_cpu_kernels


def blocks(kind, n_rows, seed=0):
    return torch.from_numpy(random_blocks(np.random.default_rng(seed), kind, n_rows, 512))


def packed(kind, raw):
    kernels, n_columns = cpu_kernels(), raw.shape[1] // kind.block_bytes * kind.block_elements
    data = torch.empty(kernels.tiles_bytes(kind, raw.shape[0], n_columns), dtype=torch.uint8)
    kernels.pack(kind, raw, data)
    return Tiles(kind, raw.shape[0], data)


def test_a_library_that_was_cut_short_is_made_once_more(tmp_path, monkeypatch):
    good, _ = compiler._built(next(filter(None, map(shutil.which, compiler._compilers()))), compiler._cpu_flags())
    made = []

    def compile_to(source):
        def copy(_, target):
            made.append(target)
            shutil.copy(source, target)

        monkeypatch.setattr(compiler, "_compile", copy)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    cut = compiler.cache_directory() / good.name
    cut.touch()
    compile_to(good)
    compiler.load()
    compiler.load()
    assert made == [cut]
    compile_to(os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    with pytest.raises(compiler.CpuCompileError, match="too short"):
        compiler.load()
    assert len(made) == 2  # what was made now would be no better


def test_kernels_compile_where_a_hypervisor_hides_vnni(tmp_path):
    found = next(filter(None, map(shutil.which, compiler._compilers())))
    flags = [*compiler.FLAGS, "-mno-avx512vnni", "-O0", "-c", "-o", str(tmp_path / "kernels.o")]
    done = subprocess.run([found, *flags, str(compiler.SOURCES / "kernels.cpp")], capture_output=True, text=True)
    assert not done.returncode, done.stderr[:2000]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tiles_hold_the_numbers_of_the_blocks(kind):
    raw, kind = blocks(kind, 72), BY_NAME[kind]
    tiles, wanted = packed(kind, raw), dequantise(kind, raw, torch.bfloat16)
    found = torch.empty(40, 512, dtype=torch.bfloat16)
    cpu_kernels().dequantise(tiles, 512, 32, found)
    assert torch.equal(found, wanted[32:])
    ids = torch.tensor([71, 0, 7])
    assert torch.equal(cpu_kernels().lookup(kind, raw, ids), wanted[ids])


@pytest.mark.parametrize("n_rows", [1, 8, 16, 40, 1552])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tiles_of_small_matrices_fit_into_what_is_planned_for_them(kind, n_rows):
    kind = BY_NAME[kind]
    planned = format_bytes(kind, (n_rows, 512), weight_format(kind, (n_rows, 512), Backend.CPU, Dtype.BFLOAT16))
    assert cpu_kernels().tiles_bytes(kind, n_rows, 512) <= planned


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    n_rows=st.integers(1, 70),
    rows=st.integers(1, MAX_TILED_ROWS),
    seed=st.integers(0, 99),
)
def test_products_of_few_rows(kinds, n_rows, rows, seed):
    """Weights and products are exact: only sums are rounded, and the result to bfloat16."""
    torch.manual_seed(seed)
    raws = [blocks(kind, n_rows, seed) for kind in kinds]
    product = TiledLinear(cpu_kernels(), [packed(BY_NAME[k], raw) for k, raw in zip(kinds, raws, strict=True)], 512)
    w = torch.cat([dequantise(BY_NAME[k], raw, torch.float32) for k, raw in zip(kinds, raws, strict=True)])
    x = torch.randn(rows, 512).bfloat16()
    wanted, found = x.double() @ w.double().t(), product(x)
    # a weight is a code's product less a minimum or an offset, up to eleven times as large
    allowed = BFLOAT16 * wanted.abs() + 12 * product_error(x, w)
    assert found.shape == (rows, product.n_out)
    assert bool(((found.double() - wanted).abs() <= allowed).all())
    for row in range(rows):
        assert torch.equal(product(x[row : row + 1]), found[row : row + 1])


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    n_rows=st.integers(1, 70),
    rows=st.integers(1, 40),
    outlier=st.sampled_from([1.0, 1e3, 1e-37]),
    seed=st.integers(0, 99),
)
def test_products_of_many_rows_in_integers(kinds, n_rows, rows, outlier, seed):
    """Weights are exact, activations integers: what is far smaller than the largest of 256 columns is rounded."""
    torch.manual_seed(seed)
    raws = [blocks(kind, n_rows, seed) for kind in kinds]
    parts = [packed(BY_NAME[k], raw) for k, raw in zip(kinds, raws, strict=True)]
    w = torch.cat([dequantise(BY_NAME[k], raw, torch.float32) for k, raw in zip(kinds, raws, strict=True)])
    x = torch.randn(rows, 512)
    x[:, ::97] *= outlier
    x = x.bfloat16()
    kernels, n_out = cpu_kernels(), len(w)
    found = kernels.multiply_many(kernels.matrices(parts), x, n_out)
    wanted = x.double() @ w.double().t()
    largest = x.double().view(rows, 2, 256).abs().amax(dim=2) * 2.0**-15
    rounded = largest @ w.double().abs().view(n_out, 2, 256).sum(dim=2).t()
    allowed = BFLOAT16 * wanted.abs() + 12 * product_error(x, w) + rounded
    assert bool(((found.double() - wanted).abs() <= allowed).all())
    assert torch.equal(kernels.multiply_many(kernels.matrices(parts), x[-1:], n_out), found[-1:])


def test_products_in_integers_of_short_and_of_very_many_rows():
    """Columns that are no whole chunk, more rows than are taken at a time, numbers that are not finite, zeros."""
    kind, kernels = BY_NAME["Q5_1"], cpu_kernels()
    raw = torch.from_numpy(random_blocks(np.random.default_rng(0), "Q5_1", 48, 288))
    w, parts = dequantise(kind, raw, torch.float32), [packed(kind, raw)]
    x = torch.randn(2100, 288).bfloat16()
    x[7], x[8, 3], x[9, 280] = 0.0, float("inf"), float("nan")
    found = kernels.multiply_many(kernels.matrices(parts), x, 48)
    wanted = x.double() @ w.double().t()
    assert not found[8:10].isfinite().any()
    found[8:10] = wanted[8:10] = 0.0
    x[8:10] = 0.0
    allowed = BFLOAT16 * wanted.abs() + 12 * product_error(x, w)
    allowed += 2.0**-15 * x.double().abs().amax(dim=1, keepdim=True) * w.double().abs().sum(dim=1)
    assert bool(((found.double() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("in_integers", [False, True])
def test_this_cpu_decides_how_many_rows_are_multiplied(in_integers, monkeypatch):
    monkeypatch.setattr(cpu_kernels(), "multiplies_many", in_integers)
    kind, x = BY_NAME["Q4_K"], torch.randn(MAX_TILED_ROWS + 1, 512).bfloat16()
    product = TiledLinear(cpu_kernels(), [packed(kind, blocks("Q4_K", 40))], 512)
    assert product.implementation.endswith("c++ in integers beyond" if in_integers else "bfloat16 onednn beyond")
    direct = cpu_kernels().multiply_many(product._matrices, x, 40)
    found = product(x)
    assert torch.equal(found, direct) == in_integers
    assert torch.allclose(found.float(), direct.float(), rtol=0.05, atol=0.05 * float(direct.float().abs().max()))


@pytest.mark.parametrize("scratch", [1 << 24, 512 * 32])
def test_products_of_many_rows(scratch, monkeypatch):
    monkeypatch.setattr(cpu_kernels(), "multiplies_many", False)
    monkeypatch.setattr("daemons.ops.cpu.linear.SCRATCH_ELEMENTS", scratch)
    kinds = [BY_NAME["Q4_K"], BY_NAME["Q6_K"]]
    raws = [blocks(kind.name, 40) for kind in kinds]
    product = TiledLinear(cpu_kernels(), [packed(k, raw) for k, raw in zip(kinds, raws, strict=True)], 512)
    w = torch.cat([dequantise(k, raw, torch.bfloat16) for k, raw in zip(kinds, raws, strict=True)])
    x = torch.randn(MAX_TILED_ROWS + 1, 512).bfloat16()
    wanted = x.double() @ w.double().t()
    assert bool(((product(x).double() - wanted).abs() <= BFLOAT16 * wanted.abs() + 2 * product_error(x, w)).all())


@pytest.mark.parametrize("n_rows", [3, 40])
def test_threads_change_no_number(n_rows, monkeypatch):
    monkeypatch.setattr(cpu_kernels(), "multiplies_many", True)
    kind, x = BY_NAME["Q5_K"], torch.randn(n_rows, 512)
    product = TiledLinear(cpu_kernels(), [packed(kind, blocks("Q5_K", 300))], 512)
    one, before = product(x.bfloat16()), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(x.bfloat16()), one)
    finally:
        torch.set_num_threads(before)


def test_a_cpu_or_a_machine_that_cannot_is_told(monkeypatch):
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(compiler.CpuCompileError, match="the cpu lacks avx512_bf16"):
        compiler.load()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(compiler.CpuCompileError, match=r"no C\+\+ compiler: install g\+\+"):
        compiler.load()


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(compiler.CpuCompileError, match="broken: fatal error: out of luck"):
        compiler.load()
    assert not list(tmp_path.glob("lucevisor/*.so"))


def test_memory_for_dequantised_rows_stays_the_same():
    kernels = cpu_kernels()
    first = kernels.scratch(32, 512)
    assert kernels.scratch(64, 256).data_ptr() == first.data_ptr()
    assert kernels.scratch(16, 256).shape == (16, 256)
