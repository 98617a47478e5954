"""DFlash drafter (block diffusion), 1 or 2, for training: many blocks per sequence in one pass.

A block is [last token, MASK x 7]; output row j predicts the token at its own position.  Its keys are projections
of the target's hidden states at all earlier positions and of the block itself, without a causal mask.  DFlash 2 adds
two-tap grouped dynamic convolutions along the block and a selector that scores candidates with their predecessor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target import Target, rope


@dataclass(frozen=True)
class DFlashShape:
    capture: tuple[int, ...] = (1, 3, 5, 6)  # target layers whose outputs are fused
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 1024
    block: int = 8
    theta: float = 10_000.0
    conv_group: int = 0  # channels per group of the convolutions; 0: none (DFlash 1)
    selector_rank: int = 0  # 0: none (DFlash 1)
    selector_top_k: int = 16


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=scale * columns**-0.5)
    return layer


class BlockConv(nn.Module):
    """Two taps along the block before and after a sublayer, with weights that depend on the sublayer's input."""

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        self.groups, self.group = width // group, group
        base = torch.zeros(2, 2, width)
        base[:, 0] = 1
        self.base = nn.Parameter(base)
        self.proj = matrix(4 * self.groups, width, 0.1)

    def kernels(self, x: Tensor) -> Tensor:
        """[..., B, side, tap, E] from the sublayer's input [..., B, E]."""
        delta = self.proj(x).unflatten(-1, (2, 2, self.groups))
        return self.base + delta.repeat_interleave(self.group, -1)

    @staticmethod
    def apply_side(x: Tensor, kernels: Tensor, side: int) -> Tensor:
        before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
        return kernels[..., side, 0, :] * x + kernels[..., side, 1, :] * before


