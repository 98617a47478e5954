"""Weights of LoRA adapters on one device, beside the matrices that they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from daemons.device import allocating
from daemons.ops.linear import Linear, Table
from daemons.ops.lora import LoraColumns, LoraContext, LoraLinear, LoraPart, LoraTable
from daemons.parking import empty
from daemons.weights.numbers import read_numbers
from lucevisor.model.lora import LoraAdapter
from lucevisor.model.lora_files import EMBEDDING

_ADVICE = "give this device fewer layers (target_layer_split) or fewer pages, or remove an adapter"

StackedPart = tuple[str, int, Callable[[Tensor], Tensor]]
"""A tensor of a stacked matrix, how many rows of it there are, and what selects them of [N, R]."""


class LoraWeights:
    """The ``adapters`` of a shard; ``context`` has those of the rows being computed."""

    def __init__(
        self, adapters: Sequence[LoraAdapter], context: LoraContext, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.context, self.n_bytes = context, 0
        self._adapters, self._device, self._dtype = adapters, device, dtype
        self._columns: dict[tuple[tuple[int, int], ...], LoraColumns] = {}

    def linear(self, linear: Linear, stacked: Sequence[StackedPart]) -> Linear:
        """Return ``linear``, of matrices one below the other, with what adapters add to it.  An output matrix that is
        the token table stays as it is: they change the lookup alone.
        """
        parts, first = list[LoraPart](), 0
        known: dict[str, Tensor] = {}
        for name, n_rows, select in stacked:
            if changing := self._changing(name) if name != EMBEDDING else []:
                if name not in known:
                    known[name] = self._load(
                        name, [read_numbers(one.files, one.pairs[name].a) for _, one in changing], 0
                    )
                b = self._load(name, [select(self._b(one, name)) for _, one in changing], 1)
                parts.append(LoraPart(first, known[name], b, self._columns_of(name)))
            first += n_rows
        return LoraLinear(linear, parts, self.context) if parts else linear

    def table(self, table: Table) -> Table:
        """Return the token table with what adapters add to its rows."""
        changing = self._changing(EMBEDDING)
        if not changing:
            return table
        a = self._load(EMBEDDING, [read_numbers(one.files, one.pairs[EMBEDDING].a) for _, one in changing], 1)
        b = self._load(EMBEDDING, [self._b(one, EMBEDDING) for _, one in changing], 1)
        return LoraTable(table, a, b, self._columns_of(EMBEDDING), self.context)

    def _changing(self, name: str) -> list[tuple[int, LoraAdapter]]:
        return [(i, one) for i, one in enumerate(self._adapters) if name in one.pairs]

    def _b(self, adapter: LoraAdapter, name: str) -> Tensor:
        pair = adapter.pairs[name]
        return read_numbers(adapter.files, pair.b) * adapter.factor(pair)

    def _load(self, name: str, tensors: Sequence[Tensor], dim: int) -> Tensor:
        joined = torch.cat([*tensors], dim=dim).to(self._dtype).contiguous()
        with allocating(self._device, f"adapters of {name}", joined.nbytes, _ADVICE):
            out = empty(joined.shape, self._dtype, self._device).copy_(joined)
        self.n_bytes += out.nbytes
        return out

    def _columns_of(self, name: str) -> LoraColumns:
        """Return the columns of a tensor's adapters, the same for all that have the same ranks."""
        ranks = tuple((i, one.pairs[name].rank) for i, one in self._changing(name))
        if ranks not in self._columns:
            spans, at = {}, 0
            for i, rank in ranks:
                spans[i] = (at, at := at + rank)
            owners = torch.tensor([i for i, rank in ranks for _ in range(rank)], device=self._device)
            self._columns[ranks] = LoraColumns(owners, spans)
        return self._columns[ranks]
