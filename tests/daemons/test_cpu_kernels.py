"""C++ kernels of the cpu against float64 arithmetic and against torch's forms of the same operations."""

import ctypes
import os
import shutil

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.models.loader import WeightLoader
from daemons.ops.cpu import compiler
from daemons.ops.cpu.library import KINDS, CpuKernels, Tiles, cpu_kernels
from daemons.ops.cpu.linear import ALL_ROWS, FEW_ROWS, TiledLinear
from daemons.ops.handovers import Handovers
from daemons.ops.selection import KernelSelector
from daemons.weights.dequant import dequantise
from lucevisor.model.gguf_files import open_model
from lucevisor.model.quant_types import BY_NAME, format_bytes, weight_format
from lucevisor.model.values import Backend, Dtype
from lucevisor.model.weight_layout import TensorLayout, TensorRole
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


def test_the_same_numbers_where_a_hypervisor_hides_vnni(tmp_path, monkeypatch):
    found = next(filter(None, map(shutil.which, compiler._compilers())))
    object_file, library = tmp_path / "kernels.o", tmp_path / "kernels.so"
    flags = [*compiler.FLAGS, "-mno-avx512vnni", "-O0", "-c", "-o", str(object_file)]
    compiler._run([found, *flags, str(compiler.SOURCES / "kernels.cpp")])
    compiler._run([found, "-shared", str(object_file), "-o", str(library)])
    monkeypatch.setattr("daemons.ops.cpu.library.library", lambda: ctypes.CDLL(str(library)))
    without, x = CpuKernels(), torch.randn(9, 512).bfloat16()
    for kind in sorted(KINDS):
        parts = [packed(BY_NAME[kind], blocks(kind, 40))]
        wanted = cpu_kernels().multiply(cpu_kernels().matrices(parts), x, 40)
        assert torch.equal(without.multiply(without.matrices(parts), x, 40), wanted)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tiles_hold_the_numbers_of_the_blocks(kind):
    raw, kind = blocks(kind, 72), BY_NAME[kind]
    tiles, wanted = packed(kind, raw), dequantise(kind, raw, torch.bfloat16)
    found = torch.empty(40, 512, dtype=torch.bfloat16)
    cpu_kernels().dequantise(tiles, 512, 32, found)
    assert torch.equal(found, wanted[32:])
    ids = torch.tensor([71, 71, 0, 7, 7, 7, 71])
    assert torch.equal(cpu_kernels().lookup(kind, raw, ids), wanted[ids])


@pytest.mark.parametrize("n_rows", [1, 8, 16, 40, 1552])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tiles_of_small_matrices_fit_into_what_is_planned_for_them(kind, n_rows):
    kind = BY_NAME[kind]
    planned = format_bytes(kind, (n_rows, 512), weight_format(kind, (n_rows, 512), Backend.CPU, Dtype.BFLOAT16))
    assert cpu_kernels().tiles_bytes(kind, n_rows, 512) <= planned


def as_bytes(x):
    """What products take for ``x`` bfloat16 [n, K]: integers up to 127 times a factor for 256 columns, or the rest."""
    found = []
    for columns in x.float().split(256, dim=-1):
        largest = columns.abs().amax(dim=-1, keepdim=True)
        codes = (columns * torch.where(largest > 1e-35, torch.tensor(127.0) / largest, 0.0)).round()
        found.append(codes.double() * (largest / 127).double())
    return torch.cat(found, dim=-1)


def assert_products(found, x, w):
    """Codes of weights and products are exact: only scales and sums are rounded, and the result to bfloat16."""
    x = as_bytes(x)
    wanted = x @ w.double().t()
    # a weight is a code's product less a minimum or an offset, up to eleven times as large
    allowed = BFLOAT16 * wanted.abs() + 12 * product_error(x, w)
    assert bool(((found.double() - wanted).abs() <= allowed).all())


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    n_rows=st.integers(1, 70),
    rows=st.integers(1, 40),
    outlier=st.sampled_from([1.0, 1e3, 1e-37]),
    seed=st.integers(0, 99),
)
def test_products(kinds, n_rows, rows, outlier, seed):
    torch.manual_seed(seed)
    raws = [blocks(kind, n_rows, seed) for kind in kinds]
    product = TiledLinear(cpu_kernels(), [packed(BY_NAME[k], raw) for k, raw in zip(kinds, raws, strict=True)], 512)
    x = torch.randn(rows, 512)
    x[:, ::97] *= outlier
    x = x.bfloat16()
    found = product(x)
    assert found.shape == (rows, product.n_out)
    raws = zip(kinds, raws, strict=True)
    assert_products(found, x, torch.cat([dequantise(BY_NAME[k], raw, torch.float32) for k, raw in raws]))
    for row in range(rows):
        assert torch.equal(product(x[row : row + 1]), found[row : row + 1])