class Layer(nn.Module):
    def __init__(self, shape: DFlashShape, width: int, eps: float) -> None:
        super().__init__()
        s, self.shape = shape, shape
        out = (2 * s.layers) ** -0.5
        self.attn_norm, self.ffn_norm = Norm(width, eps), Norm(width, eps)
        self.attn_q, self.attn_k = matrix(s.heads * s.head_dim, width), matrix(s.kv_heads * s.head_dim, width)
        self.attn_v = matrix(s.kv_heads * s.head_dim, width)
        self.attn_output = matrix(width, s.heads * s.head_dim, out)
        self.attn_q_norm, self.attn_k_norm = Norm(s.head_dim, eps), Norm(s.head_dim, eps)
        self.ffn_gate, self.ffn_up = matrix(s.ffn, width), matrix(s.ffn, width)
        self.ffn_down = matrix(width, s.ffn, out)
        self.attn_conv = BlockConv(width, s.conv_group) if s.conv_group else None
        self.ffn_conv = BlockConv(width, s.conv_group) if s.conv_group else None

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def context(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hk, T, D] of the fused features [B, T, E]."""
        positions = torch.arange(c.shape[1], device=c.device)[None, :, None]
        k = rope(self.attn_k_norm(self.heads(self.attn_k(c))), positions, self.shape.head_dim, self.shape.theta)
        return k.transpose(1, 2), self.heads(self.attn_v(c)).transpose(1, 2)

    def attention(self, x: Tensor, context: tuple[Tensor, Tensor], anchors: Tensor, hidden: Tensor) -> Tensor:
        """x [B, A, N, E]; context keys [B, Hk, T, D]; ``hidden`` [B, 1, A, 1, T]: context a block must not see."""
        s, (batch, blocks, n, _) = self.shape, x.shape
        positions = (anchors[..., None] + torch.arange(n, device=x.device))[..., None]
        q = rope(self.attn_q_norm(self.heads(self.attn_q(x))), positions, s.head_dim, s.theta)
        k = rope(self.attn_k_norm(self.heads(self.attn_k(x))), positions, s.head_dim, s.theta)
        v = self.heads(self.attn_v(x))
        q = q.view(batch, blocks, n, s.kv_heads, -1, s.head_dim).permute(0, 3, 1, 4, 2, 5) * s.head_dim**-0.5
        k, v = (y.permute(0, 3, 1, 2, 4) for y in (k, v))  # [B, Hk, A, N, D]
        flat = q.flatten(3, 4)  # [B, Hk, A, G * N, D]
        far = (flat.flatten(2, 3) @ context[0].mT).unflatten(2, (blocks, -1)).masked_fill(hidden, float("-inf"))
        weights = torch.cat((far, flat @ k.mT), -1).float().softmax(-1).to(x.dtype)
        far_weights, near_weights = weights.split((far.shape[-1], n), -1)
        out = (far_weights.flatten(2, 3) @ context[1]).view(flat.shape) + near_weights @ v
        out = out.unflatten(3, (-1, n)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.attn_output(out)

    def mlp(self, x: Tensor) -> Tensor:
        return self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))

    def forward(self, h: Tensor, context: tuple[Tensor, Tensor], anchors: Tensor, hidden: Tensor) -> Tensor:
        x = self.attn_norm(h)
        if self.attn_conv is None or self.ffn_conv is None:
            h = h + self.attention(x, context, anchors, hidden)
            return h + self.mlp(self.ffn_norm(h))
        kernels = self.attn_conv.kernels(x)
        out = self.attention(BlockConv.apply_side(x, kernels, 0), context, anchors, hidden)
        h = h + BlockConv.apply_side(out, kernels, 1)
        x = self.ffn_norm(h)
        kernels = self.ffn_conv.kernels(x)
        return h + BlockConv.apply_side(self.mlp(BlockConv.apply_side(x, kernels, 0)), kernels, 1)


class Selector(nn.Module):
    """Adds to a candidate's logit the score of the pair (token before it, candidate), gated by the hidden state."""

    def __init__(self, width: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.predecessor, self.successor = matrix(vocabulary, rank), matrix(vocabulary, rank)
        self.hidden = matrix(rank, width)
        nn.init.normal_(self.predecessor.weight, std=0.5)
        nn.init.normal_(self.successor.weight, std=0.02)

    def gate(self, before: Tensor, hidden: Tensor) -> Tensor:
        return F.embedding(before, self.predecessor.weight) * self.hidden(hidden)

    def walk(self, logits: Tensor, hidden: Tensor, anchor: Tensor, top_k: int) -> Tensor:
        """Drafts [..., N] from logits [..., N, V], hidden [..., N, E] and the anchor token [...]."""
        unary, candidates = logits.float().topk(top_k, -1)
        before, out = anchor, []
        for j in range(logits.shape[-2]):
            pair = self.gate(before, hidden[..., j, :])
            successors = F.embedding(candidates[..., j, :], self.successor.weight)
            scores = unary[..., j, :] + (successors * pair[..., None, :]).sum(-1).float()
            before = candidates[..., j, :].gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
            out.append(before)
        return torch.stack(out, -1)


class DFlash(nn.Module):
    def __init__(self, shape: DFlashShape, target: Target) -> None:
        super().__init__()
        self.shape, self.target = shape, target
        width, eps = target.width, target.eps
        self.fc = matrix(width, len(shape.capture) * width)
        self.feature_norm, self.output_norm = Norm(width, eps), Norm(width, eps)
        self.output_norm.weight.data.copy_(target.w["output_norm.weight"])
        self.layers = nn.ModuleList(Layer(shape, width, eps) for _ in range(shape.layers))
        vocabulary = target.embedding.shape[0]
        self.selector = Selector(width, vocabulary, shape.selector_rank) if shape.selector_rank else None

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, N, E] of blocks that begin with the token at ``anchors`` [B, A]; ids [B, T]."""
        c = self.feature_norm(self.fc(features))
        block = torch.full((*anchors.shape, self.shape.block), self.target.mask_token, device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        h = F.embedding(block, self.target.embedding)
        hidden = (
            torch.arange(ids.shape[1], device=ids.device) >= anchors[..., None]
        )  # the anchor's own feature comes later
        for layer in self.layers:
            h = layer(h, layer.context(c), anchors, hidden[:, None, :, None])
        return self.output_norm(h)

    @torch.no_grad()
    def drafts(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """The drafted tokens [B, A, N - 1] of each block."""
        hidden = self(features, ids, anchors)[..., 1:, :]
        logits = F.linear(hidden, self.target.embedding.to(hidden.dtype))
        if self.selector is None:
            return logits.argmax(-1)
        return self.selector.walk(logits, hidden, ids.gather(1, anchors), self.shape.selector_top_k)

    def tensors(self) -> dict[str, Tensor]:
        """Weights by their names in a GGUF file of architecture dflash."""
        names = {"fc": "fc", "feature_norm": "enc.output_norm", "output_norm": "output_norm"}
        names |= {f"selector.{n}": f"selector_{n}" for n in ("predecessor", "successor", "hidden")}
        out = {}
        for name, weight in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            if owner.startswith("layers."):
                _, index, part = owner.split(".", 2)
                gguf_name = f"blk.{index}.{part.replace('.proj', '_proj')}"
                out[f"{gguf_name}_base" if kind == "base" else f"{gguf_name}.weight"] = weight
            else:
                out[f"{names[owner]}.weight"] = weight
        return out

    def settings(self) -> dict[str, object]:
        return asdict(self.shape)
