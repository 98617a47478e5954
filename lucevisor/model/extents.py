"""Extents: memory that holds one recurrent state or some pages of KV group ``full``, so that both share one pool.

In each attention layer ``pages`` pages take as many bytes as the matrices of ``layers`` recurrent layers.  State s lies
in the memory of pages ``s * pages`` .. ``(s + 1) * pages - 1``.  A layer's tensor begins at its own first row, and ids
are multiplied (by 2 for pages, by ``layers`` for states): kernels see ordinary pools with more rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor
from lucevisor.model.values import Q8_GROUP, Dtype, KvGroup, dtype_bytes, q8_groups

PAGE_ROWS = 2
"""Rows of an attention layer's memory that a page takes: its keys and its values."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of one recurrent state: ``pages`` in each attention layer, of ``layers`` recurrent layers."""

    pages: int
    layers: int

    def holds(self, layers: Iterable[LayerSpec]) -> bool:
        """Return whether the attention layers of a shard have room for the matrices of its recurrent ones."""
        kv_groups = [layer.kv_group for layer in layers]
        return kv_groups.count(KvGroup.RECURRENT) <= self.layers * kv_groups.count(KvGroup.FULL)


def extent_of(spec: ModelSpec, kv_dtype: Dtype) -> Extent | None:
    """Return the extent of a model, if its layers are alike and their sizes divide one another."""
    paged = {layer.state for layer in spec.layers if layer.kv_group is KvGroup.FULL}
    recurrent = {layer.state for layer in spec.layers if layer.kv_group is KvGroup.RECURRENT}
    if set(spec.kv_groups()) != {KvGroup.FULL, KvGroup.RECURRENT} or len(paged) != 1 or len(recurrent) != 1:
        return None
    [pair], [state] = paged, recurrent
    matrices = [t for t in state if t.update_width and t.dtype is Dtype.FLOAT32]
    if len(pair) != PAGE_ROWS or pair[0].shape != pair[1].shape or len(matrices) != 1:
        return None
    page_bytes, matrix_bytes = PAGE_ROWS * _row_bytes(pair[0], kv_dtype), matrices[0].n_bytes(kv_dtype)
    counts = [
        sum(layer.kv_group is kv_group for layer in spec.layers) for kv_group in (KvGroup.RECURRENT, KvGroup.FULL)
    ]
    fewest = -(-counts[0] // counts[1])
    for n in range(fewest, int(fewest * 1.5) + 1):  # at most half more than the bytes of a state's matrices
        if n * matrix_bytes % page_bytes == 0:
            return Extent(n * matrix_bytes // page_bytes, n)
    return None


def _row_bytes(tensor: StateTensor, kv_dtype: Dtype) -> int:
    """Bytes of a page's keys or values in the memory that states share: without the scales of q8_0."""
    dtype, width = tensor.dtype or kv_dtype, tensor.shape[-1]
    rows = prod(tensor.shape[:-1])
    return rows * q8_groups(width) * Q8_GROUP if dtype is Dtype.Q8_0 else rows * dtype_bytes(dtype, width)
