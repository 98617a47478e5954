"""The operations of a decoder layer other than linear layers, behind one protocol per device.

:class:`TorchOperations` is plain torch and runs everywhere; ``daemons.ops.triton_operations`` runs Triton kernels on
GPUs.  ``paged_attention`` and ``gated_delta_net`` return None where a device has no fused form; blocks ask once, when
they are built, and then use the torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops import topk
from daemons.ops.basic import RmsNorm, Rope, act_and_mul, block_convolution, rotate, shift_rows
from daemons.ops.delta_rule import apply_updates
from daemons.ops.host_pages import PageCopy
from daemons.ops.page_scores import Sketches
from daemons.ops.page_sums import TorchPageSums
from daemons.ops.paged import PagedTensor
from daemons.ops.partial_attention import Partial
from daemons.ops.router import RouteFn, Router
from daemons.ops.topk import Candidates

MAX_DECODE_TOKENS = 16
"""Tokens per slice (or rows of a router) up to which decode kernels run: decode, drafts, the end of a prompt."""
SHORT_SLICE = 32
"""Tokens of a slice up to which its start does not matter: slices of equal length form one group and one graph.

Attention reads pages in place, and the slice is one chunk of a gated delta net, also where it crosses a page border.
"""


class Norm(Protocol):
    """RMSNorm over the last dimension; see :class:`daemons.ops.basic.RmsNorm`."""

    weight: Tensor | None
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, of x's dtype."""

    def float32(self, x: Tensor) -> Tensor: ...

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of x in another dtype."""

    def fused_add(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``h + delta`` and its norm."""


@dataclass(frozen=True)
class PagedQuery:
    """Where the queries of B slices of n tokens are, and which pages they read.

    ``tables`` [rows, pages] and ``rows`` [B]: which pages; ``starts`` [B]: position of each slice's first token;
    ``max_length``: an upper bound of the position after any slice's last token; ``lows`` [B]: the first position that
    each slice sees; None: 0.
    """

    tables: Tensor
    rows: Tensor
    starts: Tensor
    n_tokens: int
    max_length: int
    lows: Tensor | None = None


PagedAttention = Callable[[Tensor, PagedTensor, PagedTensor, PagedQuery], Tensor]
"""Queries [B n, H, D], pages of keys and values -> [B n, H, D]."""


PartialAttention = Callable[[Tensor, PagedTensor, PagedTensor, PagedQuery, bool], Partial]
"""Like PagedAttention, with the sums of the weights; the last argument: whether it is causal."""


class PageSums(Protocol):
    """Logs of the sums of the weights of n pages, float32 [K, r, n], for scaled queries [K, r, D], by sketches."""

    def of_keys(self, q: Tensor, keys: PagedTensor, pages: Tensor) -> Tensor:
        """Of ``pages`` int64 [n] on the device, whose sketches are made on the way."""

    def of_sketches(self, q: Tensor, sketches: Sketches, rows: Tensor) -> Tensor:
        """Of ``rows`` int64 [n] of sketches that were kept."""


class DeltaNetPools(NamedTuple):
    """Of a layer: convolution windows [rows, W - 1, C], matrices S [rows, N, D, D], and what single tokens do to S, as
    ``Operations.apply_updates`` has it [rows, update width].
    """

    conv_states: Tensor
    states: Tensor
    updates: Tensor


