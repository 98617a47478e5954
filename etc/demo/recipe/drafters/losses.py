"""Losses of the drafters: cross-entropy against half the token that came, half the target's distribution there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from data import Batch
from dflash import DFlash
from kernels import MixedLoss
from mtp import Mtp


def follows(batch: Batch) -> Tensor:
    """Which tokens [B, T] count and are followed by such."""
    valid = batch.counts & batch.counts.roll(-1, 1)
    valid[:, -1] = False
    return valid


def choose_anchors(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Random anchors [B, A]: tokens that count and are followed by such; and which of them are real."""
    valid = follows(batch)
    keys = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1)
    value, anchors = keys.topk(count, -1)
    return anchors, value >= 0


def blocks_loss(  # noqa: PLR0913
    model: DFlash, batch: Batch, anchors: Tensor, real: Tensor, soft: float, gamma: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the blocks at ``anchors`` [B, A], which drafts [B, A, n] are right and which are of tokens that count."""
    n, target, last = model.shape.block - 1, model.target, batch.ids.shape[1] - 1
    hidden = model(batch.features, batch.ids, anchors)[..., 1:, :].flatten(0, 2)
    steps = torch.arange(n, device=anchors.device)
    at = anchors[..., None] + steps + 1  # positions of the drafted tokens [B, A, n]
    inside, at = at <= last, at.clamp(max=last).flatten(1)
    kept = (inside & batch.counts.gather(1, at).view(inside.shape)).cumprod(-1) * real[..., None]
    label, before = batch.ids.gather(1, at).flatten(), batch.ids.gather(1, at - 1).flatten()
    weight = (torch.exp(-steps / gamma) * kept).flatten()
    weight = weight * (scale / weight.sum().clamp(min=1e-6))
    rows = (at - 1)[..., None].expand(-1, -1, target.width)
    teacher = target.head(batch.hidden.gather(1, rows)).flatten(0, 1).detach()
    logits = F.linear(hidden, target.embedding.to(hidden.dtype))
    pairs = None
    if model.selector is not None:
        pairs = F.linear(model.selector.gate(before, hidden), model.selector.successor.weight).to(logits.dtype)
    total, right = MixedLoss.apply(logits, pairs, teacher, label, weight, soft)
    return total, right.view(kept.shape), kept


def dflash_loss(  # noqa: PLR0913
    model: DFlash, batch: Batch, soft: float, gamma: float, spacing: int, scale: float = 1.0, follow: bool = False
) -> tuple[Tensor, Tensor]:
    """Loss of one step, times ``scale``, the share of right tokens per position, and the mean of tokens a verify step.

    With ``follow``, half of the blocks begin where a verify step of the other half would have ended: after the first
    wrong draft.  Decoding meets such places, which are harder than random ones, and the shares are theirs.
    """
    count = batch.ids.shape[1] // spacing
    anchors, real = choose_anchors(batch, count // 2 if follow else count)
    total, right, kept = blocks_loss(model, batch, anchors, real, soft, gamma, scale / 2 if follow else scale)
    if follow:
        at = anchors + 1 + (right * kept).cumprod(-1).sum(-1).long()
        inside, at = at < batch.ids.shape[1], at.clamp(max=batch.ids.shape[1] - 1)
        real = real & inside & follows(batch).gather(1, at)
        more, right, kept = blocks_loss(model, batch, at, real, soft, gamma, scale / 2)
        total = total + more
    right = right * kept
    step = (1 + right.cumprod(-1).sum(-1)) * real  # tokens of a verify step there
    return total, torch.cat((right.sum((0, 1)) / kept.sum((0, 1)).clamp(min=1), (step.sum() / real.sum().clamp(min=1))[None]))


def mtp_loss(model: Mtp, batch: Batch, depth: int, soft: float) -> tuple[Tensor, Tensor]:
    """Loss of one step, over half of the batch's rows, and the share of right tokens per draft."""
    target, length = model.target, batch.ids.shape[1]
    outputs = model.chain(batch.hidden, batch.ids, depth, False)
    counts = F.pad(batch.counts, (0, depth + 2))
    # column c drafts x_{c + 2} first, and then on; x_{c + 1} counts too
    kept = torch.stack([counts[:, d + 1 : d + 1 + length] for d in range(depth + 1)], -1).cumprod(-1)[..., 1:]
    keys = torch.rand(batch.ids.shape, device=batch.ids.device) + kept[..., 0]
    rows = keys.flatten().topk(keys.numel() // 2).indices
    sequence, column = rows // length, rows % length
    weights = kept.flatten(0, 1).index_select(0, rows).float()
    total, shares = torch.zeros((), device=rows.device), []
    for d, output in enumerate(outputs, 1):
        label = batch.ids[sequence, (column + 1 + d).clamp(max=length - 1)]
        teacher = target.head(batch.hidden[sequence, (column + d).clamp(max=length - 1)]).detach()
        logits = F.linear(output.flatten(0, 1).index_select(0, rows), target.embedding.to(output.dtype))
        weight = weights[:, d - 1] / weights[:, d - 1].sum().clamp(min=1)
        loss, right = MixedLoss.apply(logits, None, teacher, label, weight * 0.8 ** (d - 1), soft)
        total = total + loss
        shares.append((right * weight).sum())
    return total, torch.stack(shares)
