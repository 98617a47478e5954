"""Linear layers and experts with packed weights match those with quant blocks, and take the planned bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from daemons.device import CPU
from daemons.models.loader import Rows, WeightLoader
from daemons.ops import packed_linear
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import BlockExperts, ConcatExperts
from daemons.ops.linear import QuantTable
from daemons.ops.moe import ExpertMlp
from daemons.ops.operations import TorchOperations
from daemons.ops.packed_linear import PackedExperts, PackedLinear, PackedTable
from daemons.ops.selection import KernelSelector
from daemons.ops.triton import gemv, gemv_float16
from daemons.ops.triton.gemv import MAX_GEMV_ROWS
from daemons.ops.triton.split_k import GemvConfig
from daemons.weights.dequant import dequantise
from daemons.weights.packed import repack, unpack
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import BY_NAME, REPACKED, GgmlType
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import shard_layouts
from tests.daemons.tiny_models import Tiny, random_blocks, write
from tests.families.test_weight_formats import spec_of, with_formats_of
from tests.kernels.gemv_error import assert_gemm, assert_gemv
from tests.kernels.limits import UNITS
from tests.kernels.matrices import SHORT
from tests.numerics import Exact, Narrow

__all__ = ["spec_of"]  # a fixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
KINDS = sorted(REPACKED)
of_kinds = pytest.mark.parametrize("kind", KINDS)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

of_each = pytest.mark.parametrize(
    ("kind", "dtype"),
    [(k, d) for i, k in enumerate(KINDS) for d in (DTYPES if DEVICE == "cuda" else [DTYPES[i % 2]])],
    ids=lambda v: str(v).removeprefix("torch."),
)


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter's time goes by programs, not by their size."""
    if DEVICE == "cpu":
        for module in (gemv, gemv_float16):
            monkeypatch.setattr(
                module, "gemv_config", lambda tile, deep, n_out, n_chunks, device: GemvConfig(512, 4, 1, 1)
            )


def blocks(kind: str, n: int, k: int) -> tuple[GgmlType, Tensor]:
    raw = random_blocks(np.random.default_rng(n + k), kind, n, k)
    return BY_NAME[kind], torch.from_numpy(raw).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- one matrix


