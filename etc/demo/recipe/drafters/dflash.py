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
    capture: tuple[int, ...] = (1, 3, 5, 6, 7)  # target layers whose outputs are fused
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


def spread(x: Tensor, n: int, dim: int) -> Tensor:
    """Each entry along ``dim`` (0 or more) n times; a CUDA graph can hold it."""
    shape = list(x.shape)
    shape.insert(dim + 1, n)
    return x.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=scale * columns**-0.5)
    return layer


class BlockConv(nn.Module):
    """Two taps along the block before (side 0) and after (side 1) a sublayer; their weights depend on its input."""

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        self.groups, self.group = width // group, group
        base = torch.zeros(2, 2, width)
        base[:, 0] = 1
        self.base = nn.Parameter(base)
        self.proj = matrix(4 * self.groups, width, 0.1)

    def delta(self, x: Tensor) -> Tensor:
        """[..., side, tap, group] from the sublayer's input [..., E]."""
        return self.proj(x).unflatten(-1, (2, 2, self.groups))

    def forward(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
        weights = self.base[side].to(x.dtype).unflatten(-1, (self.groups, self.group)) + delta[..., side, :, :, None]
        grouped = (y.unflatten(-1, (self.groups, self.group)) for y in (x, before))
        return sum(weights[..., tap, :, :] * y for tap, y in enumerate(grouped)).flatten(-2)


class Layer(nn.Module):
    """In parts of constant shape (but for attention) that torch.compile can take: N blocks of 8 rows."""

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

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., Hk, D] each, of features or of block rows [..., E] at positions [...]."""
        k, v = (m(x).unflatten(-1, (-1, self.shape.head_dim)) for m in (self.attn_k, self.attn_v))
        return rope(self.attn_k_norm(k), positions[..., None], self.shape.head_dim, self.shape.theta), v

    def before(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [N, 8, heads, D] and the convolutions' delta, of rows h [N, 8, E] at positions [N, 8]."""
        x, delta = self.attn_norm(h), None
        if self.attn_conv is not None:
            delta = self.attn_conv.delta(x)
            x = self.attn_conv(x, delta, 0)
        q = self.attn_q_norm(self.attn_q(x).unflatten(-1, (-1, self.shape.head_dim)))
        q = rope(q, positions[..., None], self.shape.head_dim, self.shape.theta)
        return q, *self.key_value(x, positions), delta

    def after(self, h: Tensor, out: Tensor, delta: Tensor | None) -> Tensor:
        """The rest of the layer, from the attention's output [N, 8, H * D]."""
        o = self.attn_output(out)
        if self.attn_conv is not None:
            o = self.attn_conv(o, delta, 1)
        h = h + o
        x = self.ffn_norm(h)
        if self.ffn_conv is None:
            return h + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))
        delta = self.ffn_conv.delta(x)
        x = self.ffn_conv(x, delta, 0)
        return h + self.ffn_conv(self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x)), delta, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Attention of the blocks [N, 8, heads, D] of B sequences to their context [B, T, Hk, D] and themselves.

        seen [B, 1, A * 8, T + A * 8]: which keys a row sees.
        """
        batch, group = context[0].shape[0], self.shape.heads // self.shape.kv_heads
        q, k, v = (y.reshape(batch, -1, *y.shape[2:]) for y in (q, k, v))
        k, v = (spread(torch.cat(pair, 1), group, 2) for pair in ((context[0], k), (context[1], v)))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=seen)
        return out.transpose(1, 2).flatten(2)


class Selector(nn.Module):
    """Adds to a candidate's logit the score of the pair (token before it, candidate), gated by the hidden state."""

    def __init__(self, width: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.predecessor, self.successor = matrix(vocabulary, rank), matrix(vocabulary, rank)
        self.hidden = matrix(rank, width)
        nn.init.normal_(self.predecessor.weight, std=0.5)
        nn.init.normal_(self.successor.weight, std=0.02)

    def gate(self, before: Tensor, hidden: Tensor) -> Tensor:
        rows = self.predecessor.weight.index_select(0, before.flatten())
        return rows.view(*before.shape, -1) * self.hidden(hidden)

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

    def fuse(self, features: Tensor) -> Tensor:
        return self.feature_norm(self.fc(features))

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, 8, E] of blocks that begin with the token at ``anchors`` [B, A]; ids [B, T]."""
        (batch, length), n = ids.shape, self.shape.block
        tokens = torch.full((*anchors.shape, n), self.target.mask_token, device=ids.device)
        tokens[..., 0] = ids.gather(1, anchors)
        h = F.embedding(
            tokens.view(-1, n), self.target.embedding
        ).requires_grad_()  # as in the next layer: one compilation
        positions = (anchors[..., None] + torch.arange(n, device=ids.device)).view(-1, n)
        columns = torch.arange(length, device=ids.device)
        blocks = spread(torch.arange(anchors.shape[1], device=ids.device), n, 0)
        far = columns < spread(anchors, n, 1)[..., None]  # the anchor's own feature comes later
        near = (blocks[:, None] == blocks).expand(batch, -1, -1)
        seen = torch.cat((far, near), -1)[:, None]
        fused, context_positions = self.fuse(features.flatten(0, 1)), columns.repeat(batch)
        for layer in self.layers:
            context = layer.key_value(fused, context_positions)
            context = tuple(y.unflatten(0, (batch, length)) for y in context)
            q, k, v, delta = layer.before(h, positions)
            h = layer.after(h, layer.attend(q, k, v, context, seen).view(h.shape[0], n, -1), delta)
        return self.output_norm(h).unflatten(0, anchors.shape)

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


def compile_parts() -> None:
    """Compile what has the same shape in all batches of a training."""
    for owner, name in ((Layer, "before"), (Layer, "after"), (Layer, "key_value"), (DFlash, "fuse")):
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))
