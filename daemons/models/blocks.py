"""Building blocks of decoder layers, shared by all families.

A block is a callable ``(x [T, E], batch) -> [T, E]`` with its weights and its layer's pools bound at construction; it
has no sequences, steps or family names.  Families combine blocks in ``Family.layer``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.kv.batch import Batch, Group
from daemons.kv.pools import Pools
from daemons.models.loader import WeightLoader
from daemons.ops.attention import Causal, attention
from daemons.ops.basic import RmsNorm, Rope, l2_scale, rope
from daemons.ops.delta_rule import by_token, chunked, convolve, joined_updates, step
from daemons.ops.gated import gated_product
from daemons.ops.linear import Linear, Table, logits_product
from daemons.ops.operations import (
    DeltaNetPools,
    GatedDeltaNetParams,
    Norm,
    Operations,
    PagedQuery,
    PartialAttention,
)
from daemons.ops.paged import PagedTensor, Pages
from daemons.ops.partial_attention import Partial, partial_attention
from lucevisor.model.rope import Rotary
from lucevisor.model.spec import SCORE, ModelSpec, PoolingType
from lucevisor.model.values import PAGE_TOKENS, KvGroup


class HostAttention:
    """Attention of one layer of KV group full; ``fused`` is the device's form of it, None for plain torch."""

    def __init__(
        self,
        keys: PagedTensor,
        values: PagedTensor,
        fused: PartialAttention | None,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        self.keys, self.values, self.fused, self.scale, self.softcap = keys, values, fused, scale, softcap
        self.sinks = sinks
        assert keys.host is not None
        assert values.host is not None
        self._hosts = keys.host, values.host
        # the same rows as the device's pools have, so that a kernel reads them by a table
        self._in_place = keys.over(keys.host.parts), values.over(values.host.parts)

    def __call__(self, group: Group, q: Tensor) -> Tensor:
        """Queries [B, n, H, D] -> [B, n, H, Dv]"""
        whole = self._resident(group, q)
        if self.sinks is not None:
            whole.add_sinks(self.sinks)
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
            return self.fused(q.flatten(0, 1), self.keys, self.values, group.query(KvGroup.FULL), True)
        pages, mask = group.keys(KvGroup.FULL, 0)
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


Block = Callable[[Tensor, Batch], Tensor]


class Family(ABC):
    """The blocks of one shard of a model.  A family file derives from it and sets ``eps`` in its constructor."""

    eps: float
    softcap = 0.0  # of the logits; 0: none
    logit_divisor = 1.0

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        """``weights`` and ``pools`` are those of the shard."""
        self.spec, self.w, self.pools = spec, weights, pools
        self.operations, self.device = weights.selector.operations, weights.selector.device

    @abstractmethod
    def layer(self, index: int) -> Block:
        """One decoder layer on the residual stream."""

    def norm(self, name: str) -> Norm:
        """The norm with the weight of that name."""
        weight = self.w.exact(name)
        return self.operations.norm(weight, weight.shape[-1], self.eps)

    def rotary(self, rotary: Rotary, factors: Tensor | None = None) -> Rope:
        """Rotary positions; ``factors`` [n / 2] divide the frequencies, and so does linear scaling."""
        if rotary.linear != 1.0:
            linear = torch.full((rotary.n // 2,), rotary.linear, device=self.device)
            factors = linear if factors is None else factors * linear
        return rope(rotary, self.device, factors)

    def pages(self, index: int) -> tuple[PagedTensor, PagedTensor]:
        """The keys and values of a layer."""
        return self.pools.paged(index, "k"), self.pools.paged(index, "v")

    def qk_norm(self, prefix: str, n_heads: int, n_kv_heads: int) -> Norm:
        """The norm of each query head, then of each key head; without the latter where there are 0."""
        weights = [self.w.exact(prefix + "attn_q_norm.weight").expand(n_heads, -1)]
        if n_kv_heads:
            weights.append(self.w.exact(prefix + "attn_k_norm.weight").expand(n_kv_heads, -1))
        per_head = torch.cat(weights)
        return self.operations.norm(per_head, per_head.shape[-1], self.eps)

    def embedding(self) -> Callable[[Batch], Tensor]:
        """Token ids to boundary rows [T, boundary width]."""
        return Embedding(self.w.table("token_embd.weight"), self.spec.embedding_scale)

    def from_boundary(self, rows: Tensor, batch: Batch) -> Tensor:
        """Boundary rows to the residual stream [T, E]; anything else they carry goes into ``batch`` for the layers."""
        return rows

    def to_boundary(self, h: Tensor, batch: Batch) -> Tensor:
        """The residual stream to boundary rows."""
        return h

    def output(self) -> Output:
        """What the pipeline ends with: logits of the next token, where the model has them, and pooled hidden states."""
        norm, matrix = self.norm("output_norm.weight"), None
        if self.spec.pooling.generates:
            lm_head = "output.weight" if "output.weight" in self.spec.output_tensors else "token_embd.weight"
            matrix = self.w.linear(lm_head)
        return Output(norm, matrix, self.operations, self.softcap, self.logit_divisor, self.pooler(norm))

    def pooler(self, norm: Callable[[Tensor], Tensor]) -> Pooler:
        """The pooling of the residual stream after its last ``norm``."""
        if not self.spec.pooling.ranks:
            return Pooler(self.spec.pooling.kind, norm)
        score = self.w.exact(SCORE)
        if len(score) == 2:  # the probability of "yes" beside "no" is the sigmoid of their difference
            score = score[:1] - score[1:]
        return Pooler(PoolingType.LAST, norm, lambda pooled: F.linear(pooled, score))


# ---- layers


def advance_state(block: Block, x: Tensor, batch: Batch) -> None:
    """Advance the pages and states of a layer as a call of its block does.  A block with a method of this name leaves
    out what only the result needs.
    """
    getattr(block, "advance_state", block)(x, batch)


class PreNormLayer:
    """``h += mixer(norm(h)); h += mlp(norm(h))``, what is added times ``scale``."""

    def __init__(
        self, mixer_norm: Norm, mixer: Block, mlp_norm: Norm, mlp: Block, operations: Operations, scale: float = 1.0
    ) -> None:
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp = mixer_norm, mixer, mlp_norm, mlp
        self.operations, self.scale = operations, scale

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        return self.operations.add(*self.advance(h, None, batch))

    def advance_state(self, h: Tensor, batch: Batch) -> None:
        """See the function."""
        advance_state(self.mixer, self.mixer_norm(h), batch)

    def advance(self, h: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the block on ``h + delta`` (None: 0) as two terms, which the next layer's norm adds in one kernel."""
        if delta is None:
            x = self.mixer_norm(h)
        else:
            h, x = self.mixer_norm.fused_add(h, delta)
        h, x = self.mlp_norm.fused_add(h, self._scaled(self.mixer(x, batch)))
        return h, self._scaled(self.mlp(x, batch))

    def _scaled(self, delta: Tensor) -> Tensor:
        return delta if self.scale == 1.0 else delta * self.scale


@dataclass(frozen=True)
class NormedBlock:
    """``post(block(pre(h)))``; ``post`` is optional."""

    pre: Norm
    block: Block
    post: Norm | None

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        out = self.block(self.pre(h), batch)
        return out if self.post is None else self.post(out)


class SandwichNormLayer:
    """``h += mixer(h); h += mlp(h)`` of blocks with norms before and after them."""

    def __init__(self, mixer: NormedBlock, mlp: NormedBlock, operations: Operations) -> None:
        self.mixer, self.mlp, self.operations = mixer, mlp, operations

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        h = self.operations.add(h, self.mixer(h, batch))
        return self.operations.add(h, self.mlp(h, batch))

    def advance_state(self, h: Tensor, batch: Batch) -> None:
        """See the function."""
        advance_state(self.mixer.block, self.mixer.pre(h), batch)


class Embedding:
    """Rows of the token table, times ``scale``, and those of images."""

    def __init__(self, table: Table, scale: float = 1.0) -> None:
        self.table, self.scale = table, scale

    def __call__(self, batch: Batch) -> Tensor:
        h = self.table(batch.ids)
        return batch.with_images(h if self.scale == 1.0 else h * self.scale)


class Pooler:
    """The hidden states of a text to one row of float32 numbers: ``head`` of the mean of the normed rows, of the first,
    or of the last."""

    def __init__(
        self,
        kind: PoolingType,
        norm: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor] = lambda pooled: pooled,
    ) -> None:
        self.kind, self.norm, self.head = kind, norm, head

    def __call__(self, h: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Rows of the residual stream [T, E], of which ``spans`` (start, stop) are texts, to [n, width]."""
        if self.kind is PoolingType.MEAN:
            return self.head(torch.stack([self.norm(h[start:stop]).float().mean(dim=0) for start, stop in spans]))
        first = self.kind is PoolingType.CLS
        rows = torch.tensor([start if first else stop - 1 for start, stop in spans], device=h.device)
        return self.head(self.norm(h.index_select(0, rows)).float())


class Output:
    """Final norm and output matrix (lm_head); float32 logits, divided by ``divisor``, with ``softcap`` as
    ``cap * tanh(x / cap)``.  ``pooler``: for the hidden states of texts, which are all that a model without ``lm_head``
    has.
    """

    def __init__(
        self,
        norm: Norm | None,
        lm_head: Linear | None,
        operations: Operations,
        softcap: float = 0.0,
        divisor: float = 1.0,
        pooler: Pooler | None = None,
    ) -> None:
        self.operations, self.softcap, self.divisor, self.pooler = operations, softcap, divisor, pooler
        self._norm, self._lm_head = norm, lm_head
        self._product = None if lm_head is None else logits_product(lm_head)

    @property
    def norm(self) -> Norm:
        assert self._norm is not None
        return self._norm

    @property
    def lm_head(self) -> Linear:
        assert self._lm_head is not None
        return self._lm_head

    def __call__(self, h: Tensor) -> Tensor:
        assert self._product is not None
        logits = self._product(self.norm(h)).float()
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap == 0.0 else self.operations.softcap(logits, self.softcap)


class GatedMlp:
    """``down(act(gate x) * (up x))``; gate and up are one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, operations: Operations, activation: str = "silu") -> None:
        self.gate_up, self.down, self.operations, self.activation = gate_up, down, operations, activation

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down(gated_product(self.gate_up, x, self.activation, self.operations))


def gated_mlp(w: WeightLoader, prefix: str, suffix: str = "", activation: str = "silu") -> GatedMlp:
    """The MLP of the layer ``prefix`` ("blk.3."), or its shared expert (``suffix`` "_shexp")."""
    gate_up = w.linear(f"{prefix}ffn_gate{suffix}.weight", f"{prefix}ffn_up{suffix}.weight")
    return GatedMlp(gate_up, w.linear(f"{prefix}ffn_down{suffix}.weight"), w.selector.operations, activation)


class BiasedLinear:
    """``linear(x) + bias``, the bias in the dtype of the activations."""

    def __init__(self, linear: Linear, bias: Tensor, weights: WeightLoader, operations: Operations) -> None:
        self.linear, self.operations = linear, operations
        self.n_out, self.n_bytes = linear.n_out, linear.n_bytes
        self.bias = bias.to(weights.selector.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.operations.add_bias(self.linear(x), self.bias)


# ---- attention


@dataclass(frozen=True)
class AttentionShape:
    """H query heads and K kv heads of dim D.  K 0: the layer reads the keys and values of another one.

    ``gate`` columns follow q and k in the input product: H D for a gate per element, H for one per head, 0 for none;
    ``softplus`` replaces the sigmoid.  ``key_values``: values are the keys before norm and rotation.  ``window`` 0: all
    positions.  Without ``causal`` the tokens of a slice see each other; if it is ``symmetric``, a window lies on both
    sides, and a slice is a whole text.  ``temperature`` (s, n): a query at position i is multiplied by
    1 + s ln(1 + floor(i / n)).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    gate: int = 0
    kv_group: KvGroup = KvGroup.FULL
    window: int = 0
    softcap: float = 0.0
    softplus: bool = False
    key_values: bool = False
    causal: bool = True
    symmetric: bool = False
    temperature: tuple[float, int] = (0.0, 1)


class Attention:
    """Attention over paged keys and values.

    ``inputs`` makes columns q (H D), k (K D), gate, v (K D; none if values are keys).  ``positions`` norms, rotates and
    casts queries and keys [T, H + K, D] together (:class:`QkNormRope`).  ``value_norm`` acts on each head of v.
    ``sinks`` float32 [H]: the logit of one more key of each head, whose value is zero.
    """

    def __init__(
        self,
        shape: AttentionShape,
        inputs: Linear,
        output: Linear,
        pages: tuple[PagedTensor, PagedTensor],
        positions: Callable[[Tensor, Batch], Tensor],
        operations: Operations,
        value_norm: Norm | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.shape, self.inputs, self.output, self.positions = shape, inputs, output, positions
        self.keys, self.values = pages
        self.value_norm, self.operations, self.sinks = value_norm, operations, sinks
        s = shape
        self.paged_attention = operations.paged_attention(
            window=0 if s.symmetric else s.window, scale=s.scale, softcap=s.softcap, causal=s.causal, sinks=sinks
        )
        self.longest_paged_slice = operations.longest_paged_slice
        if s.symmetric and s.window:
            self.longest_paged_slice = min(self.longest_paged_slice, s.window)
        self.host_attention: HostAttention | None = None
        if self.keys.host is not None:
            fused = operations.partial_attention(scale=s.scale, softcap=s.softcap)
            self.host_attention = HostAttention(self.keys, self.values, fused, s.scale, s.softcap, sinks)
        self.heads = [s.n_heads, s.n_kv_heads]
        self.columns = [sum(self.heads) * s.head_dim, s.gate, 0 if s.key_values else s.n_kv_heads * s.head_dim]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        q, gate = self.write(x, batch)
        if batch.probe is not None:
            batch.probe(self, q)
        out = batch.map_groups(self._attend, q)
        if self.shape.gate:
            return self.output(self.operations.output_gate(out, gate, self.shape.softplus))
        return self.output(out.reshape(batch.n_rows, -1))

    def advance_state(self, x: Tensor, batch: Batch) -> None:
        """See the function."""
        self.write(x, batch)

    def write(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Write keys and values of the rows; returns their queries [T, H, D] and gates."""
        s = self.shape
        rows, d = batch.n_rows, s.head_dim
        qk, gate, v = self.inputs(x).split_with_sizes(self.columns, dim=-1)
        qk = qk.view(rows, -1, d)
        q, k = self.positions(qk, batch).split_with_sizes(self.heads, dim=1)
        if s.temperature[0]:
            steps = batch.positions.div(s.temperature[1], rounding_mode="floor").float()
            q = (q * (1.0 + s.temperature[0] * self.operations.log1p(steps)).view(-1, 1, 1)).to(q.dtype)
        if s.n_kv_heads:
            v = qk[:, s.n_heads :] if s.key_values else v.view(rows, -1, d)
            slots = batch.slots[s.kv_group]
            v = v if self.value_norm is None else self.value_norm(v)
            self.operations.write_pages(self.keys, self.values, slots, k, v)
        return q, gate

    def _attend(self, group: Group, q: Tensor) -> Tensor:
        if self.keys.sketches is not None:
            group.ask(self.keys, q, self.shape.scale)
        if self.host_attention is not None and group.layout.reads_host:
            return self.host_attention(group, q)
        sees_ahead = self.shape.window and group.layout.blocks
        if self.paged_attention is not None and group.n_tokens <= self.longest_paged_slice and not sees_ahead:
            found = self.paged_attention(q.flatten(0, 1), self.keys, self.values, group.query(self.shape.kv_group))
            return found.view(q.shape[0], q.shape[1], *found.shape[1:])
        s, window = self.shape, self.shape.window
        if s.symmetric and group.n_tokens <= window:  # it reaches beyond both ends
            window = 0
        pages, mask = group.keys(s.kv_group, window, s.causal, s.symmetric)
        k, v = self.keys.read(pages, q.dtype), self.values.read(pages, q.dtype)
        return attention(q, k, v, mask, scale=self.shape.scale, softcap=self.shape.softcap, sinks=self.sinks)


class QkNormRope:
    """Per-head norm and rotary positions of queries and keys [T, H + K, D], in float32."""

    def __init__(self, norm: Norm, rope: Rope, operations: Operations) -> None:
        self.norm, self.rope, self.operations = norm, rope, operations

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.operations.qk_norm_rope(x, self.norm, *batch.rope_tables(self.rope, self.operations))


def no_norm(operations: Operations, n_heads: int, head_dim: int, device: torch.device) -> Norm:
    """A norm per head that changes nothing, for kernels that norm and rotate in one pass.

    Its epsilon outweighs every mean square, so that all is divided by the epsilon's root; that is a power of two, and
    the weight.
    """
    weight = torch.full((n_heads, head_dim), 2.0**40, device=device)
    return operations.norm(weight, head_dim, 2.0**80)


# ---- gated delta net


@dataclass(frozen=True)
class GatedDeltaNetShape:
    """Key heads, value heads (value head j reads key head j mod n_key), and the head dim of both.

    ``grouped``: the columns of the output matrix are those of all value heads of a key head, one key head after the
    other.
    """

    n_key: int
    n_value: int
    dim: int
    grouped: bool = False

    @property
    def channels(self) -> int:
        return (2 * self.n_key + self.n_value) * self.dim


@dataclass(frozen=True)
class GatedDeltaNetWeights:
    """``inputs``: columns q, k, v (the convolution's channels), z, alpha, beta.  ``conv_weight`` [Kc, C];
    ``decay_rates`` (as stored: -exp A) and ``dt_bias`` [N]; all but the matrices float32.
    """

    inputs: Linear
    output: Linear
    conv_weight: Tensor
    decay_rates: Tensor
    dt_bias: Tensor
    norm: Norm


class GatedDeltaNet:
    """Gated delta net: short convolution, gated delta rule, gated norm.  State and arithmetic in float32."""

    def __init__(
        self,
        shape: GatedDeltaNetShape,
        weights: GatedDeltaNetWeights,
        convolution: Tensor,
        states: Tensor,
        updates: Tensor,
        operations: Operations,
    ) -> None:
        """``updates``: what single tokens do to the states."""
        self.shape, self.w = shape, weights
        self.convolution, self.states, self.updates = self.pools = DeltaNetPools(convolution, states, updates)
        w = weights
        self.gated_delta_net = operations.gated_delta_net(
            GatedDeltaNetParams(shape.n_key, shape.n_value, shape.dim, w.conv_weight, w.decay_rates, w.dt_bias, w.norm)
        )
        s = shape
        self.columns = [s.channels, s.n_value * s.dim, s.n_value, s.n_value]
        self.channels = [2 * s.n_key * s.dim, s.n_value * s.dim]
        # the rms norm times this is the l2 norm; queries also take the rule's 1/sqrt(Dk)
        l2 = l2_scale(s.dim)
        scale = torch.tensor([[l2 * l2], [l2]], dtype=torch.float32, device=weights.conv_weight.device)
        self.qk_norm = RmsNorm(scale.repeat_interleave(s.n_key, dim=0), s.dim, 1e-6 / s.dim)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        o = batch.map_groups(self._mix, self.w.inputs(x))
        if self.shape.grouped:
            # Moved here and not in the matrix, where a quant block may hold columns of two heads.
            o = o.reshape(batch.n_rows, -1, self.shape.n_key, self.shape.dim).transpose(1, 2)
        return self.w.output(o.reshape(batch.n_rows, -1).to(x.dtype))

    def advance_state(self, x: Tensor, batch: Batch) -> None:
        """See the function."""
        batch.map_groups(self._mix, self.w.inputs(x))

    def _mix(self, group: Group, y: Tensor) -> Tensor:
        """Input columns [B, n, C + ...] to gated outputs [B, n, N, Dv], float32; advances the group's states."""
        s, b, n = self.shape, group.n_slices, group.n_tokens
        kernel = self.gated_delta_net
        if kernel is not None and (kernel.max_tokens is None or n <= kernel.max_tokens):
            found = kernel(y.flatten(0, 1), self.pools, group.states, group.kept_states, group.spans)
            return found.view(b, n, s.n_value, s.dim)
        if y.dtype != torch.float32:
            y = y.float()
        mixed, z, alpha, beta = y.split_with_sizes(self.columns, dim=-1)
        mixed, window = convolve(mixed, group.load_state(self.convolution), self.w.conv_weight)
        if group.n_states:
            windows = window.unfold(1, window.shape[1] - n, 1)[:, 1 + n - group.n_states :]
            group.keep_states(self.convolution, n - group.n_states, windows.transpose(2, 3))
        elif group.is_padded:
            group.store_state(self.convolution, group.behind_tokens(window, window.shape[1] - n))
        else:
            group.store_state(self.convolution, window[:, n:])
        qk, v = F.silu(mixed).split_with_sizes(self.channels, dim=-1)
        qk = self.qk_norm.float32(qk.view(b, n, 2 * s.n_key, s.dim)).view(b, n, 2, s.n_key, s.dim)
        if s.n_value != s.n_key:
            qk = torch.cat([qk] * (s.n_value // s.n_key), dim=3)
        g, beta = F.softplus(alpha + self.w.dt_bias).mul_(self.w.decay_rates), torch.sigmoid(beta)
        v = v.view(b, n, s.n_value, s.dim)
        if group.is_padded:
            qk, v, g, beta = (group.without_pads(x) for x in (qk, v, g, beta))
        o = self._recur(group, qk, v, g, beta)
        return self.w.norm.float32(o).mul_(F.silu(z).view(b, n, s.n_value, s.dim))

    def _recur(self, group: Group, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """qk [B, n, 2, N, D], v [B, n, N, D], g and beta [B, n, N] -> o [B, n, N, D]"""
        state = group.load_state(self.states)
        if group.n_states:
            decay = g.exp_()
            out, errors = by_token(state, qk, v, (decay, beta), self._states_after(group, state))
            if group.layout.leaves_updates:
                group.keep_states(self.updates, 0, joined_updates(qk[:, :, 1, : self.shape.n_key], errors, decay))
            return out
        if group.n_tokens == 1:
            out = step(state, qk, v, g.exp_(), beta)
        else:
            q, k = qk.unbind(2)
            out, state = chunked(state, q, k, v, (g, beta), group.offset)
        group.store_state(self.states, state)
        return out

    def _states_after(self, group: Group, state: Tensor) -> Iterator[Tensor]:
        """Memory for the state after each token; states that are kept and have no memory of their own are copied, and
        none is where updates are.
        """
        if group.layout.leaves_updates:
            yield from repeat(torch.empty_like(state), group.n_tokens)
            return
        for token in range(group.n_tokens):
            row = group.kept_row(self.states, token)
            after = torch.empty_like(state) if row is None else row
            yield after
            if row is None and token >= group.n_tokens - group.n_states:
                group.keep_states(self.states, token, after.unsqueeze(1))