def test_products_of_very_many_rows_and_of_numbers_that_are_not_finite():
    """More rows than are taken at a time; a row of zeros, one of denormals."""
    kind, kernels = BY_NAME["Q5_1"], cpu_kernels()
    raw = torch.from_numpy(random_blocks(np.random.default_rng(0), "Q5_1", 48, 288))
    parts = [packed(kind, raw)]
    x = torch.randn(2100, 288).bfloat16()
    x[6], x[7], x[8, 3], x[9, 280], x[2090, 40] = 1e-39, 0.0, float("inf"), float("nan"), float("-inf")
    found = kernels.multiply(kernels.matrices(parts), x, 48)
    bad = [8, 9, 2090]
    assert not found[bad].isfinite().any()
    found[bad], x[bad] = 0.0, 0.0
    assert not found[6:8].any()
    assert_products(found, x, dequantise(kind, raw, torch.float32))


@pytest.mark.parametrize("n_rows", [96, 72])
def test_experts_whose_matrices_begin_with_tiles(n_rows, tmp_path):
    """Gate and up of one type, and of two; experts of another number of rows stay with torch."""
    raws = {name: blocks(kind, 3 * n_rows, 7) for name, kind in (("gate", "Q4_K"), ("up", "Q4_K"), ("other", "Q6_K"))}
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "qwen35moe")
    for name, raw in raws.items():
        kind = gguf.GGMLQuantizationType.Q6_K if name == "other" else gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(name, raw.view(3, n_rows, -1).numpy(), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    files = open_model([tmp_path / "experts.gguf"])
    kept = [
        TensorLayout(t.name, t.kind, t.shape, TensorRole.MATRIX, fmt, format_bytes(t.kind, t.shape, fmt))
        for t in files.tensors.values()
        for fmt in [weight_format(t.kind, t.shape, Backend.CPU, Dtype.BFLOAT16)]
    ]
    selector = KernelSelector(torch.device("cpu"), torch.bfloat16, limits=Handovers())
    weights = WeightLoader(files, kept, selector, lambda done, total: None)
    for names in (("gate", "up"), ("gate", "other"), ("other",)):
        experts = weights.experts(*names)
        assert (experts.n_experts, experts.n_out) == (3, len(names) * n_rows)
        x = torch.randn(5, 512).bfloat16()
        for e in range(3 if n_rows % 32 == 0 else 0):
            own = slice(e * n_rows, (e + 1) * n_rows)
            w = [dequantise(BY_NAME["Q6_K" if n == "other" else "Q4_K"], raws[n][own], torch.float32) for n in names]
            assert_products(experts.linear(e)(x), x, torch.cat(w))
    weights.close()
    tiled = ["tiles" in how for name, how in selector.selected.items() if "experts" in name]
    assert tiled == [n_rows % 32 == 0] * 2


@pytest.mark.parametrize("scratch", [1 << 24, 512 * 32])
def test_many_rows_on_a_cpu_with_amx(scratch, monkeypatch):
    """Weights are rounded to bfloat16 there, activations are not."""
    monkeypatch.setattr("daemons.ops.cpu.linear.SCRATCH_ELEMENTS", scratch)
    kinds = [BY_NAME["Q4_K"], BY_NAME["Q6_K"]]
    raws = [blocks(kind.name, 40) for kind in kinds]
    parts = [packed(k, raw) for k, raw in zip(kinds, raws, strict=True)]
    product = TiledLinear(cpu_kernels(), parts, 512, FEW_ROWS)
    w = torch.cat([dequantise(k, raw, torch.bfloat16) for k, raw in zip(kinds, raws, strict=True)])
    x = torch.randn(FEW_ROWS + 1, 512).bfloat16()
    wanted = x.double() @ w.double().t()
    assert bool(((product(x).double() - wanted).abs() <= BFLOAT16 * wanted.abs() + 2 * product_error(x, w)).all())
    assert torch.equal(product(x[1:]), TiledLinear(cpu_kernels(), parts, 512)(x[1:]))


@pytest.mark.parametrize("by_onednn", [False, True])
def test_this_cpu_decides_how_many_rows_are_multiplied_in_integers(by_onednn, monkeypatch):
    monkeypatch.setattr(cpu_kernels(), "many_by_onednn", by_onednn)
    tiles = packed(BY_NAME["Q4_K"], blocks("Q4_K", 40))
    product = KernelSelector(torch.device("cpu"), torch.bfloat16, limits=Handovers()).tiled_linear([tiles], 512)
    assert product.max_rows == (FEW_ROWS if by_onednn else ALL_ROWS)
    assert product.implementation == "tiles, c++ in integers" + " to 32 rows, bfloat16 onednn beyond" * by_onednn


@pytest.mark.parametrize(("n_rows", "n_out"), [(3, 300), (40, 300), (300, 40)])
def test_threads_change_no_number(n_rows, n_out):
    kind, x = BY_NAME["Q5_K"], torch.randn(n_rows, 512)
    product = TiledLinear(cpu_kernels(), [packed(kind, blocks("Q5_K", n_out))], 512)
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
