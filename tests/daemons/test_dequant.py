"""Block formats against gguf-py's own dequantisation, on random bytes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gguf_writing import finish
from daemons.device import CPU
from daemons.errors import LoadError
from daemons.models.loader import HALVES, Rows, WeightLoader, any_invalid
from daemons.ops.selection import KernelSelector
from daemons.weights.dequant import dequantise, four_bit
from daemons.weights.packed import empty_packed, repack, tile_bytes, unpack
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.quant_types import BY_NAME, NATIVE, REPACKED, WeightFormat, format_bytes
from lucevisor.model.values import Backend, Dtype
from lucevisor.model.weight_layout import TensorLayout, TensorRole, tensor_format
from tests.daemons.test_loading import make_shard
from tests.daemons.tiny_models import Tiny, random_blocks, write
from tests.numerics import UNIT, product_error

KINDS = ["F32", "F16", "BF16", *sorted(NATIVE)]


def oracle(kind: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # random scales are NaN and infinite at times
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 3), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 32))
def test_any_bytes_give_the_reference_bits(kind, rows, blocks, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * BY_NAME[kind].block_bytes), dtype=np.uint8)
    wanted = oracle(kind, raw)
    found = dequantise(BY_NAME[kind], torch.from_numpy(raw), torch.float32).numpy()
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)  # NaN equals NaN here


@pytest.mark.parametrize("kind", sorted(NATIVE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_number(kind, dtype):
    raw = torch.from_numpy(random_blocks(np.random.default_rng(4), kind, 3, 512))
    assert torch.equal(dequantise(BY_NAME[kind], raw, dtype), dequantise(BY_NAME[kind], raw, torch.float32).to(dtype))


def test_other_types_are_read_by_the_library():
    raw = np.random.default_rng(1).integers(0, 256, (2, 2 * BY_NAME["NVFP4"].block_bytes), dtype=np.uint8)
    found = dequantise(BY_NAME["NVFP4"], torch.from_numpy(raw), torch.float32).numpy()
    np.testing.assert_array_equal(found, oracle("NVFP4", raw))


def test_a_type_nobody_reads_is_refused():
    with pytest.raises(NotImplementedError):
        dequantise(BY_NAME["Q8_K"], torch.zeros(1, 292, dtype=torch.uint8), torch.float32)


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(["Q4_0", "Q4_1", "Q4_K"]), seed=st.integers(0, 1 << 32))
def test_four_bit_groups_are_the_same_numbers(kind, seed):
    raw = random_blocks(np.random.default_rng(seed), kind, 4, 512)
    codes, scale, zero = four_bit(BY_NAME[kind], torch.from_numpy(raw))
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 16
    numbers = (codes.view(4, -1, 32).float() - 8) * scale.unsqueeze(-1) + zero.unsqueeze(-1)
    # three roundings here and three there, none of a number larger than 16 scales and a zero
    allowed = 6 * UNIT * (16 * scale.abs() + zero.abs()).unsqueeze(-1).expand_as(numbers).reshape(4, -1).numpy()
    assert (np.abs(numbers.reshape(4, -1).numpy() - oracle(kind, raw)) <= allowed).all()


# ---- packed weights


PACKED_KINDS = sorted(REPACKED)
SHORT = sorted(name for name in REPACKED if BY_NAME[name].block_elements == 32)
"""Types whose rows may end within a chunk."""


def raw_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(random_blocks(np.random.default_rng(5), kind, rows, columns))


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_any_bytes_come_back(kind, rows):
    type_ = BY_NAME[kind]
    n_bytes = 3 * 256 // type_.block_elements * type_.block_bytes
    raw = torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, n_bytes), dtype=np.uint8))
    packed = repack(type_, raw)
    assert packed.nbytes == -(-rows // 16) * 16 * n_bytes == format_bytes(type_, (rows, 768), WeightFormat.PACKED)
    assert packed.tiles.shape[-1] == tile_bytes(kind)
    assert torch.equal(unpack(packed, 3 * 256), raw)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(packed.blocks(ids, 3 * 256), raw[ids])


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("columns", [32, 352, 704])
def test_rows_that_end_within_a_chunk_are_filled_up(kind, columns):
    type_ = BY_NAME[kind]
    raw = raw_of(kind, 3, columns)
    packed = repack(type_, raw)
    assert torch.equal(unpack(packed, columns), raw)
    filled = torch.zeros(3, packed.nbytes // 16, dtype=torch.uint8)
    filled[:, : raw.shape[1]] = raw
    assert torch.equal(unpack(packed, packed.n_chunks * 256), filled)
    assert packed.nbytes == format_bytes(type_, (3, columns), WeightFormat.PACKED)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_rows_are_repacked_by_themselves(kind):
    """In any order and any number, and of several matrices in a row."""
    raw = raw_of(kind, 60, 512)
    packed = empty_packed(BY_NAME[kind], 20, 512, raw.device, 3)
    for start, stop in ((30, 60), (0, 7), (7, 30)):
        packed.write(start, raw[start:stop])
    assert torch.equal(unpack(packed, 512), raw)
    for i in range(3):
        assert torch.equal(unpack(packed.matrix(i), 512), raw[20 * i : 20 * i + 20])
    whole = repack(BY_NAME[kind], raw.view(3, 20, -1))
    assert torch.equal(whole.tiles[:, 0], packed.tiles[:, 0])
    assert whole.nbytes == format_bytes(BY_NAME[kind], (3, 20, 512), WeightFormat.PACKED)


# ---- weights with NaN or infinite numbers


INVALID = {"F32": (0x7F800000, 0x7FC00000), "BF16": (0x7F80, 0xFFC0)}  # infinity and NaN; float16 by default


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *sorted(NATIVE - {"MXFP4"})])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 4))
def test_blocks_are_invalid_where_the_reference_gives_numbers_that_are_not_finite(kind, seed, blocks):
    raw = np.random.default_rng(seed).integers(0, 256, (2, blocks * BY_NAME[kind].block_bytes), dtype=np.uint8)
    assert bool(any_invalid(BY_NAME[kind], torch.from_numpy(raw))) == (not np.isfinite(oracle(kind, raw)).all())


def test_an_exponent_of_mxfp4_that_means_nan_is_invalid():
    raw = torch.zeros(2, 34, dtype=torch.uint8)
    assert not any_invalid(BY_NAME["MXFP4"], raw)
    raw[1, 17] = 255
    assert any_invalid(BY_NAME["MXFP4"], raw)


def test_a_scale_of_iq1_m_that_is_infinite_is_invalid():
    """Its upper bits are nibbles of two bytes."""
    raw = torch.zeros(2, 112, dtype=torch.uint8)
    for at, value in ((53, 0xC0), (55, 0x70)):
        assert not any_invalid(BY_NAME["IQ1_M"], raw)
        raw[1, 56 + at] = value
    assert any_invalid(BY_NAME["IQ1_M"], raw)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(kinds):
        if kinds not in made:
            made[kinds] = write(folder / f"{'-'.join(kinds)}.gguf", Tiny(tied=False), list(kinds))
        return made[kinds]

    return get


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA])
@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        (("Q4_K", "Q6_K"), "blk.1.ffn_gate.weight"),
        (("Q4_K", "Q6_K"), "token_embd.weight"),
        (("F16",), "blk.0.ffn_up.weight"),
        (("F32",), "blk.0.attn_norm.weight"),
        (("IQ3_S", "IQ2_XXS"), "blk.0.ffn_gate.weight"),
        (("TQ1_0", "IQ1_S"), "blk.0.ffn_gate.weight"),
    ],
)
def test_a_load_refuses_a_tensor_with_one_invalid_number_by_name(files, tmp_path, kinds, name, backend):
    path = shutil.copy(files(kinds), tmp_path / "damaged.gguf")
    tensor = open_spec(path).files.tensors[name]
    kind = tensor.kind
    n_bytes, at = (4 if kind.name == "F32" else 2), HALVES.get(kind.name, (0,))[-1]
    block = tensor.n_bytes // kind.block_bytes // 2
    for number in INVALID.get(kind.name, (0x7C00, 0xFE00)):
        with open(path, "r+b") as file:
            file.seek(tensor.offset + block * kind.block_bytes + at)
            file.write(number.to_bytes(n_bytes, "little"))
        with pytest.raises(LoadError, match="NaN or infinite") as caught:
            make_shard(open_spec(path), backend)
        assert name in caught.value.where
        assert "damaged.gguf" in caught.value.where
        assert caught.value.configuration


# ---- quant types through the loader


CONVERTED = ["NVFP4"]
MIXED_KINDS = [*sorted(NATIVE), "F32", "F16", "BF16", *CONVERTED]
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
N, K, X = 48, 512, 3


def stored(kind: str, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of ``K`` numbers of about 0.05 as the file has them."""
    if kind in ("F32", "F16", "BF16"):
        x = rng.normal(0, 0.05, (rows, K)).astype(np.float32)
        return x if kind == "F32" else gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    return random_blocks(rng, kind, rows, K)


