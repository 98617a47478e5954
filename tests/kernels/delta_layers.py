"""A random gated delta net: its kernels against the daemon's block, within rounding.

The block runs in float64, and again with every operation perturbed (``tests.numerics``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from daemons.kv.batch import Group
from daemons.models.blocks import GatedDeltaNet, GatedDeltaNetShape, GatedDeltaNetWeights
from daemons.ops.basic import RmsNorm
from daemons.ops.delta_rule import CHUNK
from daemons.ops.operations import DeltaNetPools, GatedDeltaNetParams, Operations, TorchOperations
from lucevisor.model.spec import update_width
from tests.kernels.limits import assert_within
from tests.numerics import RUNS, Bound, Exact

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Results = tuple[Tensor, Tensor, Tensor]
"""Outputs [B, n, n_value, dim], convolution windows [B, conv width - 1, C] and matrices S [B, n_value, dim, dim]."""
Form = Callable[[Tensor, Tensor, Tensor], Results]
"""Of input columns [B, n, columns], windows and matrices in front of them."""

Bounds = tuple[Bound, Tensor, Bound]
"""Of outputs and matrices; windows are copies."""


class ChunkNet(GatedDeltaNet):
    """The block with the chunked rule as the kernels compute it (formulas: docs/kernels.md).

    Decays are multiplied; the daemon's torch form adds their logarithms, which loses digits when they are large.
    """

    def _recur(self, group: Group, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        s, parts = group.load_state(self.states), []
        borders = list(range(CHUNK - group.offset, group.n_tokens, CHUNK))
        rows = [x.transpose(1, 2).tensor_split(borders, dim=2) for x in (*qk.unbind(2), v, g.exp(), beta)]
        for q, k, v, decay, beta in zip(*rows, strict=True):  # [B, N, tokens, D] and [B, N, tokens]
            beta, unit = beta.unsqueeze(-1), torch.eye(q.shape[2], device=q.device)
            below = torch.ones_like(unit).tril(-1).bool()
            ratio = torch.where(below, decay.unsqueeze(-1), torch.ones_like(unit)).cumprod(dim=-2).tril()
            grown, left = decay.cumprod(dim=-1).unsqueeze(-1), ratio[..., -1, :].unsqueeze(-1)
            lower = (k @ k.mT * ratio * beta).tril(-1)
            inverse = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False, unitriangular=True)
            u = inverse * beta.mT @ (v - grown * (k @ s))
            parts.append(grown * (q @ s) + q @ k.mT * ratio @ u)
            s = grown[..., -1:, :] * s + k.mT @ (u * left)
        group.store_state(self.states, s)
        return torch.cat(parts, dim=2).transpose(1, 2)


@dataclass
class Layer:
    """Parameters of a gated delta net, the blocks its kernels are compared with, and pools of states.

    ``net``: the daemon's block; ``chunks``: of the same weights.  ``precision``: of the kernels' products.
    """

    params: GatedDeltaNetParams
    net: GatedDeltaNet
    chunks: ChunkNet
    conv_states: Tensor
    states: Tensor
    updates: Tensor
    precision: str = "ieee"

    @classmethod
    def random(
        cls, n_key: int, n_value: int, dim: int, conv_width: int, decay_rates: tuple[float, float], n_states: int
    ) -> Layer:
        """``decay_rates``: exp A of the first and of the last head."""
        g = torch.Generator().manual_seed(0)
        shape = GatedDeltaNetShape(n_key, n_value, dim)

        def random(*extent: int) -> Tensor:
            return torch.randn(*extent, generator=g).to(DEVICE)

        conv_weight, dt_bias, weight = random(conv_width, shape.channels), random(n_value), random(dim)
        rates = -torch.linspace(*decay_rates, n_value).to(DEVICE)
        norm = RmsNorm(weight, dim, EPS)
        pools = random(n_states, conv_width - 1, shape.channels), random(n_states, n_value, dim, dim)
        updates = torch.full((n_states, update_width(n_key, n_value, dim)), torch.nan, device=DEVICE)
        weights = GatedDeltaNetWeights(None, None, conv_weight, rates, dt_bias, norm)  # type: ignore[arg-type]  # the matrices are around it
        nets = [
            kind(shape, weights, torch.empty(0), torch.empty(0), updates, TorchOperations())
            for kind in (GatedDeltaNet, ChunkNet)
        ]
        return cls(GatedDeltaNetParams(n_key, n_value, dim, conv_weight, rates, dt_bias, norm), *nets, *pools, updates)  # type: ignore[arg-type]

    def twin(self) -> Layer:
        """The same with copies of the pools."""
        pools = {name: getattr(self, name).clone() for name in DeltaNetPools._fields}
        return replace(self, **pools)

    @property
    def pools(self) -> DeltaNetPools:
        return DeltaNetPools(self.conv_states, self.states, self.updates)

    def inputs(self, rows: int, seed: int = 1, spread: float = 1.0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, self.params.columns, generator=g) * spread).to(DEVICE)

    def check(
        self,
        run: Callable[[Tensor, list[int]], Tensor],
        y: Tensor,
        ids: list[int],
        rounded: Form,
        exact: Form | None = None,
    ) -> Tensor:
        """``run`` updates this layer's states ``ids`` for ``y`` [B n, columns]; outputs and states are what ``exact``
        says, as near as roundings in ``rounded``, another form of it, explain.  Its outputs.
        """
        bounds = self.bounds(y, ids, rounded, exact)
        found = run(y, ids)
        self.within(found, ids, bounds)
        return found

    def bounds(
        self, y: Tensor, ids: list[int], rounded: Form, exact: Form | None = None
    ) -> tuple[Bound, Tensor, Bound]:
        """Outputs, windows and matrices of this layer's states, which do not change.  All perturbed runs are made at
        once, as slices.
        """
        args = y.float().view(len(ids), -1, y.shape[-1]), self.conv_states[ids], self.states[ids]
        with Exact():
            wanted = (exact or rounded)(*(x.double() for x in args))
        with Exact(seed=0, tf32x3=self.precision == "tf32x3", gpu=DEVICE == "cuda"):
            perturbed = rounded(*(x.double().repeat(RUNS, *[1] * (x.dim() - 1)) for x in args))
        o, left, s = zip(wanted, (x.unflatten(0, (RUNS, -1)) for x in perturbed), strict=True)
        return Bound.of(*o), left[0], Bound.of(*s)

    def within(self, found: Tensor, ids: list[int], bounds: Bounds) -> None:
        """``found`` are the outputs within their bound, states ``ids`` those within theirs, windows equal."""
        outputs, windows, matrices = bounds
        assert_within(found.view(outputs.exact.shape), outputs, what="the output")
        assert torch.equal(self.conv_states[ids].double(), windows)
        assert_within(self.states[ids], matrices, what="the state")


def make_states(pools: DeltaNetPools, ids: list[int], kept: Tensor, operations: Operations) -> None:
    """Make the states ``kept`` [B, n] after each token of slices from states ``ids``, where updates were kept."""
    for live, own in zip(ids, kept, strict=True):
        rows = own.tolist()
        if len(rows) > 1 and rows[0] >= 0:
            for last in sorted(range(len(rows)), key=lambda i, rows=rows, live=live: rows[i] == live):
                operations.apply_updates(pools.states[None], pools.updates[None], live, own[: last + 1], rows[last])


def only_last(ids: list[int], n: int) -> Tensor:
    """Rows to write for slices of n tokens that update rows ``ids``: after the last token alone, [B, n]."""
    return torch.tensor([[-1] * (n - 1) + [state] for state in ids], device=DEVICE)


def form_of(net: GatedDeltaNet, offset: int = 0) -> Form:
    """The block on a whole slice."""

    def form(y: Tensor, left: Tensor, s: Tensor) -> Results:
        states = {id(net.convolution): left, id(net.states): s}
        group = SimpleNamespace(
            n_slices=y.shape[0],
            n_tokens=y.shape[1],
            offset=offset,
            n_states=0,
            is_padded=False,
            load_state=lambda pool: states[id(pool)],
            store_state=lambda pool, value: states.update({id(pool): value}),
        )
        out = net._mix(group, y)  # type: ignore[arg-type]
        return out, states[id(net.convolution)], states[id(net.states)]

    return form


def one_by_one(net: GatedDeltaNet) -> Form:
    """The block on single tokens."""
    single = form_of(net)

    def form(y: Tensor, left: Tensor, s: Tensor) -> Results:
        out = []
        for row in y.split(1, dim=1):
            o, left, s = single(row, left, s)
            out.append(o)
        return torch.cat(out, dim=1), left, s

    return form
