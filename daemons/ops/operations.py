"""The operations of a layer beside its products, as one object a device: what blocks are built with.

:class:`Reference` is plain torch, for every device; ``daemons.ops.kernels`` has the same for GPUs.  A block that may
have a form for few tokens asks for it when it is built, and is given None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.basic import RmsNorm, gated, rotate
from daemons.ops.paged import PagedTensor
from daemons.ops.router import Route, Router

FEW_TOKENS = 16
"""Tokens of a slice up to which the forms for few tokens are taken: a decoded one, a draft, the end of a prompt."""
SHORT_SLICE = 32
"""Tokens of a slice up to which its start does not matter: slices of equal length form one group and one graph.

Attention reads pages in place, and the slice is one chunk of a gated delta net, also where it crosses a page border.
"""


class Norm(Protocol):
    """Root-mean-square norm over the last dimension; see :class:`daemons.ops.basic.RmsNorm`."""

    weight: Tensor | None
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Of x's dtype."""

    def float32(self, x: Tensor) -> Tensor: ...

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``h + delta`` and its norm."""


@dataclass(frozen=True)
class PagedQuery:
    """Queries over pages: B slices of n tokens.

    ``tables`` [rows, pages] and ``rows`` [B]: which pages; ``starts`` [B]: position of each slice's first token;
    ``reach``: at least the position behind the last token of the longest slice.
    """

    tables: Tensor
    rows: Tensor
    starts: Tensor
    n_tokens: int
    reach: int


Attend = Callable[[Tensor, PagedTensor, PagedTensor, PagedQuery], Tensor]
"""Queries [B n, H, D], pages of keys and values -> [B n, H, D]."""


class Mix(Protocol):
    """The gated delta net: columns [B n, C + ...] to gated outputs [B n, N D]; moves the states ``ids`` [B] of both
    pools on.
    """

    longest: int | None
    """Tokens of a slice that it takes at most; None: any number."""

    def __call__(self, y: Tensor, convolution: Tensor, states: Tensor, ids: Tensor, offset: int) -> Tensor:
        """``offset``: the slices' start modulo the chunk of the delta rule."""


@dataclass(frozen=True)
class MixWeights:
    """What a delta net has beside its matrices: heads, width of a head (keys and values), weights in float32.

    ``taps`` [taps, C], last one for the current token; ``decay`` (as stored: -exp A) and ``dt`` [n_value]; ``norm`` the
    gated one, [dim].  Value head j reads key head j mod n_key.
    """

    n_key: int
    n_value: int
    dim: int
    taps: Tensor
    decay: Tensor
    dt: Tensor
    norm: Norm

    @property
    def channels(self) -> int:
        """C, of the convolution: q, k and v."""
        return (2 * self.n_key + self.n_value) * self.dim

    @property
    def columns(self) -> int:
        """The channels, z, alpha and beta."""
        return self.channels + self.n_value * (self.dim + 2)


class Operations(Protocol):
    """One implementation of everything here."""

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        """``weight`` float32 [D], [H, D], or None for 1."""

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """``act(gate) * up`` of x [T, 2F]."""

    def opened(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        """x [T, H, D] times the sigmoid or softplus of ``gate`` [T, H D] or [T, H]: [T, H D]."""

    def turned(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm of each head of x [T, H, D], then rotary positions by tables [T, 1, half]."""

    def router(self, router: Router) -> Route:
        """What chooses as ``router`` does."""

    def weighted(self, results: Tensor, weights: Tensor, shared: Tensor | None, opening: Tensor | None) -> Tensor:
        """Sum of results [T, k, E] with weights float32 [T, k], plus ``shared`` [T, E] times ``opening`` float32 [T],
        None for 1; of results' dtype.
        """

    def attend(self, *, window: int, scale: float, softcap: float) -> Attend | None:
        """Attention of slices of up to SHORT_SLICE tokens."""

    def mix(self, weights: MixWeights) -> Mix | None:
        """The gated delta net, if it has a form of its own."""


class Reference:
    """Plain torch."""

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return RmsNorm(weight, width, eps)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return gated(x, activation)

    def opened(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        n_rows, n_heads = x.shape[:2]
        factor = F.softplus(gate.float()).to(x.dtype) if softplus else torch.sigmoid(gate)
        return (x * factor.view(n_rows, n_heads, -1)).reshape(n_rows, -1)

    def turned(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(norm.float32(x), cos, sin).to(x.dtype)

    def router(self, router: Router) -> Route:
        return router

    def weighted(self, results: Tensor, weights: Tensor, shared: Tensor | None, opening: Tensor | None) -> Tensor:
        out = torch.bmm(weights.unsqueeze(1), results.float()).squeeze(1).to(results.dtype)
        if shared is None:
            return out
        return out + (shared if opening is None else shared * opening.unsqueeze(1).to(shared.dtype))

    def attend(self, *, window: int, scale: float, softcap: float) -> Attend | None:
        return None

    def mix(self, weights: MixWeights) -> Mix | None:
        return None
