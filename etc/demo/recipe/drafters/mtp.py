"""The multi-token-prediction head (nextn) of the qwen35 family, for training: chains of drafts from every position at once.

Row p joins the embedding of token x_p with a hidden state that describes position p - 1: first the target's own (after
output_norm), in further drafts the head's (after shared_head_norm).  There is no row 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash import Norm, matrix, spread
from target import Target, rope


class Mtp(nn.Module):
    """One gated full-attention layer of the target's shape, started from the target's last layer."""

    def __init__(self, target: Target, ffn: int) -> None:
        super().__init__()
        self.target = target
        width, eps, d = target.width, target.eps, target.head_dim
        q, kv = target.heads * d, target.kv_heads * d
        self.enorm, self.hnorm, self.shared_head_norm = Norm(width, eps), Norm(width, eps), Norm(width, eps)
        self.attn_norm, self.post_attention_norm = Norm(width, eps), Norm(width, eps)
        self.attn_q_norm, self.attn_k_norm = Norm(d, eps), Norm(d, eps)
        self.eh_proj = matrix(width, 2 * width)
        self.attn_q, self.attn_k, self.attn_v = matrix(2 * q, width), matrix(kv, width), matrix(kv, width)
        self.attn_output = matrix(width, q, 0.5)
        self.ffn_gate, self.ffn_up, self.ffn_down = matrix(ffn, width), matrix(ffn, width), matrix(width, ffn, 0.5)
        self.shared_head_norm.weight.data.copy_(target.w["output_norm.weight"])
        self.eh_proj.weight.data[:, width:] += torch.eye(width)

    def before(self, e: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u [N, E], q and gate [N, H, D], k and v [N, Hk, D] of rows at positions [N]."""
        t = self.target
        u = self.eh_proj(torch.cat((self.enorm(e), self.hnorm(g)), -1))
        x = self.attn_norm(u)
        q, gate = self.attn_q(x).unflatten(-1, (t.heads, 2 * t.head_dim)).chunk(2, -1)
        k, v = (m(x).unflatten(-1, (t.kv_heads, t.head_dim)) for m in (self.attn_k, self.attn_v))
        q, k = (rope(y, positions[:, None], t.n_rot, t.theta) for y in (self.attn_q_norm(q), self.attn_k_norm(k)))
        return u, q, gate, k, v

    def after(self, u: Tensor, out: Tensor, gate: Tensor) -> Tensor:
        """m [N, E] from the attention's output [N, H, D]."""
        u = u + self.attn_output((out * gate.sigmoid()).flatten(1))
        x = self.post_attention_norm(u)
        return self.shared_head_norm(u + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x)))

    def chain(self, hidden: Tensor, ids: Tensor, depth: int, drafting: bool) -> list[Tensor]:
        """The head's outputs m [B, T, E] of drafts 1 to ``depth``; column c of draft d is row p = c + d, position c + d.

        hidden [B, T, E] and ids [B, T] of whole sequences.  Column c begins with token x_{c+1} and the target's
        hidden of position c.  ``drafting`` feeds drafted tokens back, not those of the sequence.
        """
        t, (batch, length) = self.target, ids.shape
        columns = torch.arange(length, device=ids.device)
        # keys: the true rows up to the column's own, then the column's own earlier drafts
        seen, own = columns[:, None] >= columns, columns[:, None] == columns
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out: list[Tensor] = []
        tokens, g = ids.roll(-1, 1), hidden.flatten(0, 1).requires_grad_()  # as in later drafts: one compilation
        for d in range(1, depth + 1):
            e = F.embedding(tokens.flatten(), t.embedding)
            u, q, gate, k, v = self.before(e, g, (columns + d).repeat(batch))
            q, k, v = (y.unflatten(0, (batch, length)).transpose(1, 2) for y in (q, k, v))
            keys.append(spread(k, t.heads // t.kv_heads, 1))
            values.append(spread(v, t.heads // t.kv_heads, 1))
            mask = torch.cat((seen, *[own] * (d - 1)), 1)
            mixed = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
            g = self.after(u, mixed.transpose(1, 2).reshape(-1, t.heads, t.head_dim), gate)
            out.append(g.unflatten(0, (batch, length)))
            tokens = F.linear(out[-1], t.embedding.to(g.dtype)).argmax(-1) if drafting else ids.roll(-1 - d, 1)
        return out

    @torch.no_grad()
    def drafts(self, hidden: Tensor, ids: Tensor, count: int) -> Tensor:
        """Drafted tokens [B, T, count]: row c follows the tokens up to c + 1."""
        outputs = torch.stack(self.chain(hidden, ids, count, True), -2)
        return F.linear(outputs, self.target.embedding.to(outputs.dtype)).argmax(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Weights by their names in a GGUF file of architecture qwen35."""
        extra = {"enorm", "hnorm", "shared_head_norm", "eh_proj"}
        block = f"blk.{self.target.n_layers}."
        out = {}
        for name, weight in self.named_parameters():
            part = name.removesuffix(".weight")
            out[f"{block}{'nextn.' if part in extra else ''}{name}"] = weight
        return out


def compile_parts() -> None:
    """Compile what has the same shape in all batches of a training."""
    for name in ("before", "after"):
        setattr(Mtp, name, torch.compile(getattr(Mtp, name), dynamic=False))
