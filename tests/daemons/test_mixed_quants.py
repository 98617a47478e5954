"""Every quant type through the loader: alone, mixed in one product, in stacks of experts; conversions are reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.device import CPU
from daemons.models.loader import Rows, WeightLoader
from daemons.ops.selection import KernelSelector
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.quant_types import CPU_INT4, CPU_INT8, NATIVE, WeightFormat, format_bytes
from lucevisor.model.values import Backend, Dtype
from lucevisor.model.weight_layout import TensorLayout, TensorRole, tensor_format
from tests.daemons.tiny_models import random_blocks
from tests.numerics import BFLOAT16, Narrow, narrow_error, product_error

CONVERTED = ["IQ2_XXS", "IQ3_S", "TQ1_0", "TQ2_0"]
KINDS = [*sorted(NATIVE), "F32", "F16", "BF16", *CONVERTED]
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
N, K, X = 48, 512, 3


def stored(kind: str, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of ``K`` numbers of about 0.05 as the file has them."""
    if kind in ("F32", "F16", "BF16", "TQ1_0", "TQ2_0"):
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
    for kind in KINDS:
        quant = gguf.GGMLQuantizationType[kind]
        for name, extents in ((f"{kind}.weight", (N,)), (f"{kind}_exps.weight", (X, N))):
            raw = stored(kind, int(np.prod(extents)), rng)
            numbers[name] = gguf.quants.dequantize(raw, quant).astype(np.float32).reshape(*extents, K)
            raw = np.ascontiguousarray(raw).reshape(*extents, -1)
            writer.add_tensor(name, raw, raw_dtype=None if kind == "F32" else quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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


@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_bfloat16_forms_on_the_cpu_stay_near(model, kind):
    files, numbers = model.files, model.numbers
    name = f"{kind}.weight"
    weights = weights_of(files, [name], Backend.CPU, Dtype.BFLOAT16)
    product = weights.linear(name)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    w = torch.from_numpy(numbers[name])
    error = float((product(x).double() - x.double() @ w.double().T).norm())
    fmt = weights._layouts[name, TensorRole.MATRIX].format
    assert fmt is (
        WeightFormat.INT4 if kind in CPU_INT4 else WeightFormat.INT8 if kind in CPU_INT8 else WeightFormat.BFLOAT16
    )
    allowed = narrow_error(x, w, Narrow(BFLOAT16, packed=fmt is not WeightFormat.BFLOAT16))
    assert float(product_error(x, w).norm()) < error <= float(allowed.norm())  # not float32 by mistake


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, N - 1), st.integers(1, N)), min_size=1, max_size=5),
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
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True),
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