@dataclass(frozen=True, repr=False)  # hypothesis prints arguments
class Mixed:
    files: GgufFiles
    numbers: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Mixed:
    """A file with a matrix and a stack of experts of every type, and their numbers as gguf reads them."""
    path = tmp_path_factory.mktemp("mixed") / "m.gguf"
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "any")
    numbers = {}
    for kind in MIXED_KINDS:
        quant = gguf.GGMLQuantizationType[kind]
        for name, extents in ((f"{kind}.weight", (N,)), (f"{kind}_exps.weight", (X, N))):
            raw = stored(kind, int(np.prod(extents)), rng)
            numbers[name] = gguf.quants.dequantize(raw, quant).astype(np.float32).reshape(*extents, K)
            raw = np.ascontiguousarray(raw).reshape(*extents, -1)
            writer.add_tensor(name, raw, raw_dtype=None if kind == "F32" else quant)
    finish(writer)
    return Mixed(open_model([Path(path)]), numbers)


def weights_of(files: GgufFiles, names: list[str], backend: Backend, dtype: Dtype) -> WeightLoader:
    kept = []
    for name in dict.fromkeys(names):
        t = files.tensors[name]
        fmt = tensor_format(t.kind, t.shape, TensorRole.MATRIX, backend, dtype)
        kept.append(TensorLayout(name, t.kind, t.shape, TensorRole.MATRIX, fmt, format_bytes(t.kind, t.shape, fmt)))
    return WeightLoader(files, kept, KernelSelector(CPU, TORCH[dtype]), lambda done, total: None)


