"""Attention over pages on the device and over those of the same sequence in host memory, which KV Flash paged out.

The resident part is computed as usual, and merged with the others by the log of the sum of the weights.  A GPU's kernel
reads host pages in place for short slices, over the link, each number once; for long ones, which would read them
again for every tile of rows, they come in chunks.  All of them are behind the queries, so their part needs no mask.
Nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from daemons.kv.batch import Group
from daemons.ops.attention import Causal
from daemons.ops.operations import PagedQuery, PartialAttention
from daemons.ops.paged import PagedTensor, Pages
from daemons.ops.partial_attention import Partial, partial_attention
from lucevisor.model.values import PAGE_TOKENS, Space


class HostAttention:
    """Attention of one layer of space full; ``fused`` is the device's form of it, None for plain torch."""

    def __init__(
        self, keys: PagedTensor, values: PagedTensor, fused: PartialAttention | None, scale: float, softcap: float
    ) -> None:
        self.keys, self.values, self.fused, self.scale, self.softcap = keys, values, fused, scale, softcap
        assert keys.host is not None
        assert values.host is not None
        self._hosts = keys.host, values.host
        # the same rows as the device's pools have, so that a kernel reads them by a table
        self._in_place = keys.over(keys.host.parts), values.over(values.host.parts)

    def __call__(self, group: Group, q: Tensor) -> Tensor:
        """Queries [B, n, H, D] -> [B, n, H, Dv]"""
        whole = self._resident(group, q)
        if self.fused is not None and group.reads_in_place:
            whole.add(self.fused(q.flatten(0, 1), *self._in_place, group.host_query(), False))
            return whole.values.to(q.dtype)
        for b, sequence in enumerate(group.layout.sequences):
            own = whole.slice(b)
            for keys, values, rows in self._chunks(sequence.host_rows):
                own.add(self._chunk(q[b : b + 1], keys, values, rows))
        return whole.values.to(q.dtype)

    def _resident(self, group: Group, q: Tensor) -> Partial:
        if self.fused is not None:
            return self.fused(q.flatten(0, 1), self.keys, self.values, group.query(Space.FULL), True)
        pages, mask = group.keys(Space.FULL, 0)
        assert not isinstance(mask, Causal)  # part of what it attends to is in host memory
        k, v = self.keys.read(pages, q.dtype), self.values.read(pages, q.dtype)
        return partial_attention(q, k, v, mask, scale=self.scale, softcap=self.softcap)

    def _chunks(self, rows: list[int]) -> Iterator[tuple[PagedTensor, PagedTensor, Tensor]]:
        if not rows:
            return
        for (of_keys, of_values), index in self._hosts[0].pages.chunks(self._hosts, rows):
            yield self.keys.over(of_keys), self.values.over(of_values), index

    def _chunk(self, q: Tensor, keys: PagedTensor, values: PagedTensor, rows: Tensor) -> Partial:
        """Attention of a slice [1, n, H, D] to all positions of some pages."""
        n, length = q.shape[1], len(rows) * PAGE_TOKENS
        if self.fused is None:
            pages = Pages(rows, 1, 0, length)
            k, v = keys.read(pages, q.dtype), values.read(pages, q.dtype)
            return partial_attention(q, k, v, None, scale=self.scale, softcap=self.softcap)
        first = torch.zeros(1, dtype=torch.int64, device=q.device)
        # without causality a slice sees all positions up to its last one
        where = PagedQuery(rows.unsqueeze(0), first, first + (length - n), n, length)
        return self.fused(q.flatten(0, 1), keys, values, where, False)
