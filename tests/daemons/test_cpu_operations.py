"""A layer's operations in C++ beside torch's forms in float64, on the same bfloat16 numbers.

C++ computes in float32 and rounds its result to bfloat16 once.
"""

import ctypes
import os
import shutil

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gguf_writing import finish
from daemons.models.blocks import GatedDeltaNet, GatedDeltaNetShape, GatedDeltaNetWeights
from daemons.models.loader import WeightLoader
from daemons.ops.attention import attention, visible
from daemons.ops.basic import ACTIVATIONS, RmsNorm, plain_rope, rotate, shift_rows
from daemons.ops.cpu import compiler
from daemons.ops.cpu.library import KINDS, CpuKernels, Tiles, cpu_kernels
from daemons.ops.cpu.linear import FEW_ROWS, TiledLinear
from daemons.ops.cpu.operations import CpuOperations
from daemons.ops.kernel_thresholds import KernelThresholds
from daemons.ops.linear import DenseLinear
from daemons.ops.operations import MAX_DECODE_TOKENS, DeltaNetPools, GatedDeltaNetParams, PagedQuery, TorchOperations
from daemons.ops.paged import DensePages, Q8Pages
from daemons.ops.selection import KernelSelector
from daemons.ops.topk import Candidates, select_path
from daemons.weights.dequant import dequantise
from lucevisor.model.gguf_files import open_model
from lucevisor.model.quant_types import BY_NAME, format_bytes, weight_format
from lucevisor.model.spec import update_width
from lucevisor.model.values import Q8_GROUP, Backend, Dtype
from lucevisor.model.weight_layout import TensorLayout, TensorRole
from tests.combinations import slow
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.tiny_models import random_blocks
from tests.kernels.delta_layers import make_states
from tests.numerics import BFLOAT16, UNIT, Exact, product_error

