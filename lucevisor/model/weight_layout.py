"""Weight layout of a shard: one :class:`TensorLayout` per tensor, with its format and bytes on the device.

The planner sums these bytes and the loader creates exactly these formats, so a plan matches what the device holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.quant_types import NATIVE, GgmlType, WeightFormat, format_bytes, row_bytes, weight_format
from lucevisor.model.spec import MatrixPart, ModelSpec, tensor
from lucevisor.model.values import Backend, Dtype, LayerRange


class TensorRole(StrEnum):
    """Use of a tensor in the forward pass."""

    MATRIX = "matrix"  # multiplied with activations
    LOOKUP = "lookup"  # rows are looked up by token id
    EXACT = "exact"  # norms, biases, and small matrices that are F32 in every file


LOOKUPS = frozenset(
    {
        "token_embd.weight",
        "per_layer_token_embd.weight",
        "selector_predecessor.weight",
        "selector_successor.weight",
    }
)
EXACT_SUFFIXES = (
    *("ssm_conv1d.weight", "_conv_base", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_exps.bias"),
    *("position_embd.weight", "token_types.weight", "cls.weight", "cls.output.weight"),
    *("dense_2.weight", "dense_3.weight"),
)
"""Matrices that are read as float32 by every implementation: convolution weights, routers and biases of experts, tables
of positions, and heads that run once a text."""
DENSE_FORMATS = frozenset({WeightFormat.FLOAT32, WeightFormat.BFLOAT16, WeightFormat.FLOAT16})
QUANTISED_FORMATS = frozenset({WeightFormat.BLOCKS, WeightFormat.PACKED})
"""Formats that keep the file's own codes and scales."""
ROW_INDEXED = DENSE_FORMATS | QUANTISED_FORMATS
"""Formats of a matrix from which single rows can be read."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor on a device, or the ``part`` of it used by the shard's layers."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    role: TensorRole
    format: WeightFormat
    n_bytes: int
    part: MatrixPart | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes read from the file: columns of a matrix are selected from whole rows."""
        shape = self.shape if self.part is None or self.part.axis == 0 else self.part.full_shape
        return prod(shape[:-1]) * row_bytes(self.kind, shape[-1])


def tensor_format(
    kind: GgmlType, shape: tuple[int, ...], role: TensorRole, backend: Backend, dtype: Dtype
) -> WeightFormat:
    """Format of one tensor.  Lookup tables keep the file's codes."""
    if role is TensorRole.EXACT:
        return WeightFormat.FLOAT32
    fmt = weight_format(kind, shape, backend, dtype)
    if role is TensorRole.LOOKUP and fmt is not WeightFormat.PACKED:
        return WeightFormat.BLOCKS if kind.name in NATIVE else WeightFormat(dtype.value)
    return fmt


def matrix_role(name: str, shape: tuple[int, ...]) -> TensorRole:
    return TensorRole.EXACT if len(shape) < 2 or name.endswith(EXACT_SUFFIXES) else TensorRole.MATRIX


def shard_layouts(
    spec: ModelSpec, layers: LayerRange, *, embedding: bool, output: bool, backend: Backend, dtype: Dtype
) -> list[TensorLayout]:
    """All tensors of a shard of ``layers``, with the layers' parts of one tensor joined."""
    out = non_layer_layouts(spec, embedding=embedding, output=output, backend=backend, dtype=dtype)
    joined: dict[str, TensorLayout] = {}
    for i in range(layers.start, layers.stop):
        for r in layer_layouts(spec, i, backend, dtype):
            if r.part is None:
                out.append(r)
            else:
                joined[r.name] = _join(joined[r.name], r) if r.name in joined else r
    return out + list(joined.values())


def non_layer_layouts(
    spec: ModelSpec, *, embedding: bool, output: bool, backend: Backend, dtype: Dtype
) -> list[TensorLayout]:
    """A shard's tensors outside its layers.

    Tied embeddings are kept once when both are on this shard and the matrix can be indexed by row, else in both
    formats.
    """
    files = spec.files
    out: list[TensorLayout] = []
    output_tensors = spec.output_tensors if output else {}
    if embedding:
        for name, shape in spec.embedding_tensors.items():
            role = _role(name, shape)
            fmt = weight_format(tensor(files, name).kind, shape, backend, dtype)
            shared = name in output_tensors and fmt in ROW_INDEXED
            if not shared:
                out.append(_tensor_layout(files, name, shape, role, backend, dtype))
    for name, shape in spec.shared_tensors.items():
        out.append(_tensor_layout(files, name, shape, _role(name, shape), backend, dtype))
    for name, shape in output_tensors.items():
        out.append(_tensor_layout(files, name, shape, matrix_role(name, shape), backend, dtype))
    return out


def layer_layouts(spec: ModelSpec, i: int, backend: Backend, dtype: Dtype) -> list[TensorLayout]:
    files, layer = spec.files, spec.layers[i]
    out = [_tensor_layout(files, n, shape, matrix_role(n, shape), backend, dtype) for n, shape in layer.tensors.items()]
    return out + [_part(files, name, part, backend, dtype) for name, part in layer.parts.items()]


def _role(name: str, shape: tuple[int, ...]) -> TensorRole:
    return TensorRole.LOOKUP if name in LOOKUPS else matrix_role(name, shape)


def _tensor_layout(
    files: GgufFiles, name: str, shape: tuple[int, ...], role: TensorRole, backend: Backend, dtype: Dtype
) -> TensorLayout:
    kind = tensor(files, name).kind
    fmt = tensor_format(kind, shape, role, backend, dtype)
    return TensorLayout(name, kind, shape, role, fmt, format_bytes(kind, shape, fmt))


def _part(files: GgufFiles, name: str, part: MatrixPart, backend: Backend, dtype: Dtype) -> TensorLayout:
    """A layer's part of a tensor.  A split inside a block dequantises it; columns are never packed."""
    kind, role = tensor(files, name).kind, _role(name, part.shape)
    fmt = tensor_format(kind, part.shape, role, backend, dtype)
    if fmt in QUANTISED_FORMATS and part.axis == 1:
        divided = any(at % kind.block_elements for at in (part.start, part.stop))
        fmt = WeightFormat(dtype.value) if divided else WeightFormat.BLOCKS
    return TensorLayout(name, kind, part.shape, role, fmt, format_bytes(kind, part.shape, fmt), part)


def _join(a: TensorLayout, b: TensorLayout) -> TensorLayout:
    assert a.part is not None
    assert b.part is not None
    if a.part.stop != b.part.start or a.format is not b.format:
        raise ValueError(f"tensor {a.name!r}: the parts of adjacent layers are not adjacent")
    part = replace(a.part, stop=b.part.stop)
    return replace(a, part=part, shape=part.shape, n_bytes=a.n_bytes + b.n_bytes)