def assert_float32(found: torch.Tensor, x: torch.Tensor, matrix: np.ndarray) -> None:
    """As near to the float64 product with gguf's numbers as float32 is in any order."""
    w = torch.from_numpy(matrix)
    assert bool(((found.double() - x.double() @ w.double().T).abs() <= product_error(x, w)).all())


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(MIXED_KINDS), st.integers(0, N - 1), st.integers(1, N)), min_size=1, max_size=5
    ),
    backend=st.sampled_from([Backend.CPU, Backend.CUDA]),
)
def test_one_product_over_rows_of_several_types_keeps_their_order(model, parts, backend):
    files, numbers = model.files, model.numbers
    wanted, rows = [], []
    for kind, start, n in parts:
        stop = min(N, start + n)
        rows.append(Rows(f"{kind}.weight", ((start, stop),)))
        wanted.append(numbers[f"{kind}.weight"][start:stop])
    product = weights_of(files, [r.name for r in rows], backend, Dtype.FLOAT32).linear(*rows)
    x = torch.randn(2, K, generator=torch.Generator().manual_seed(2))
    assert product.n_out == sum(len(w) for w in wanted)
    assert_float32(product(x), x, np.concatenate(wanted))


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(MIXED_KINDS), min_size=1, max_size=2, unique=True),
    backend=st.sampled_from([Backend.CPU, Backend.CUDA]),
)
def test_stacks_of_experts_of_every_type(model, kinds, backend):
    files, numbers = model.files, model.numbers
    names = [f"{kind}_exps.weight" for kind in kinds]
    experts = weights_of(files, names, backend, Dtype.FLOAT32).experts(*names)
    wanted = np.concatenate([numbers[name] for name in names], axis=1)
    x = torch.randn(2, K, generator=torch.Generator().manual_seed(3))
    for e in range(X):
        assert_float32(experts.linear(e)(x), x, wanted[e])
    some = experts.dequantised(torch.tensor([2, 0, 2]), torch.float32)
    np.testing.assert_array_equal(some.numpy(), wanted[[2, 0, 2]])