pytestmark = needs_cpu_kernels
CPU = torch.device("cpu")
NO_SPANS = torch.empty(0, 2, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(1)


@pytest.fixture
def cpu():
    return CpuOperations(cpu_kernels())


def assert_rounded(found, wanted, slack=64):
    """``found`` is ``wanted`` rounded to bfloat16, within some units of float32 of the largest number."""
    assert found.dtype == torch.bfloat16
    assert found.shape == wanted.shape
    allowed = BFLOAT16 * wanted.abs() + slack * UNIT * wanted.abs().max()
    assert bool(((found.double() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("shape", [(1, 40), (5, 512), (3, 4, 24), (2, 3, 2, 16)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(cpu, shape, has_weight):
    width = shape[-1]
    x, weight = torch.randn(*shape[:-1], 3 * width).bfloat16()[..., :width], torch.randn(width) if has_weight else None
    norm = cpu.norm(weight, width, 1e-6)
    wanted = RmsNorm(weight, width, 1e-6, CPU)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = exact if weight is None else exact * weight.double()
    assert_rounded(norm(x), exact)
    torch.testing.assert_close(norm.float32(x), wanted.float32(x), rtol=1e-6, atol=1e-6)
    if len(shape) == 2:
        delta = torch.randn(shape).bfloat16()
        total, normed = norm.fused_add(x, delta)
        assert torch.equal(total, x + delta)
        assert torch.equal(normed, norm(total))
    assert torch.equal(norm(x.float()), wanted(x.float()))


@pytest.mark.parametrize(("heads", "width", "n_rotary"), [(6, 64, 64), (3, 40, 12), (2, 32, 16)])
def test_queries_and_keys_are_normed_and_rotated(cpu, heads, width, n_rotary):
    x = torch.randn(5, heads * width + 10).bfloat16()[:, : heads * width].view(5, heads, width)
    weight, rope = torch.randn(heads, width), plain_rope(n_rotary, 10000.0, CPU)
    tables = rope.tables(torch.tensor([0, 5, 1000, 7, 64]))
    found = cpu.qk_norm_rope(x, cpu.norm(weight, width, 1e-6), *tables)
    with Exact():
        exact = rotate(RmsNorm(weight, width, 1e-6).float32(x.float()), *tables)
    assert_rounded(found, exact.double())


def test_add_bias(cpu):
    x, biases = torch.randn(3, 40).bfloat16(), torch.randn(4, 40).bfloat16()
    for bias, ids in ((biases[0], None), (biases, torch.tensor([2, 0, 2]))):
        assert_rounded(cpu.add_bias(x, bias, ids), TorchOperations().add_bias(x.double(), bias.double(), ids))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(cpu, activation):
    x = torch.randn(3, 2 * 56).mul(4).bfloat16()
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    assert_rounded(cpu.act_and_mul(x, activation), TorchOperations().act_and_mul(x.double(), activation))
    with pytest.raises(ValueError, match="relu"):
        cpu.act_and_mul(x, "relu")


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("by_head", [True, False])
def test_output_gates(cpu, softplus, by_head):
    x, n = torch.randn(3, 4, 24).bfloat16(), 4 if by_head else 96
    gate = torch.randn(3, 200).mul(5).bfloat16()[:, 7 : 7 + n]
    g = gate.double()
    factor = torch.nn.functional.softplus(g) if softplus else torch.sigmoid(g)
    assert_rounded(cpu.output_gate(x, gate, softplus), (x.double() * factor.view(3, 4, -1)).reshape(3, -1))


# ---- attention

PAGES, TABLE = 40, 24


def pages_of(kind, k_heads, width):
    if kind == "q8_0":
        padded = -(-width // Q8_GROUP) * Q8_GROUP
        codes = torch.zeros(PAGES, 64, k_heads, padded, dtype=torch.int8)
        pages = Q8Pages(codes, torch.zeros(PAGES, 64, k_heads, padded // Q8_GROUP, dtype=torch.float16), width)
    else:
        pages = DensePages(torch.zeros(PAGES, 64, k_heads, width, dtype=kind))
    pages.write(torch.arange(PAGES * 64), torch.randn(PAGES * 64, k_heads, width))
    return pages


def gathered(pages, table, length, width):
    """[1, length, K, D] of float64"""
    if isinstance(pages, Q8Pages):
        x = pages.codes.double().unflatten(-1, (-1, Q8_GROUP)) * pages.scales.double().unsqueeze(-1)
        x = x.flatten(-2)[..., :width]
    else:
        x = pages.pages.double()
    return x[table.long()].flatten(0, 1)[:length].unsqueeze(0)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([torch.bfloat16, torch.float32, torch.float16, "q8_0"]),
    heads=st.sampled_from([(4, 2), (2, 2), (6, 1)]),
    width=st.sampled_from([64, 40, 8]),
    n=st.integers(1, 32),
    starts=st.lists(st.integers(0, 1300), min_size=1, max_size=3),
    window=st.sampled_from([0, 0, 5, 100]),
    softcap=st.sampled_from([0.0, 3.0]),
    causal=st.booleans(),
    lows=st.booleans(),
    sinks=st.booleans(),
)
def test_attention_over_pages(kind, heads, width, n, starts, window, softcap, causal, lows, sinks):
    torch.manual_seed(2)
    h, k = heads
    keys, values = pages_of(kind, k, width), pages_of(kind, k, width)
    tables = torch.stack([torch.randperm(PAGES)[:TABLE] for _ in range(4)]).int()
    rows, first = torch.tensor([3, 0, 2][: len(starts)]), torch.tensor(starts)
    bounds = first // 2 if lows else None
    q = torch.randn(len(starts) * n, h + 1, width).bfloat16()[:, :h]
    sinks = torch.linspace(-2, 2, h) if sinks else None
    attend = CpuOperations(cpu_kernels()).paged_attention(
        window=window, scale=0.3, softcap=softcap, causal=causal, sinks=sinks
    )
    found = attend(q, keys, values, PagedQuery(tables, rows, first, n, 2048, bounds))
    for b, start in enumerate(starts):
        length, mine = start + n, slice(b * n, b * n + n)
        kk, vv = (gathered(p, tables[rows[b]], length, width) for p in (keys, values))
        at = torch.arange(start, length)[None]
        mask = visible(at, torch.arange(length)[None], window, causal, None if bounds is None else bounds[b : b + 1])
        with Exact():
            exact = attention(q[mine].double()[None], kk, vv, mask, scale=0.3, softcap=softcap, sinks=sinks)[0]
        assert_rounded(found[mine], exact.double(), slack=512)
    if causal:  # a row alone has the same bits
        alone = PagedQuery(tables, rows[:1], first[:1] + n - 1, 1, 2048, None if bounds is None else bounds[:1])
        assert torch.equal(attend(q[n - 1 : n], keys, values, alone), found[n - 1 : n])


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([torch.bfloat16, torch.float32, torch.float16, "q8_0"]),
    width=st.sampled_from([64, 40, 8, 16]),
    n=st.integers(1, 9),
    size=st.sampled_from([0.0, 1e-7, 1.0, 3e4]),
)
def test_keys_and_values_are_written_with_the_bits_of_torch(kind, width, n, size):
    torch.manual_seed(4)
    k, v = (torch.randn(n, 5, width).mul(size).bfloat16()[:, 1:3] for _ in range(2))
    slots = torch.randperm(PAGES * 64)[:n]
    found, wanted = ([pages_of(kind, 2, width) for _ in range(2)] for _ in range(2))
    for mine, theirs in zip(found, wanted, strict=True):
        for part in ("codes", "scales") if kind == "q8_0" else ("pages",):
            getattr(mine, part).copy_(getattr(theirs, part))
    CpuOperations(cpu_kernels()).write_pages(*found, slots, k, v)
    TorchOperations().write_pages(*wanted, slots, k, v)
    for mine, theirs in zip(found, wanted, strict=True):
        if kind == "q8_0":
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scales, theirs.scales)
        else:
            assert torch.equal(mine.pages, theirs.pages)


@pytest.mark.parametrize("shape", [(1, 40), (5, 512), (70, 500)])
def test_sums_and_joined_rows_have_the_bits_of_torch(cpu, shape):
    x, y = (torch.randn(shape).bfloat16() for _ in range(2))
    assert torch.equal(cpu.add(x, y), x + y)
    parts = [x, y[:, 3:20], x[:, :1]]
    assert torch.equal(cpu.concatenate(parts), torch.cat(parts, dim=-1))
    assert torch.equal(cpu.concatenate([x.float(), x.float()]), torch.cat([x.float(), x.float()], dim=-1))


# ---- drafters


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), n=st.integers(1, 900), k=st.integers(1, 40), equal=st.booleans())
def test_the_best_logits_are_those_of_torch(rows, n, k, equal):
    torch.manual_seed(n)
    k = min(k, n)
    x = torch.randint(0, 9, (rows, n)).float() if equal else torch.randperm(rows * n).view(rows, n).float() - n
    best, tokens = CpuOperations(cpu_kernels()).top_k(x, k)
    assert torch.equal(best, x.topk(k, dim=-1).values)
    assert torch.equal(x.gather(1, tokens), best)
    assert all(len({*row}) == k for row in tokens.tolist())
    found, probabilities = CpuOperations(cpu_kernels()).most_likely(x / 8)
    assert torch.equal(found, x.argmax(dim=-1))
    wanted = (x / 8).double().softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(probabilities.double(), wanted, rtol=1e-5, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(b=st.integers(1, 3), n=st.integers(1, 7), k=st.integers(1, 20), rank=st.sampled_from([16, 40, 64]))
def test_a_path_along_candidates(b, n, k, rank):
    torch.manual_seed(b + 10 * n + 100 * k)
    best, tokens = torch.randn(b, n, k), torch.randint(0, 8192, (b, n, k))
    first, before, after, gate = (
        torch.randn(shape).bfloat16() for shape in ((b, rank), (b, n, k, rank), (b, n, k, rank), (b, n, rank))
    )
    c = Candidates(best, tokens, first, before, after, gate)
    found, probabilities = CpuOperations(cpu_kernels()).select_path(c)
    wanted, exact = select_path(c)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(probabilities, exact, rtol=1e-4, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(b=st.integers(1, 3), n=st.integers(1, 9), width=st.sampled_from([8, 100]), seed=st.integers(0, 99))
def test_rows_move_down_and_are_kept(b, n, width, seed):
    torch.manual_seed(seed)
    x, pool = torch.randn(b, n, width), torch.randn(b * (n + 1) + 5, width)
    rows = torch.randperm(len(pool))[: b * (n + 1)].view(b, n + 1)
    ids, kept = rows[:, 0].contiguous(), rows[:, 1:].contiguous()
    kept[:, :-1] = torch.where(torch.rand(b, n - 1) < 0.5, -1, kept[:, :-1])
    ids[0] = kept[0, -1]  # in place
    found_pool, wanted_pool = pool.clone(), pool.clone()
    assert torch.equal(
        CpuOperations(cpu_kernels()).shift_rows(x, found_pool, ids, kept), shift_rows(x, wanted_pool, ids, kept)
    )
    assert torch.equal(found_pool, wanted_pool)


# ---- gated delta net


@pytest.mark.parametrize(("n_key", "n_value", "dim"), [(1, 2, 16), (2, 4, 32), (2, 2, 64), (1, 1, 128)])
@pytest.mark.parametrize("n", [1, 4, 16, 37])
def test_delta_net_writes_the_state_after_each_token(cpu, n_key, n_value, dim, n):
    """Of long slices the last one, in place; of tokens that all have a row what each does to it."""
    width, slices, states = 4, 2, 60
    norm = cpu.norm(torch.rand(dim) + 0.5, dim, 1e-6)
    channels = (2 * n_key + n_value) * dim
    params = GatedDeltaNetParams(
        n_key, n_value, dim, torch.randn(width, channels), -torch.rand(n_value), torch.randn(n_value), norm
    )
    pool = torch.randn(states, width - 1, channels), torch.randn(states, n_value, dim, dim) * 0.3
    y = torch.randn(slices * n, params.columns + 6).bfloat16()[:, : params.columns]
    ids = torch.tensor([3, 9])
    if is_long := n > MAX_DECODE_TOKENS:
        kept = torch.full((slices, n), -1)
        kept[:, -1] = ids
    else:
        kept = torch.arange(10, 10 + slices * n).view(slices, n)
        kept[0, -1] = 3  # in place
        if n > 1:
            kept[1, 0] = -1
    updates = torch.full((states, update_width(n_key, n_value, dim)), torch.nan)
    found_pool = DeltaNetPools(*(x.clone() for x in pool), updates)
    found = cpu.gated_delta_net(params)(y, found_pool, ids, kept[:, :0] if is_long else kept, NO_SPANS)
    reference = DeltaNetPools(*(x.clone() for x in found_pool))
    for pools, operations in ((found_pool, cpu), (reference, TorchOperations())):
        make_states(pools, ids.tolist(), kept, operations)
    torch.testing.assert_close(found_pool.states, reference.states, rtol=1e-5, atol=1e-6)

    shape = GatedDeltaNetShape(n_key, n_value, dim)
    plain = RmsNorm(norm.weight, dim, 1e-6)
    weights = GatedDeltaNetWeights(
        DenseLinear(torch.empty(0, 0)), DenseLinear(torch.empty(0, 0)), params.conv_weight, params.decay_rates,
        params.dt_bias, plain,
    )  # fmt: skip
    for b in range(slices):
        with Exact():
            mine = [x[ids[b]].unsqueeze(0) * 1.0 for x in pool]
            block = GatedDeltaNet(shape, weights, *mine, updates, TorchOperations())
        for token in range(n):
            row = b * n + token
            with Exact():
                exact = block._mix(OneState(), y[row].float().view(1, 1, -1))
            assert_rounded(found[row], exact.double().flatten(), slack=1024)
            target = int(kept[b, token])
            if target >= 0:
                for x, wanted in zip(found_pool[:2], mine, strict=True):
                    difference = (x[target].double() - wanted[0].double()).abs().max()
                    assert difference <= 512 * UNIT * float(wanted.abs().max())
    untouched = [i for i in range(states) if i not in {*kept.flatten().tolist()}]
    assert all(torch.equal(x[untouched], before[untouched]) for x, before in zip(found_pool[:2], pool, strict=True))

    again = DeltaNetPools(*(x.clone() for x in pool), updates)
    net = cpu.gated_delta_net(params)
    at = ids.clone()
    for token in range(n):  # one by one: the same bits
        out = net(y.view(slices, n, -1)[:, token], again, at, torch.tensor([[20], [21]]), NO_SPANS)
        assert torch.equal(out, found.view(slices, n, -1)[:, token])
        at = torch.tensor([20, 21])


class OneState:
    """A group of one token of one slice, whose state is the pool's only row."""

    n_slices = n_tokens = 1
    n_states = offset = 0
    is_padded = False

    def load_state(self, pool):
        return pool

    def store_state(self, pool, value):
        pool.copy_(value)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("rows", "n", "width", "taps", "group"), [(16, 8, 64, 2, 16), (3, 1, 96, 2, 32), (8, 4, 96, 6, 96)]
)
def test_block_convolution(cpu, rows, n, width, taps, group, side):
    x, delta = torch.randn(rows, width).bfloat16(), torch.randn(rows, 2 * taps * width // group).bfloat16()
    base = torch.randn(2, taps, width)
    with Exact():
        wanted = TorchOperations().block_convolution(x.double(), delta.double(), base.double(), side, n)
    assert_rounded(cpu.block_convolution(x, delta, base, side, n), wanted)


# ---- C++ kernels against float64 and torch


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


@pytest.mark.parametrize("architecture", ["x86-64-v3", "sapphirerapids", slow("alderlake"), slow("icelake-server")])
def test_kernels_compile_for_every_width(tmp_path, architecture):
    whole = tmp_path / "all.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in compiler.SOURCES.glob("*.cpp")))
    found = next(filter(None, map(shutil.which, compiler._compilers())))
    flags = [*compiler.FLAGS, f"-march={architecture}", "-Werror=return-type", "-fsyntax-only"]
    compiler._run([found, *flags, str(whole)])


@pytest.mark.slow
def test_the_same_numbers_where_a_hypervisor_hides_vnni(tmp_path, monkeypatch):
    found = next(filter(None, map(shutil.which, compiler._compilers())))
    library = tmp_path / "kernels.so"
    compiler._compile(found, library, [*compiler.FLAGS, "-mno-avx512vnni", "-mno-avxvnni", "-O0"])
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


def as_bytes(kind, x):
    """What products take for ``x`` bfloat16 [n, K]: integers up to 127 times a factor for the columns of a block."""
    found = []
    for columns in x.float().split(kind.block_elements, dim=-1):
        largest = columns.abs().amax(dim=-1, keepdim=True)
        codes = (columns * torch.where(largest > 1e-35, torch.tensor(127.0) / largest, 0.0)).round()
        found.append(codes.double() * (largest / 127).double())
    return torch.cat(found, dim=-1)


def assert_products(kind, found, x, w):
    """Codes of weights and products are exact: only scales and sums are rounded, and the result to bfloat16."""
    x = as_bytes(kind, x)
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
    exact = product.in_float32(x)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), found)
    for name, raw, part in zip(kinds, raws, found.split(n_rows, dim=-1), strict=True):
        assert_products(BY_NAME[name], part, x, dequantise(BY_NAME[name], raw, torch.float32))
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
    assert_products(kind, found, x, dequantise(kind, raw, torch.float32))


@pytest.mark.parametrize("n_rows", [96, 72])
def test_experts_whose_matrices_begin_with_tiles(n_rows, tmp_path):
    """Gate and up of one type, and of two; experts of another number of rows stay with torch."""
    raws = {name: blocks(kind, 3 * n_rows, 7) for name, kind in (("gate", "Q4_K"), ("up", "Q4_K"), ("other", "Q6_K"))}
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "qwen35moe")
    for name, raw in raws.items():
        kind = gguf.GGMLQuantizationType.Q6_K if name == "other" else gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(name, raw.view(3, n_rows, -1).numpy(), raw_dtype=kind)
    finish(writer)
    files = open_model([tmp_path / "experts.gguf"])
    kept = [
        TensorLayout(t.name, t.kind, t.shape, TensorRole.MATRIX, fmt, format_bytes(t.kind, t.shape, fmt))
        for t in files.tensors.values()
        for fmt in [weight_format(t.kind, t.shape, Backend.CPU, Dtype.BFLOAT16)]
    ]
    selector = KernelSelector(torch.device("cpu"), torch.bfloat16, limits=KernelThresholds())
    weights = WeightLoader(files, kept, selector, lambda done, total: None)
    for names in (("gate", "up"), ("gate", "other"), ("other",)):
        experts = weights.experts(*names)
        assert (experts.n_experts, experts.n_out) == (3, len(names) * n_rows)
        x = torch.randn(5, 512).bfloat16()
        for e in range(3 if n_rows % 32 == 0 else 0):
            own = slice(e * n_rows, (e + 1) * n_rows)
            w = [dequantise(BY_NAME["Q6_K" if n == "other" else "Q4_K"], raws[n][own], torch.float32) for n in names]
            assert_products(BY_NAME["Q4_K"], experts.linear(e)(x), x, torch.cat(w))
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
    with pytest.raises(compiler.CpuCompileError, match="the cpu lacks f16c, fma"):
        compiler.load()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(compiler.CpuCompileError, match=r"no C\+\+ compiler: install g\+\+"):
        compiler.load()
