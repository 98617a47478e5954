"""C++ kernels of the cpu against float64 arithmetic and against torch's forms of the same operations."""

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


@pytest.mark.parametrize("scratch", [1 << 24, 512 * 32])
def test_products_of_many_rows(scratch, monkeypatch):
    monkeypatch.setattr("daemons.ops.cpu.linear.SCRATCH_ELEMENTS", scratch)
    kinds = [BY_NAME["Q4_K"], BY_NAME["Q6_K"]]
    raws = [blocks(kind.name, 40) for kind in kinds]
    product = TiledLinear(cpu_kernels(), [packed(k, raw) for k, raw in zip(kinds, raws, strict=True)], 512)
    w = torch.cat([dequantise(k, raw, torch.bfloat16) for k, raw in zip(kinds, raws, strict=True)])
    x = torch.randn(MAX_TILED_ROWS + 1, 512).bfloat16()
    wanted = x.double() @ w.double().t()
    assert bool(((product(x).double() - wanted).abs() <= BFLOAT16 * wanted.abs() + 2 * product_error(x, w)).all())


def test_threads_change_no_number():
    kind, x = BY_NAME["Q5_K"], torch.randn(3, 512)
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
        compiler.library.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(compiler.CpuCompileError, match=r"no C\+\+ compiler: install g\+\+"):
        compiler.library.__wrapped__()


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(compiler.CpuCompileError, match="broken: fatal error: out of luck"):
        compiler.library.__wrapped__()
    assert not list(tmp_path.glob("lucevisor/*.so"))
