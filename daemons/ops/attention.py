"""Causal attention of some query rows over gathered keys, with grouped heads, window and soft cap.

Knows tensors only: the caller gathers pages and builds the mask.  ``reference`` is the oracle of every
faster form.

Shapes: B slices, n query tokens per slice, L key positions, H query heads, K kv heads, D head dim of keys, Dv of
values.  Query head h reads kv head h // (H / K).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.workspace import SCORE_ELEMENTS

MAX_FLASH_DIM = 256


@dataclass(frozen=True, slots=True)
class Causal:
    """In place of a mask: the last query sees the last ``window`` keys (0: all), each one before it one earlier."""

    window: int = 0


def visible(
    queries: Tensor,
    keys: Tensor,
    window: int,
    causal: bool = True,
    lows: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Mask ``[B, 1, n, L]``: positions up to the query, without ``causal`` up to the last query of its slice; limited
    to the last ``window`` positions if there is a window (``symmetric``: and to as many ahead), and to those from
    ``lows`` [B] on.  ``ends`` [B, n]: the last position that each query sees, in place of its own.

    ``queries`` [B, n] and ``keys`` [B, L] are positions; a window includes the query itself; 0: none.
    """
    q, k = queries[:, None, :, None], keys[:, None, None, :]
    last = q if ends is None else ends[:, None, :, None]
    mask = k <= (last if causal else q[:, :, -1:].expand_as(q))
    if window:
        mask = mask & (k > q - window)
        if symmetric:
            mask = mask & (k < q + window)
    return mask if lows is None else mask & (k >= lows[:, None, None, None])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Causal | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend ``q`` [B, n, H, D] to ``k`` [B, L, K, D] and ``v`` [B, L, K, Dv]; returns [B, n, H, Dv] of q's dtype.

    ``mask`` [B, 1, n, L], True where visible; None: every query sees every key.  ``sinks`` float32 [H]: the logit of
    one more key of each head, whose value is zero.  Softmax is float32.
    """
    if isinstance(mask, Causal):
        if softcap == 0.0 and _takes_flash(q, v):
            return _flash(q, k, v, mask.window, scale, sinks)
        positions = torch.arange(k.shape[1], device=q.device)[None]
        mask = visible(positions[:, -q.shape[1] :], positions, mask.window)
    if softcap > 0.0 or sinks is not None or (q.dtype == torch.float32 and q.device.type != "cpu"):
        return reference(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)  # GPUs' kernels may use TF32
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    folded = _fold(q, k.shape[2])
    if mask is not None and n > 1 and group > 1:
        mask = mask.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
    keys, values, dtype = k.transpose(1, 2), v.transpose(1, 2), q.dtype
    if q.device.type == "cpu" and dtype != torch.float32 and not _multiplies_bfloat16():
        folded, keys, values = folded.float(), keys.float(), values.float()
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return _unfold(out.to(dtype), n)


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sinks: Tensor | None) -> Tensor:
    lengths, limits = (q.shape[1], k.shape[1]), (window - 1, 0) if window else (None, None)
    found, sums = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, *lengths, 0.0, True, False),
        scale=scale, window_size_left=limits[0], window_size_right=limits[1],
    )[:2]  # fmt: skip
    if sinks is not None:  # what the keys' weights are of all
        found = (found * torch.sigmoid(sums - sinks.view(-1, 1)).transpose(1, 2).unsqueeze(-1)).to(q.dtype)
    return found  # type: ignore[no-any-return]


def is_flash_device(device: torch.device) -> bool:
    """Whether causal attention of half precision takes flash kernels there, which read no mask and skip what it hides.

    The library's kernels for masks are planned anew for each shape, for 50 ms and more.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    dim = q.shape[-1]
    return (
        is_flash_device(q.device) and q.dtype != torch.float32 and dim == v.shape[-1] <= MAX_FLASH_DIM and dim % 8 == 0
    )


@cache
def _multiplies_bfloat16() -> bool:
    """Whether torch's fused attention multiplies half precision with AVX-512; else float32 is three times as fast.

    Where ATEN_CPU_CAPABILITY hides AVX-512 from torch while oneDNN still sees it, half precision raises "pack_vnni2 is
    only supported when avx512 is supported" (torch 2.11 on a Xeon with AMX).
    """
    seen_by_onednn = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(seen_by_onednn) and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`attention` in plain steps, with a bounded number of float32 scores at a time."""
    values = v.transpose(1, 2).float()
    found = []
    for scores, unfolded in scored_parts(q, k, mask, scale=scale, softcap=softcap):
        if sinks is not None:
            n_kv, n_rows = scores.shape[1:3]
            column = sinks.view(n_kv, -1).repeat_interleave(n_rows * n_kv // len(sinks), dim=1)
            scores = torch.cat((scores, column.expand(len(scores), -1, -1).unsqueeze(-1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)
        found.append(unfolded(torch.matmul(weights[..., : k.shape[1]], values)))
    return torch.cat(found, dim=1).to(q.dtype)


def scored_parts(
    q: Tensor, k: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Yield float32 scores [B, K, G r, L] of r queries at a time, -inf where masked, and what turns rows
    [B, K, G r, D] into [B, r, H, D].
    """
    batch, n, heads, _ = q.shape
    kv_heads, length = k.shape[2], k.shape[1]
    keys = k.permute(0, 2, 3, 1).float()
    rows = max(1, SCORE_ELEMENTS // max(1, batch * heads * length))
    for at in range(0, n, rows):
        part = q[:, at : at + rows]
        scores = torch.matmul(_fold(part.float(), kv_heads), keys).mul_(scale)
        if softcap > 0.0:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            hidden = ~mask[:, :, at : at + rows]
            by_group = scores.view(batch, kv_heads, heads // kv_heads, -1, length)
            scores = by_group.masked_fill(hidden.unsqueeze(2), float("-inf")).flatten(2, 3)
        yield scores, partial(_unfold, n=part.shape[1])


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """[B, n, H, D] -> [B, K, G n, D]: heads of one kv head become query rows, so keys are not repeated."""
    b, n, h, d = q.shape
    if n == 1:
        return q.reshape(b, kv_heads, h // kv_heads, d)
    return q.view(b, n, kv_heads, h // kv_heads, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)


def _unfold(o: Tensor, n: int) -> Tensor:
    """[B, K, G n, Dv] -> [B, n, H, Dv]"""
    b, k, rows, d = o.shape
    if n == 1:
        return o.reshape(b, 1, k * rows, d)
    return o.view(b, k, rows // n, n, d).permute(0, 3, 1, 2, 4).reshape(b, n, k * (rows // n), d)
