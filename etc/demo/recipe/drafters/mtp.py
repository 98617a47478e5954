"""The multi-token-prediction head (nextn) of the qwen35 family, for training: chains of drafts from every position at once.

Row p joins the embedding of token x_p with a hidden state that describes position p - 1: first the target's own (after
output_norm), in further drafts the head's (after shared_head_norm).  There is no row 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash import Norm, matrix
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

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q scaled, gate [B, H, T, D] and k, v [B, Hk, T, D]; positions [T]."""
        t = self.target
        q, gate = (y.transpose(1, 2) for y in self.attn_q(x).unflatten(-1, (t.heads, 2 * t.head_dim)).chunk(2, -1))
        k, v = (m(x).unflatten(-1, (t.kv_heads, t.head_dim)).transpose(1, 2) for m in (self.attn_k, self.attn_v))
        q = rope(self.attn_q_norm(q), positions, t.n_rot, t.theta) * t.head_dim**-0.5
        return q, gate, rope(self.attn_k_norm(k), positions, t.n_rot, t.theta), v

    def chain(self, hidden: Tensor, ids: Tensor, depth: int, drafting: bool) -> list[Tensor]:
        """The head's outputs m [B, T, E] of drafts 1 to ``depth``; column c of draft d is row p = c + d, position c + d.

        hidden [B, T, E] and ids [B, T] of whole sequences.  Column c begins with token x_{c+1} and the target's
        hidden of position c.  ``drafting`` feeds drafted tokens back, not those of the sequence.
        """
        t, length = self.target, ids.shape[1]
        columns = torch.arange(length, device=ids.device)
        later = columns[None] > columns[:, None]
        group = t.heads // t.kv_heads
        first: tuple[Tensor, Tensor] | None = None
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of a column's earlier drafts
        out: list[Tensor] = []
        tokens, g = ids.roll(-1, 1), hidden
        for d in range(1, depth + 1):
            e = self.enorm(F.embedding(tokens, t.embedding).to(g.dtype))
            u = self.eh_proj(torch.cat((e, self.hnorm(g)), -1))
            q, gate, k, v = self.qkv(self.attn_norm(u), columns + d)
            k, v = (y.repeat_interleave(group, 1) for y in (k, v))
            if first is None:
                first = k, v
            else:
                own.append((k, v))
            far = (q @ first[0].mT).masked_fill(later, float("-inf"))
            near = [(q * key).sum(-1, keepdim=True) for key, _ in own]
            weights = torch.cat([far, *near], -1).float().softmax(-1).to(v.dtype)
            mixed = weights[..., :length] @ first[1]
            for n, (_, value) in enumerate(own):
                mixed = mixed + weights[..., length + n, None] * value
            u = u + self.attn_output((mixed * gate.sigmoid()).transpose(1, 2).flatten(-2))
            x = self.post_attention_norm(u)
            u = u + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))
            g = self.shared_head_norm(u)
            out.append(g)
            tokens = F.linear(g, t.embedding.to(g.dtype)).argmax(-1) if drafting else ids.roll(-1 - d, 1)
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
