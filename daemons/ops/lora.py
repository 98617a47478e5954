"""LoRA adapters of the rows of a step, added to the products of a linear layer.

All adapters of a matrix are one pair of matrices, with their ranks side by side: a row has the columns of its own
adapter, and zeros in the others.  A few launches serve any number of adapters, and a step without one has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from daemons.ops.gated import GatedLinear
from daemons.ops.linear import Linear, Product, Table, WideLinear

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class LoraColumns:
    """Columns of the ranks of several adapters.  ``owners`` int64 [R]: the adapter of each; ``spans``: the columns of
    each.
    """

    owners: Tensor
    spans: Mapping[int, tuple[int, int]]


class LoraRows:
    """The adapter of each row of a step: ``adapters`` int64 [T], NO_ADAPTER where there is none.  ``known``: the
    same on the host; None in a graph, which serves any.
    """

    def __init__(self, adapters: Tensor, known: Sequence[int] | None) -> None:
        found = set() if known is None else {*known}
        self.adapters = adapters
        self.active = None if known is None else sorted(found - {NO_ADAPTER})
        self.uniform = len(found) == 1  # all rows have the same
        self._masks: dict[LoraColumns, Tensor] = {}

    def take(self, rows: Tensor) -> LoraRows:
        """Return those of some rows."""
        taken = LoraRows(self.adapters.index_select(0, rows), self.active)
        taken.uniform = self.uniform
        return taken

    def own_columns(self, x: Tensor, columns: LoraColumns, span: tuple[int, int]) -> Tensor:
        """Return x [T, n], the columns of ``span``, with zeros in those of other adapters than the row's."""
        if self.uniform and self.active and columns.spans.get(self.active[0]) == span:
            return x
        mask = self._masks.get(columns)
        if mask is None:
            mask = self._masks[columns] = self.adapters[:, None] != columns.owners[None]
        return x.masked_fill(mask[:, slice(*span)], 0)


@dataclass(slots=True)
class LoraContext:
    """The adapters of the rows that a shard computes; None: its layers add nothing.  ``product``: None, or the one
    whose bits do not depend on other rows.
    """

    product: Product | None = None
    rows: LoraRows | None = None

    @contextmanager
    def of(self, rows: LoraRows | None) -> Iterator[None]:
        """Compute with these rows."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


@dataclass(slots=True)
class LoraPart:
    """What adapters add to the outputs ``first`` .. ``first + N`` of a linear layer: ``a`` [R, K], and ``b`` [N, R]
    with the adapter's factor.
    """

    first: int
    a: Tensor
    b: Tensor
    columns: LoraColumns

    def span(self, context: LoraContext) -> tuple[int, int]:
        """Return the columns to compute: all in a graph, and where the bits may not depend on other rows."""
        assert context.rows is not None
        if context.product is not None or context.rows.active is None:
            return 0, self.b.shape[1]
        found = [self.columns.spans[i] for i in context.rows.active if i in self.columns.spans]
        return (found[0][0], found[-1][1]) if found else (0, 0)


@dataclass(slots=True)
class LoraLinear:
    """A linear layer to which adapters add.  It has the fast paths of ``linear`` while no row has an adapter."""

    linear: Linear
    parts: Sequence[LoraPart]
    context: LoraContext
    n_out: int = field(init=False)
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_out, self.n_bytes = self.linear.n_out, self.linear.n_bytes

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.context.rows is None else self._added(x, y, self.context.rows)

    def in_float32(self, x: Tensor) -> Tensor:
        """See :class:`daemons.ops.linear.WideLinear`."""
        y = self.linear.in_float32(x) if isinstance(self.linear, WideLinear) else self.linear(x).float()
        return y if self.context.rows is None else self._added(x, y, self.context.rows)

    def gates(self, n_rows: int, activation: str) -> bool:
        """See :class:`daemons.ops.gated.GatedLinear`."""
        linear = self.linear
        return self.context.rows is None and isinstance(linear, GatedLinear) and linear.gates(n_rows, activation)

    def gated(self, x: Tensor) -> Tensor:
        """See :class:`daemons.ops.gated.GatedLinear`."""
        assert isinstance(self.linear, GatedLinear)
        return self.linear.gated(x)

    def _added(self, x: Tensor, y: Tensor, rows: LoraRows) -> Tensor:
        product = self.context.product or torch.nn.functional.linear
        for part in self.parts:
            low, high = span = part.span(self.context)
            if low == high:
                continue
            ranks, b = rows.own_columns(product(x, part.a[low:high]), part.columns, span), part.b[:, low:high]
            place = y.narrow(1, part.first, len(b))
            if self.context.product is None and y.dtype == x.dtype:
                place.addmm_(ranks, b.t())
            else:
                place += product(ranks, b)
        return y


@dataclass(slots=True)
class LoraTable:
    """A token table to whose rows adapters add.  ``a`` [V, R], ``b`` [E, R]."""

    table: Table
    a: Tensor
    b: Tensor
    columns: LoraColumns
    context: LoraContext
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_bytes = self.table.n_bytes

    def __call__(self, ids: Tensor) -> Tensor:
        out, rows = self.table(ids), self.context.rows
        if rows is None:
            return out
        ranks = rows.own_columns(self.a.index_select(0, ids), self.columns, (0, self.a.shape[1]))
        return out.add_((self.context.product or torch.nn.functional.linear)(ranks, self.b))
