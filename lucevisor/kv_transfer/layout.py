"""Layout of state outside of daemons: the tensors of a prefix slot, of pages and of recurrent states.

Invariant: tensors follow from layer table, length and kv dtype alone, so any layer split can read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from msgspec.structs import replace

from lucevisor.model.pages import first_visible
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import Q8_GROUP, SCALE, Dtype, KvGroup, q8_groups
from lucevisor.protocol.messages import TransferTensor

TARGET, DRAFT = "layers", "draft"
"""First part of a tensor's name: it is of a layer of the model, or of its drafter."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
"""The number formats, as safetensors writes them."""

_STORED = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16", Dtype.FLOAT16: "F16"}


def slot_tensors(
    layers: Sequence[LayerSpec],
    n_tokens: int,
    kv_dtype: Dtype,
    draft_layers: Sequence[LayerSpec] = (),
    start: int = 0,
) -> list[TransferTensor]:
    """Return the tensors of a slot of ``n_tokens``, with offsets 0, sorted by item size, model, layer and kind.

    So each starts at a multiple of its item size.  ``start``: the first position of full attention that is wanted.
    """
    tensors: list[TransferTensor] = []
    for draft, layer in _of_both(layers, draft_layers):
        in_window = layer.kv_group is KvGroup.WINDOW and layer.window
        first = first_visible(n_tokens, layer.window or 0) if in_window else start
        tensors += _layer_tensors(layer, n_tokens - first, kv_dtype, first, draft=draft)
    return sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.draft, t.layer, t.kind))


def unit_tensors(
    kv_group: KvGroup,
    n_tokens: int,
    layers: Sequence[LayerSpec],
    kv_dtype: Dtype,
    draft_layers: Sequence[LayerSpec] = (),
) -> list[TransferTensor]:
    """Return the tensors, with offsets 0, of pages with ``n_tokens`` positions, or of one recurrent state."""
    return [
        tensor
        for draft, layer in _of_both(layers, draft_layers)
        if layer.kv_group is kv_group
        for tensor in _layer_tensors(layer, n_tokens, kv_dtype, 0, draft=draft)
    ]


def with_offsets(tensors: Sequence[TransferTensor], start: int = 0) -> list[TransferTensor]:
    offsets = accumulate((tensor.n_bytes for tensor in tensors), initial=start)
    return [replace(tensor, offset=offset) for tensor, offset in zip(tensors, offsets, strict=False)]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * ITEM_BYTES[dtype]


def _of_both(layers: Sequence[LayerSpec], draft_layers: Sequence[LayerSpec]) -> Iterator[tuple[bool, LayerSpec]]:
    yield from ((False, layer) for layer in layers)
    yield from ((True, layer) for layer in draft_layers)


def _layer_tensors(
    layer: LayerSpec, n_rows: int, kv_dtype: Dtype, first: int, *, draft: bool
) -> Iterator[TransferTensor]:
    for state in layer.state:
        shape = state.shape if layer.kv_group is KvGroup.RECURRENT else (n_rows, *state.shape[1:])
        for kind, dtype, extents in _stored(state.name, state.dtype or kv_dtype, shape):
            name = f"{DRAFT if draft else TARGET}.{layer.index}.{kind}"
            yield TransferTensor(name, layer.index, kind, dtype, extents, 0, tensor_bytes(dtype, extents), first, draft)


def _stored(kind: str, dtype: Dtype, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (kind, dtype, shape) as stored: q8_0 as int8 codes plus a float16 scale per group of 32."""
    if dtype is not Dtype.Q8_0:
        return [(kind, _STORED[dtype], shape)]
    n_groups = q8_groups(shape[-1])
    return [(kind, "I8", (*shape[:-1], n_groups * Q8_GROUP)), (kind + SCALE, "F16", (*shape[:-1], n_groups))]
