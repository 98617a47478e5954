"""The operations of a layer in C++, for bfloat16 on a cpu: one call where plain torch has up to sixty.

Activations of another dtype go to torch's forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from daemons.ops.basic import ACTIVATIONS, RmsNorm, Rope
from daemons.ops.cpu.library import (
    AttentionArguments,
    CpuKernels,
    DeltaNetArguments,
    PagesArguments,
    PathArguments,
    UpdatesArguments,
)
from daemons.ops.delta_rule import key_heads
from daemons.ops.operations import (
    DeltaNetPools,
    GatedDeltaNetOp,
    GatedDeltaNetParams,
    Norm,
    PagedAttention,
    PagedQuery,
    TorchOperations,
)
from daemons.ops.paged import PagedTensor, Q8Pages
from daemons.ops.topk import Candidates

BFLOAT16 = torch.bfloat16
LANES = 16  # numbers of a vector
MAX_HEAD_DIM = 1024
MAX_CONV_WIDTH = 8
DELTA_DIMS = (16, 32, 64, 128)
"""Head dims of the delta net that are compiled."""
PAGE_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
Q8_KIND = 3


class CpuRmsNorm(RmsNorm):
    """See :class:`daemons.ops.basic.RmsNorm`."""

    __slots__ = ("kernels", "n_weights")

    def __init__(self, kernels: CpuKernels, weight: Tensor | None, width: int, eps: float) -> None:
        super().__init__(None if weight is None else weight.contiguous(), width, eps)
        self.kernels, self.n_weights = kernels, 1 if weight is None else weight.numel() // width

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not BFLOAT16:
            return super().__call__(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(x, out.data_ptr(), 0)
        return out

    def float32(self, x: Tensor) -> Tensor:
        if x.dtype is not BFLOAT16:
            return super().float32(x)
        out = torch.empty(x.shape)
        self._run(x, 0, out.data_ptr())
        return out

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype is not torch.float32 or dtype is not BFLOAT16 or not x.is_contiguous() or self.n_weights > 1:
            return super().rounded(x, dtype)
        out, weight = torch.empty(x.shape, dtype=BFLOAT16), 0 if self.weight is None else self.weight.data_ptr()
        self.kernels.calls.rms_norm_float(
            x.data_ptr(), x.numel() // self.width, self.width, weight, self.epsilon, out.data_ptr()
        )
        return out

    def fused_add(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if h.dtype is not BFLOAT16 or delta.dtype is not BFLOAT16:
            return super().fused_add(h, delta)
        h, delta = h.contiguous(), delta.contiguous()
        total, out = torch.empty_like(h), torch.empty_like(h)
        self._run(h, out.data_ptr(), 0, delta.data_ptr(), total.data_ptr())
        return total, out

    def _run(self, x: Tensor, out: int, out_float: int, delta: int = 0, total: int = 0) -> None:
        width = self.width
        heads = x.shape[-2] if x.dim() == 3 else 1
        if x.stride(-1) != 1 or x.dim() > 3 or (heads > 1 and x.stride(1) != width):
            x = x.contiguous()
            heads = 1 if x.dim() != 3 else heads
        stride = width if x.dim() > 3 or x.dim() == 1 else x.stride(0)
        self.kernels.calls.rms_norm(
            x.data_ptr(), stride, x.numel() // width, heads, width,
            0 if self.weight is None else self.weight.data_ptr(), self.n_weights, self.epsilon,
            delta, total, out, out_float,
        )  # fmt: skip


class CpuGatedDeltaNet:
    """See :class:`daemons.ops.operations.GatedDeltaNetOp`."""

    max_tokens: int | None = None

    def __init__(self, kernels: CpuKernels, params: GatedDeltaNetParams) -> None:
        self.kernels, self.params = kernels, params
        p, weight = params, params.norm.weight
        assert weight is not None
        self.constants = p.conv_weight, p.decay_rates, p.dt_bias, weight
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in self.constants)
        self.arguments = DeltaNetArguments(
            conv_weight=p.conv_weight.data_ptr(), decay_rates=p.decay_rates.data_ptr(), dt_bias=p.dt_bias.data_ptr(),
            norm_weight=weight.data_ptr(), n_key=p.n_key, n_value=p.n_value, dim=p.dim, width=p.conv_weight.shape[0],
            norm_eps=p.norm.epsilon,
        )  # fmt: skip

    def __call__(self, y: Tensor, pools: DeltaNetPools, ids: Tensor, kept: Tensor, spans: Tensor) -> Tensor:
        a, p, rows, n_slices = self.arguments, self.params, y.shape[0], ids.shape[0]
        if y.dtype is not BFLOAT16 or y.stride(1) != 1:
            y = y.to(BFLOAT16).contiguous()
        out = torch.empty(rows, p.n_value * p.dim, dtype=BFLOAT16)
        a.y, a.y_stride, a.slices, a.n = y.data_ptr(), y.stride(0), n_slices, rows // n_slices
        a.windows, a.states, a.updates, a.ids, a.kept = (x.data_ptr() for x in (*pools, ids, kept))
        a.out = out.data_ptr()
        self.kernels.calls.delta_net(byref(a))
        return out


class CpuPagedAttention:
    """See :data:`daemons.ops.operations.PagedAttention`."""

    def __init__(
        self, kernels: CpuKernels, window: int, scale: float, softcap: float, causal: bool, sinks: Tensor | None
    ) -> None:
        self.kernels, self.sinks = kernels, None if sinks is None else sinks.contiguous()
        self.arguments = AttentionArguments(
            window=window, causal=causal, scale=scale, softcap=softcap,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
        )  # fmt: skip
        self.pages: tuple[PagedTensor, PagedTensor] | None = None

    def __call__(self, q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery) -> Tensor:
        a, rows, heads, tables = self.arguments, q.shape[0], q.shape[1], where.tables
        if self.pages is None or self.pages[0] is not keys or self.pages[1] is not values:
            a.keys, a.values, self.pages = _pages(keys), _pages(values), (keys, values)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(rows, heads, a.values.width, dtype=BFLOAT16)
        a.q, a.stride, a.heads, a.out = q.data_ptr(), q.stride(0), heads, out.data_ptr()
        a.slices, a.n = where.starts.shape[0], where.n_tokens
        a.tables, a.table_stride = tables.data_ptr(), tables.stride(0)
        a.rows, a.starts = where.rows.data_ptr(), where.starts.data_ptr()
        a.lows = 0 if where.lows is None else where.lows.data_ptr()
        self.kernels.calls.paged_attention(byref(a))
        return out


def _pages(pages: PagedTensor) -> PagesArguments:
    if isinstance(pages, Q8Pages):
        numbers, scales, kind, width = pages.codes, pages.scales.data_ptr(), Q8_KIND, pages.width
    else:
        numbers, scales, kind, width = pages.pages, 0, PAGE_KINDS[pages.pages.dtype], pages.pages.shape[3]
    assert numbers.is_contiguous()
    assert width <= MAX_HEAD_DIM
    assert width % 2 == 0  # pairs of dims are multiplied
    return PagesArguments(numbers.data_ptr(), scales, kind, numbers.shape[2], width, numbers.shape[3])


class CpuOperations(TorchOperations):
    """See :class:`daemons.ops.operations.Operations`."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self._pages: dict[int, tuple[PagedTensor, PagesArguments]] = {}  # written to, by id
        self._updates: dict[tuple[int, int, torch.Size, torch.Size], UpdatesArguments] = {}  # of stacks, whole ones

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return CpuRmsNorm(self.kernels, weight, width, eps)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        if x.dtype is not BFLOAT16 or x.dim() != 2 or activation not in ACTIVATIONS:
            return super().act_and_mul(x, activation)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self.kernels.calls.act_and_mul(
            x.data_ptr(), x.stride(0), x.shape[0], out.shape[1], ACTIVATIONS.index(activation), out.data_ptr()
        )
        return out

    def output_gate(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        if x.dtype is not BFLOAT16 or gate.dtype is not BFLOAT16:
            return super().output_gate(x, gate, softplus)
        rows, heads, dim = x.shape
        x = x.contiguous()
        if gate.stride(1) != 1:
            gate = gate.contiguous()
        out = x.new_empty(rows, heads * dim)
        self.kernels.calls.output_gate(
            x.data_ptr(), rows, heads, dim, gate.data_ptr(), gate.stride(0), gate.shape[1] == heads != heads * dim,
            softplus, out.data_ptr(),
        )  # fmt: skip
        return out

    def qk_norm_rope(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, width = x.shape
        if x.dtype is not BFLOAT16 or norm.weight is None or norm.weight.numel() != heads * width:
            return super().qk_norm_rope(x, norm, cos, sin)
        if x.stride(2) != 1 or x.stride(1) != width:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=BFLOAT16)
        self.kernels.calls.qk_norm_rope(
            x.data_ptr(), x.stride(0), rows, heads, width, norm.weight.data_ptr(), norm.epsilon,
            cos.data_ptr(), sin.data_ptr(), cos.shape[-1], out.data_ptr(),
        )  # fmt: skip
        return out

    def rope_tables(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        n, frequencies = positions.shape[0], rope.inverse_frequencies
        cos, sin = (torch.empty(n, 1, frequencies.shape[0]) for _ in range(2))
        self.kernels.calls.rope_tables(
            positions.data_ptr(), n, frequencies.data_ptr(), frequencies.shape[0], rope.magnitude,
            cos.data_ptr(), sin.data_ptr(),
        )  # fmt: skip
        return cos, sin

    def write_pages(self, keys: PagedTensor, values: PagedTensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for pages, rows in ((keys, k), (values, v)):
            if rows.dtype is not BFLOAT16 or rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]:
                pages.write(slots, rows)
                continue
            found = self._pages.get(id(pages))
            if found is None:
                found = self._pages[id(pages)] = (pages, _pages(pages))
            self.kernels.calls.write_pages(
                byref(found[1]), slots.data_ptr(), rows.data_ptr(), rows.stride(0), rows.shape[0]
            )

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is not BFLOAT16 or y.dtype is not BFLOAT16 or x.shape != y.shape:
            return super().add(x, y)
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        self.kernels.calls.add(x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr())
        return out

    def add_bias(self, x: Tensor, bias: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            return super().add_bias(x, bias, ids)
        return self.add(x, self.concatenate([bias.expand(x.shape[0], -1)]))  # the kernel adds tensors of one shape

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        n, dtype = parts[0].shape[0], parts[0].dtype
        if any(x.dim() != 2 or x.stride(1) != 1 or x.dtype is not dtype for x in parts):
            return super().concatenate(parts)
        out, at = parts[0].new_empty(n, sum(x.shape[1] for x in parts)), 0
        size = dtype.itemsize
        for x in parts:
            self.kernels.calls.copy_rows(
                x.data_ptr(), x.stride(0) * size, n, x.shape[1] * size, out.data_ptr() + at, out.shape[1] * size
            )
            at += x.shape[1] * size
        return out

    def offset(self, x: Tensor, by: int) -> Tensor:
        x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int64)
        self.kernels.calls.offset(x.data_ptr(), x.numel(), by, out.data_ptr())
        return out

    def shift_rows(self, x: Tensor, pool: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or not all(t.is_contiguous() for t in (x, pool, ids, kept)):
            return super().shift_rows(x, pool, ids, kept)
        (b, n, width), out = x.shape, torch.empty(x.shape)
        places = (t.data_ptr() for t in (pool, ids, kept, out))
        self.kernels.calls.shift_rows(x.data_ptr(), b, n, width, *places)
        return out

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if {x.dtype, dtype} != {BFLOAT16, torch.float32} or not x.is_contiguous():
            return super().cast(x, dtype)
        out = torch.empty(x.shape, dtype=dtype)
        self.kernels.calls.cast(x.data_ptr(), dtype is BFLOAT16, x.numel(), out.data_ptr())
        return out

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits = self.cast(logits, torch.float32)
        if not logits.is_contiguous() or k > logits.shape[-1]:
            return super().top_k(logits, k)
        shape, n = (*logits.shape[:-1], k), logits.shape[-1]
        best, tokens = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        self.kernels.calls.top_k(logits.data_ptr(), logits.numel() // n, n, k, best.data_ptr(), tokens.data_ptr())
        return best, tokens

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.cast(logits, torch.float32)
        if not logits.is_contiguous():
            return super().most_likely(logits)
        shape, n = logits.shape[:-1], logits.shape[-1]
        tokens, probabilities = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        self.kernels.calls.most_likely(
            logits.data_ptr(), logits.numel() // n, n, tokens.data_ptr(), probabilities.data_ptr()
        )
        return tokens, probabilities

    def select_path(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        if any(x.dtype is not BFLOAT16 or not x.is_contiguous() for x in candidates[2:]):
            return super().select_path(candidates)
        slices, n, k = candidates.tokens.shape
        tokens, probabilities = torch.empty(slices, n, dtype=torch.int64), torch.empty(slices, n)
        places = (x.data_ptr() for x in (*candidates, tokens, probabilities))
        self.kernels.calls.select_path(byref(PathArguments(*places, n, k, candidates.gate.shape[-1])), slices)
        return tokens, probabilities

    def block_convolution(self, x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
        (rows, width), (_, taps, _) = x.shape, base.shape
        group = 2 * taps * width // delta.shape[1]
        if x.dtype is not BFLOAT16 or delta.dtype is not BFLOAT16 or group % LANES:
            return super().block_convolution(x, delta, base, side, n)
        x, delta, kernel = x.contiguous(), delta.contiguous(), base[side].contiguous()
        out = torch.empty_like(x)
        first = delta.data_ptr() + side * delta.shape[1] // 2 * delta.element_size()
        self.kernels.calls.block_convolution(
            x.data_ptr(), first, kernel.data_ptr(), rows, n, width, taps, group, delta.shape[1], out.data_ptr()
        )
        return out

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        return CpuPagedAttention(self.kernels, window, scale, softcap, causal, sinks)

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        if weights.dim not in DELTA_DIMS or weights.conv_weight.shape[0] > MAX_CONV_WIDTH:
            return None
        return CpuGatedDeltaNet(self.kernels, weights)

    def apply_updates(self, states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
        if states.shape[3] not in DELTA_DIMS:
            super().apply_updates(states, updates, source, rows, target)
            return
        key = states.data_ptr(), updates.data_ptr(), states.shape, updates.shape
        a = self._updates.get(key)
        if a is None:
            (layers, _, n_value, dim), width = states.shape[:4], updates.shape[2]
            a = self._updates[key] = UpdatesArguments(
                states=key[0], updates=key[1], layers=layers, states_stride=states.stride(0),
                updates_stride=updates.stride(0), n_key=key_heads(width, n_value, dim), n_value=n_value, dim=dim,
                width=width,
            )  # fmt: skip
        a.rows, a.n, a.source, a.target = rows.data_ptr(), rows.shape[0], source, target
        self.kernels.library.apply_updates(byref(a))