class GatedDeltaNetOp(Protocol):
    """The fused gated delta net: input columns [B n, C + ...] to gated outputs [B n, N D].

    Slices of up to MAX_DECODE_TOKENS tokens start from rows ``ids`` [B] of both state pools, and write the state after
    each token to its row in ``kept`` [B, n], if that is not -1.  If the first of several tokens has a row, all have;
    then each row of ``updates`` gets what the token does to S, and S is not written: see ``Operations.apply_updates``.
    Longer slices update rows ``ids``, as their ``spans`` say, int64 [B, 2]: how far inside a chunk of the delta rule
    each starts, and how many of its n rows are tokens.  The others, behind them, are pad rows: whatever they hold, no
    state depends on them.
    """

    max_tokens: int | None
    """Longest slice it takes, in tokens; None: no limit."""

    def __call__(self, y: Tensor, pools: DeltaNetPools, ids: Tensor, kept: Tensor, spans: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class GatedDeltaNetParams:
    """Shape and float32 parameters of a gated delta net, without its projections.

    ``dim``: width of a head, of keys and values.  ``conv_weight`` [W, C], whose last row belongs to the current token;
    ``decay_rates`` (-exp A, as stored) and ``dt_bias`` [n_value]; ``norm``: the gated norm, [dim].  Value head j reads
    key head j mod n_key.
    """

    n_key: int
    n_value: int
    dim: int
    conv_weight: Tensor
    decay_rates: Tensor
    dt_bias: Tensor
    norm: Norm

    @property
    def channels(self) -> int:
        """C: channels of the convolution, of q, k and v."""
        return (2 * self.n_key + self.n_value) * self.dim

    @property
    def columns(self) -> int:
        """Input columns: the channels, z, alpha and beta."""
        return self.channels + self.n_value * (self.dim + 2)


class Operations(Protocol):
    """One implementation of all operations.

    ``batch_invariant``: a row's results have the same bits whatever rows are beside it (``engine.deterministic``).
    ``longest_paged_slice``: tokens of a slice up to which ``paged_attention`` takes it.
    """

    batch_invariant: bool
    longest_paged_slice: int

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        """``weight`` float32 [D], [H, D], or None for 1."""

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        """``act(gate) * up`` of x [T, 2F]."""

    def output_gate(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        """x [T, H, D] times the sigmoid or softplus of ``gate`` [T, H D] or [T, H] -> [T, H D]."""

    def qk_norm_rope(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm of each head of x [T, H, D], then RoPE with tables [T, 1, half]."""

    def rope_tables(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`daemons.ops.basic.Rope.tables`."""

    def write_pages(self, keys: PagedTensor, values: PagedTensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` [T, K, D] at slots ``page * 64 + offset`` int64 [T]; slot -1, at the end: pad rows."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of two tensors of one shape, rounded to their dtype."""

    def add_bias(self, x: Tensor, bias: Tensor, ids: Tensor | None = None) -> Tensor:
        """x [T, N] plus ``bias`` [N], or plus rows ``ids`` int64 [T] of ``bias`` [X, N], rounded to their dtype."""

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """Matrices of as many rows each, side by side."""

    def offset(self, x: Tensor, by: int) -> Tensor:
        """``x + by`` of int64 [n]."""

    def shift_rows(self, x: Tensor, pool: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        """Rows x [B, n, E] moved down by one, behind rows ``ids`` [B] of ``pool`` [S, E].

        Then rows of x become those rows of the pool that ``kept`` [B, n] names, if that is not -1; the last one is
        always kept.
        """

    def router(self, router: Router) -> RouteFn:
        """The function that routes rows as ``router`` does."""

    def moe_combine(
        self, results: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
    ) -> Tensor:
        """The sum of ``results`` [T, k, E] weighted by ``weights`` float32 [T, k], plus ``shared`` [T, E] times
        ``shared_gate`` float32 [T] (None: 1).  Has the dtype of ``results``.
        """

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        """Attention of slices of up to ``longest_paged_slice`` tokens over pages in place, or None.

        Without ``causal`` the tokens of a slice see each other.  ``sinks``: see
        :func:`daemons.ops.attention.attention`.
        """

    def partial_attention(self, *, scale: float, softcap: float) -> PartialAttention | None:
        """Attention of slices of any length over pages in place that are a part of the keys, or None."""

    def page_copy(self) -> PageCopy | None:
        """Copies of scattered pages in one launch, or None."""

    def page_sums(self) -> PageSums:
        """What KV Flash ranks pages by."""

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        """The fused gated delta net, or None."""

    def apply_updates(self, states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
        """See :func:`daemons.ops.delta_rule.apply_updates`."""

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x as numbers of another dtype."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """``cap tanh(x / cap)`` of float32 logits [n, V]."""

    def gelu(self, x: Tensor) -> Tensor:
        """GELU of x [T, F] in its tanh form."""

    def log1p(self, x: Tensor) -> Tensor:
        """ln(1 + x) of float32 numbers."""

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :func:`daemons.ops.topk.top_k`; logits of any dtype."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`daemons.ops.topk.most_likely`; logits of any dtype."""

    def select_path(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """See :func:`daemons.ops.topk.select_path`."""

    def block_convolution(self, x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
        """Convolve slices of ``n`` rows of x [B n, E] with kernels of their own: ``base[side]`` of [2, taps, E] float32
        plus ``delta`` [B n, 2 taps groups], whose numbers neighbouring channels share.  Has x's dtype.
        """


class TorchOperations:
    """Plain torch."""

    batch_invariant = False
    longest_paged_slice = SHORT_SLICE

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return RmsNorm(weight, width, eps)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        return act_and_mul(x, activation)

    def output_gate(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        n_rows, n_heads = x.shape[:2]
        factor = F.softplus(gate.float()).to(x.dtype) if softplus else torch.sigmoid(gate)
        return (x * factor.view(n_rows, n_heads, -1)).reshape(n_rows, -1)

    def qk_norm_rope(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(norm.float32(x), cos, sin).to(x.dtype)

    def rope_tables(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope.tables(positions)

    def write_pages(self, keys: PagedTensor, values: PagedTensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys.write(slots, k)
        values.write(slots, v)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_bias(self, x: Tensor, bias: Tensor, ids: Tensor | None = None) -> Tensor:
        return x + (bias if ids is None else bias.index_select(0, ids))

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts], dim=-1)

    def offset(self, x: Tensor, by: int) -> Tensor:
        return x + by

    def shift_rows(self, x: Tensor, pool: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        return shift_rows(x, pool, ids, kept)

    def router(self, router: Router) -> RouteFn:
        return router

    def moe_combine(
        self, results: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
    ) -> Tensor:
        out = torch.bmm(weights.unsqueeze(1), results.float()).squeeze(1).to(results.dtype)
        if shared is None:
            return out
        return out + (shared if shared_gate is None else shared * shared_gate.unsqueeze(1).to(shared.dtype))

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        return None

    def partial_attention(self, *, scale: float, softcap: float) -> PartialAttention | None:
        return None

    def page_copy(self) -> PageCopy | None:
        return None

    def page_sums(self) -> PageSums:
        return TorchPageSums()

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        return None

    def apply_updates(self, states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
        apply_updates(states, updates, source, rows, target)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        return torch.tanh(logits / cap) * cap

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def log1p(self, x: Tensor) -> Tensor:
        return x.log1p()

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return topk.top_k(logits.float(), k)

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return topk.most_likely(logits.float())

    def select_path(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        return topk.select_path(candidates)

    def block_convolution(self, x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
        return block_convolution(x, delta, base, side, n)
