"""What a shard keeps on its device: one :class:`Resident` a tensor, with its form and bytes.

The planner adds these bytes up and the loader makes exactly these forms, so that what a plan promises is what a
device holds.  Knows no torch; invariants: every tensor name of the shard appears in the form its role asks for, once;
the bytes of a shard are those of its ends and of its layers, added up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.quant_types import NATIVE, Format, GgmlType, resident_bytes, resident_format, row_bytes
from lucevisor.model.spec import ModelSpec, Part, tensor
from lucevisor.model.values import Backend, Dtype, LayerRange


class Role(StrEnum):
    """How the forward pass uses a tensor."""

    MATRIX = "matrix"  # multiplied with activations
    LOOKUP = "lookup"  # single rows are read, by token id
    EXACT = "exact"  # norms, biases, and small matrices that every file keeps F32


LOOKUPS = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})
EXACT_SUFFIXES = ("ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Matrices whose arithmetic is float32 in every implementation: convolution taps and routers."""
DENSE_FORMS = frozenset({Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16})
QUANTISED_FORMS = frozenset({Format.BLOCKS, Format.PACKED})
"""The file's own codes and scales."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One tensor, or the ``part`` of it that the shard's layers use, as it rests on a device; ``shape`` is what
    rests.
    """

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    role: Role
    form: Format
    n_bytes: int
    part: Part | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of the file that loading reads: columns of a matrix are picked out of whole rows."""
        shape = self.shape if self.part is None or self.part.axis == 0 else self.part.whole
        return prod(shape[:-1]) * row_bytes(self.kind, shape[-1])


def form_of(kind: GgmlType, shape: tuple[int, ...], role: Role, backend: Backend, dtype: Dtype) -> Format:
    """Form of one tensor.  A lookup table stays as the file's blocks: only the rows of a step are ever expanded."""
    if role is Role.EXACT:
        return Format.FLOAT32
    if role is Role.LOOKUP:
        return Format.BLOCKS if kind.name in NATIVE else Format(dtype.value)
    return resident_format(kind, shape, backend, dtype)


def matrix_role(name: str, shape: tuple[int, ...]) -> Role:
    """Role of a tensor of a layer or of the tail."""
    return Role.EXACT if len(shape) < 2 or name.endswith(EXACT_SUFFIXES) else Role.MATRIX


def residents(
    spec: ModelSpec, layers: LayerRange, *, first: bool, last: bool, backend: Backend, dtype: Dtype
) -> list[Resident]:
    """Everything a shard of ``layers`` keeps: its ends, and its layers with their parts of one tensor joined.

    Raises ValueError when ``spec.files`` is None.
    """
    out = end_residents(spec, first=first, last=last, backend=backend, dtype=dtype)
    joined: dict[str, Resident] = {}
    for i in range(layers.start, layers.stop):
        for r in layer_residents(spec, i, backend, dtype):
            if r.part is None:
                out.append(r)
            else:
                joined[r.name] = _join(joined[r.name], r) if r.name in joined else r
    return out + list(joined.values())


def end_residents(spec: ModelSpec, *, first: bool, last: bool, backend: Backend, dtype: Dtype) -> list[Resident]:
    """What a shard keeps beside its layers: small tensors of every shard, the head's when ``first``, the tail's when
    ``last``.

    A table that is also the output matrix (tied embeddings) is kept once when both are on this shard and the matrix's
    form can be indexed by row (dense, or blocks); else it is kept in both forms.
    """
    files = _files(spec)
    out: list[Resident] = []
    tail = spec.tail if last else {}
    if first:
        for name, shape in spec.head.items():
            role = _role(name, shape)
            shared = name in tail and _row_indexed(files, name, shape, backend, dtype)
            if not shared:
                out.append(_resident(files, name, shape, role, backend, dtype))
    for name, shape in (*spec.every.items(), *tail.items()):
        out.append(_resident(files, name, shape, matrix_role(name, shape), backend, dtype))
    return out


def layer_residents(spec: ModelSpec, i: int, backend: Backend, dtype: Dtype) -> list[Resident]:
    """What layer ``i`` takes on its own shard."""
    files, layer = _files(spec), spec.layers[i]
    out = [_resident(files, n, shape, matrix_role(n, shape), backend, dtype) for n, shape in layer.tensors.items()]
    return out + [_part(files, name, part, backend, dtype) for name, part in layer.parts.items()]


def weight_bytes(
    spec: ModelSpec, layers: LayerRange, *, first: bool, last: bool, backend: Backend, dtype: Dtype
) -> int:
    """Bytes of weights that a shard of ``layers`` keeps on its device."""
    return sum(r.n_bytes for r in residents(spec, layers, first=first, last=last, backend=backend, dtype=dtype))


def _row_indexed(files: GgufFiles, name: str, shape: tuple[int, ...], backend: Backend, dtype: Dtype) -> bool:
    form = resident_format(tensor(files, name).kind, shape, backend, dtype)
    return form in QUANTISED_FORMS or form in DENSE_FORMS


def _files(spec: ModelSpec) -> GgufFiles:
    if spec.files is None:
        raise ValueError("the model's files are not opened: residents() needs ModelSpec.files")
    return spec.files


def _role(name: str, shape: tuple[int, ...]) -> Role:
    return Role.LOOKUP if name in LOOKUPS else matrix_role(name, shape)


def _resident(
    files: GgufFiles, name: str, shape: tuple[int, ...], role: Role, backend: Backend, dtype: Dtype
) -> Resident:
    kind = tensor(files, name).kind
    form = form_of(kind, shape, role, backend, dtype)
    return Resident(name, kind, shape, role, form, resident_bytes(kind, shape, form))


def _part(files: GgufFiles, name: str, part: Part, backend: Backend, dtype: Dtype) -> Resident:
    """A layer's part of a tensor.  A cut inside a block expands it; columns are never packed."""
    kind, role = tensor(files, name).kind, _role(name, part.shape)
    form = form_of(kind, part.shape, role, backend, dtype)
    if form in QUANTISED_FORMS and part.axis == 1:
        divided = any(at % kind.block_elements for at in (part.start, part.stop))
        form = Format(dtype.value) if divided else Format.BLOCKS
    return Resident(name, kind, part.shape, role, form, resident_bytes(kind, part.shape, form), part)


def _join(a: Resident, b: Resident) -> Resident:
    """The parts of two neighbouring layers as one."""
    assert a.part is not None
    assert b.part is not None
    if a.part.stop != b.part.start or a.form is not b.form:
        raise ValueError(f"tensor {a.name!r}: the parts of neighbouring layers do not lie side by side")
    part = replace(a.part, stop=b.part.stop)
    return replace(a, part=part, shape=part.shape, n_bytes=a.n_bytes + b.n_bytes)