@of_each
def test_gemv_and_gemm(kind, dtype, few_programs):
    type_, raw = blocks(kind, 13, 256)
    product = PackedLinear(repack(type_, raw), 256)
    assert (product.n_out, product.n_bytes) == (13, raw.nbytes // 13 * 16)
    x = normal(MAX_GEMV_ROWS + 1, 256, dtype=dtype)
    assert_gemv(product(x[:MAX_GEMV_ROWS]), x[:MAX_GEMV_ROWS], type_, raw)
    assert_gemm(product(x), x, dequantise(type_, raw, torch.float32))


@pytest.mark.parametrize("at_a_time", [1, 8, 9])
def test_large_matrices_are_dequantised_in_parts(at_a_time, monkeypatch):
    type_, raw = blocks("Q8_0", 17, 256)
    product = PackedLinear(repack(type_, raw), 256)
    x = normal(MAX_GEMV_ROWS + 1, 256)
    monkeypatch.setattr(packed_linear, "rows_at_a_time", lambda n_columns: at_a_time)
    seen = []
    real = packed_linear.dequantise_packed
    monkeypatch.setattr(packed_linear, "dequantise_packed", lambda *a: seen.append(a[-1]) or real(*a))
    assert_gemm(product(x), x, dequantise(type_, raw, torch.float32))
    assert sum(seen) == 17
    assert max(seen) == at_a_time


def test_columns_of_a_wider_input(few_programs):
    type_, raw = blocks("Q4_K", 21, 256)
    product = PackedLinear(repack(type_, raw), 256)
    wide = normal(MAX_GEMV_ROWS + 1, 400)
    few, many = wide[:3, 100:356], wide[:, 100:356]
    assert torch.equal(product(few), product(few.contiguous()))
    assert_gemm(product(many), many, dequantise(type_, raw, torch.float32))
    assert product(wide[:1, 100:356]).shape == (1, 21)


# ---- experts


class Both(NamedTuple):
    """The same experts as packed weights and as blocks."""

    packed: PackedExperts
    blocks: BlockExperts


def experts_of(kind: str, n_experts: int, n: int, k: int) -> Both:
    type_, raw = blocks(kind, n_experts * n, k)
    packed = repack(type_, raw.view(n_experts, n, -1))
    return Both(PackedExperts(packed, k), BlockExperts(type_, raw.view(n_experts, n, -1), k))


def assert_routed(found: Tensor, x: Tensor, chosen: Tensor, experts: BlockExperts) -> None:
    """Row p of ``found`` is the product of row p // 2 of ``x`` with the matrix of the expert chosen[p]."""
    for p, expert in enumerate(chosen.tolist()):
        assert_gemv(found[p : p + 1], x[p // 2 : p // 2 + 1], experts.kind, experts.raw[expert])


@of_each
def test_experts_packed_and_as_blocks(kind, dtype, few_programs):
    a, b = experts_of(kind, 4, 12, 256)
    assert (a.n_experts, a.n_out, a.n_elements) == (b.n_experts, b.n_out, b.n_elements)
    assert a.n_bytes == b.n_bytes // 12 * 16
    x, chosen = normal(2, 256, dtype=dtype), torch.tensor([2, 0, 3, 2], device=DEVICE)
    assert torch.equal(a.dequantised(chosen[1:], dtype), b.dequantised(chosen[1:], dtype))
    assert_routed(a.grouped_gemm(x, ExpertPairs(chosen, 4), 2), x, chosen, b)
    assert_gemv(a.linear(2)(x), x, b.kind, b.raw[2])
    numbers = b.dequantised(chosen, torch.float32)
    pairs = x.repeat_interleave(2, dim=0).unsqueeze(1)
    assert_gemm(b.grouped_gemm(x, ExpertPairs(chosen, 4), 2).unsqueeze(1), pairs, numbers)
    assert_gemm(b.linear(2)(x), x, numbers[0])


def explained(form: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, float]:
    """What ``form`` gives exactly, and the norm of the error that rounding weights and results to the dtype of ``x``
    makes of it: the worst of three runs, and a quarter more, as it is an estimate."""

    def run(*options: Any) -> Tensor:
        with Exact(*options):
            return form(x.double())

    exact, narrow = run(), Narrow(UNITS[x.dtype])
    return exact, 1.25 * max(float((run(seed, narrow) - exact).norm()) for seed in range(3))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_forms_of_an_expert_mlp(dtype, few_programs):
    up, down = experts_of("Q8_0", 3, 512, 256), experts_of("Q4_K", 3, 24, 256)
    mlp = ExpertMlp(up.packed, down.packed, "silu", TorchOperations())
    plain = ExpertMlp(up.blocks, down.blocks, "silu", TorchOperations())
    x, chosen = normal(3, 256, dtype=dtype), torch.tensor([[2, 0], [0, 2], [2, 0]], device=DEVICE)
    exact, allowed = explained(lambda x: plain.per_expert(x, chosen), x)
    for way in (mlp.per_expert, mlp.grouped, mlp.batched):
        assert float((way(x, chosen).double() - exact).norm()) <= allowed


def test_experts_of_two_types(few_programs):
    (a, a_blocks), (b, b_blocks) = experts_of("Q6_K", 3, 8, 256), experts_of("Q4_0", 3, 5, 256)
    joined, wanted = ConcatExperts([a, b]), ConcatExperts([a_blocks, b_blocks])
    x, chosen = normal(2, 256), torch.tensor([1, 2, 2, 0], device=DEVICE)
    assert joined.max_async_pairs == PackedExperts.max_async_pairs > wanted.max_async_pairs
    found = joined.grouped_gemm(x, ExpertPairs(chosen, 3), 2)
    assert_routed(found[:, :8].contiguous(), x, chosen, a_blocks)
    assert_routed(found[:, 8:].contiguous(), x, chosen, b_blocks)


# ---- lookups


@of_dtypes
@of_kinds
def test_rows_of_a_table_are_the_same_bits(kind, dtype):
    type_, raw = blocks(kind, 50, 512)
    ids = torch.tensor([7, 0, 49, 7, 13], device=DEVICE)
    a, b = PackedTable(repack(type_, raw), 512, dtype), QuantTable(type_, raw, dtype)
    assert a.n_bytes == b.n_bytes // 50 * 64
    for some in (ids, ids[:1], ids.repeat(3), ids[1::2]):
        assert a(some).dtype == dtype
        assert torch.equal(a(some), b(some))


@pytest.mark.parametrize("kind", SHORT)
def test_rows_of_a_table_have_no_padding(kind):
    type_, raw = blocks(kind, 20, 352)
    ids = torch.tensor([19, 3], device=DEVICE)
    found = PackedTable(repack(type_, raw), 352, torch.float32)(ids)
    assert found.is_contiguous()
    assert torch.equal(found, QuantTable(type_, raw, torch.float32)(ids))


# ---- loading


def weights_of(path, kept) -> WeightLoader:
    return WeightLoader(
        open_spec(path).files, kept, KernelSelector(CPU, torch.float32, kernels=True), lambda done, total: None
    )


@of_kinds
def test_packed_weights_are_read_chunk_by_chunk(kind, tmp_path, monkeypatch):
    """Ranges of rows in the order asked for; the packed weights hold the file's bytes, and no more than was planned."""
    monkeypatch.setattr("daemons.models.loader.BATCH_BYTES", 3000)
    path = write(tmp_path / "model.gguf", Tiny(n_layers=2), [kind])
    spec = open_spec(path)
    kept = shard_layouts(
        spec, LayerRange(0, 1), embedding=False, output=False, backend=Backend.CUDA, dtype=Dtype.FLOAT32
    )
    gate, up = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"
    weights = weights_of(path, kept)
    product = weights.linear(gate, up)
    weights.close()
    stored = {t.name: torch.from_numpy(np.array(t.data)) for t in gguf.GGUFReader(path).tensors if t.name in (gate, up)}
    assert isinstance(product, PackedLinear)
    found = unpack(product.packed, product.n_columns)
    assert torch.equal(found, torch.cat([stored[gate], stored[up]]))
    assert product.n_bytes == weights.n_bytes == sum(r.n_bytes for r in kept if r.name in (gate, up))
    weights = weights_of(path, kept)
    product = weights.linear(Rows(gate, ((10, 12), (0, 3))), Rows(up))
    weights.close()
    wanted = torch.cat([stored[gate][10:12], stored[gate][0:3], stored[up]])
    assert torch.equal(unpack(product.packed, product.n_columns), wanted)


def test_a_tied_output_matrix_is_held_once(tmp_path):
    path = write(tmp_path / "model.gguf", Tiny(n_layers=2), ["Q6_K"])
    spec = open_spec(path)
    kept = shard_layouts(spec, LayerRange(0, 2), embedding=True, output=True, backend=Backend.CUDA, dtype=Dtype.FLOAT32)
    weights = weights_of(path, kept)
    table, head = weights.table("token_embd.weight"), weights.linear("token_embd.weight")
    weights.close()
    assert isinstance(table, PackedTable)
    assert isinstance(head, PackedLinear)
    assert table.packed is head.packed
    assert weights.n_bytes == head.n_bytes == sum(r.n_bytes for r in kept if r.name == "token_embd.weight")


def test_a_model_takes_its_planned_bytes(spec_of):
    """Asserted where it is loaded, for experts, a head and matrices of several types."""
    stages = with_formats_of(spec_of("qwen35moe", "k"), Backend.CUDA, kernels=True)
    chosen = [v for k, v in stages[0].kernels.items() if "linear Q" in k or "experts Q" in k]
    assert chosen
    assert all(form.startswith("packed, ") for form in chosen)
