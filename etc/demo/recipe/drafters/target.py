"""The demo model from its GGUF file in plain torch: batched prefill with captured hidden states, and batched decoding.

Weights are dequantised from the file that users run, so that a drafter learns what that file says, not what the
float weights say. Matrices have the given dtype; the residual stream, norms and the delta rule stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_step import delta_step, plain

CHUNK = 64  # positions per chunk of the delta rule


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, n_rot: int, theta: float) -> Tensor:
    """Rotate the first ``n_rot`` of D, dim i with i + n_rot / 2.  x [..., D], positions broadcast to [...]."""
    half = n_rot // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None].float() * rates
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x.split((half, half, x.shape[-1] - n_rot), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and dequantised float32 tensors."""
    reader = gguf.GGUFReader(path)
    tensors = {}
    for t in reader.tensors:
        values = gguf.dequantize(t.data, t.tensor_type)
        tensors[t.name] = torch.from_numpy(values.astype("float32").reshape([int(n) for n in t.shape][::-1]))
    return {k: f.contents() for k, f in reader.fields.items()}, tensors


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Inverse of I + a, a [..., n, n] strictly lower triangular: powers within 16 rows, then block by block."""
    n = a.shape[-1]
    if n > 16:
        h = n // 2
        first, second = unit_lower_inverse(torch.stack((a[..., :h, :h], a[..., h:, h:])))
        corner = -second @ a[..., h:, :h] @ first
        return torch.cat((torch.cat((first, torch.zeros_like(corner)), -1), torch.cat((corner, second), -1)), -2)
    inverse, power = torch.eye(n, device=a.device) - a, a
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks.  q, k, v [B, T, H, D], g and beta [B, T, H], state [B, H, D, D]; all float32."""
    length = q.shape[1]
    pad = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2) for x in (g, beta))
    total = g.cumsum(-1)  # [B, H, N, C]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~later, float("-inf")).exp()
    fast = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # the inverse amplifies rounding
    inverse = unit_lower_inverse((beta[..., None] * (k @ k.mT) * decay).tril(-1))
    torch.backends.cuda.matmul.allow_tf32 = fast
    reached = total[..., None].exp()
    from_state = inverse @ (beta[..., None] * reached * k)
    updates = inverse @ (beta[..., None] * v)
    queries = q * reached
    keys = (k * (total[..., -1:] - total).exp()[..., None]).mT.contiguous()
    kept = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for n in range(q.shape[2]):
        updates[:, :, n] -= from_state[:, :, n] @ state
        out[:, :, n] = queries[:, :, n] @ state
        state = kept[:, :, n] * state + keys[:, :, n] @ updates[:, :, n]
    out += ((q @ k.mT) * decay) @ updates
    out = out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]
    return out * q.shape[-1] ** -0.5, state


@dataclass
class State:
    """What decoding keeps of B sequences, by layer: keys and values or convolution rows and delta state."""

    keys: dict[int, Tensor]  # [B, Hk, T, D]
    values: dict[int, Tensor]
    conv: dict[int, Tensor]  # [B, 3, C], before convolution and SiLU
    delta: dict[int, Tensor]  # [B, H, D, D], float32


class Target:
    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        self.meta, tensors = read_gguf(path)
        self.device, self.dtype = device, dtype
        m = {k.removeprefix("qwen35."): v for k, v in self.meta.items() if k.startswith("qwen35.")}
        self.n_layers, self.width, self.eps = (
            m["block_count"],
            m["embedding_length"],
            m["attention.layer_norm_rms_epsilon"],
        )
        self.heads, self.kv_heads, self.head_dim = (
            m["attention.head_count"],
            m["attention.head_count_kv"],
            m["attention.key_length"],
        )
        self.n_rot, self.theta = m["rope.dimension_count"], m["rope.freq_base"]
        self.delta_keys, self.delta_values, self.delta_dim = (
            m["ssm.group_count"],
            m["ssm.time_step_rank"],
            m["ssm.state_size"],
        )
        self.recurrent = m["attention.recurrent_layers"]
        self.mask_token = self.meta["tokenizer.ggml.mask_token_id"]
        self.eos = self.meta["tokenizer.ggml.eos_token_id"]
        matrix = {n for n, t in tensors.items() if t.ndim == 2 and "conv1d" not in n}
        self.w = {n: t.to(device, dtype if n in matrix else torch.float32) for n, t in tensors.items()}
        self.embedding = self.w["token_embd.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x.to(self.dtype), self.w[name])

    def head(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden, "token_embd.weight")

    def new_state(self, batch: int, length: int) -> State:
        attention = [i for i in range(self.n_layers) if not self.recurrent[i]]
        delta = [i for i in range(self.n_layers) if self.recurrent[i]]
        channels = (2 * self.delta_keys + self.delta_values) * self.delta_dim
        pages = (batch, self.kv_heads, length, self.head_dim)
        make = torch.zeros
        return State(
            {i: make(pages, device=self.device, dtype=self.dtype) for i in attention},
            {i: make(pages, device=self.device, dtype=self.dtype) for i in attention},
            {i: make(batch, 3, channels, device=self.device) for i in delta},
            {i: make(batch, self.delta_values, self.delta_dim, self.delta_dim, device=self.device) for i in delta},
        )

    # one layer's parts, shared by prefill and decoding -------------------------------------------------------------

    def mlp(self, x: Tensor, b: str) -> Tensor:
        return self.linear(
            F.silu(self.linear(x, b + "ffn_gate.weight")) * self.linear(x, b + "ffn_up.weight"), b + "ffn_down.weight"
        )

    def qkv(self, x: Tensor, b: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, gate [B, T, H, D] and k, v [B, T, Hk, D]; positions [B or 1, T]."""
        q, gate = self.linear(x, b + "attn_q.weight").unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, -1)
        k, v = (
            self.linear(x, b + n).unflatten(-1, (self.kv_heads, self.head_dim))
            for n in ("attn_k.weight", "attn_v.weight")
        )
        q, k = (
            rope(rms(y, self.w[b + n], self.eps), positions[..., None], self.n_rot, self.theta).to(self.dtype)
            for y, n in ((q, "attn_q_norm.weight"), (k, "attn_k_norm.weight"))
        )
        return q, gate, k, v

    def delta_inputs(self, mixed: Tensor, x: Tensor, b: str) -> tuple[Tensor, ...]:
        """q, k, v [B, T, H, D], decay logs and betas [B, T, H] from the rows and the three rows before them."""
        weight, length = self.w[b + "ssm_conv1d.weight"], x.shape[1]
        y = F.silu(sum(mixed[:, j : j + length] * weight[:, j] for j in range(4)))
        n = self.delta_keys * self.delta_dim
        q, k, v = (p.unflatten(-1, (-1, self.delta_dim)) for p in y.split((n, n, y.shape[-1] - 2 * n), -1))
        repeat = self.delta_values // self.delta_keys
        q, k = ((p * torch.rsqrt(p.square().sum(-1, keepdim=True) + 1e-6)).repeat(1, 1, repeat, 1) for p in (q, k))
        alpha = self.linear(x, b + "ssm_alpha.weight").float()
        g = self.w[b + "ssm_a"] * F.softplus(alpha + self.w[b + "ssm_dt.bias"])
        return q, k, v, g, self.linear(x, b + "ssm_beta.weight").float().sigmoid()

    def delta_output(self, out: Tensor, x: Tensor, b: str) -> Tensor:
        z = self.linear(x, b + "attn_gate.weight").float().view(out.shape)
        return self.linear(
            (rms(out, self.w[b + "ssm_norm.weight"], self.eps) * F.silu(z)).flatten(-2), b + "ssm_out.weight"
        )

    # whole passes ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, lengths: Tensor | None = None, capture: tuple[int, ...] = (), state: State | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after output_norm [B, T, E] and the captured layers' outputs [B, T, n * E].

        ids [B, T], padded on the right; with ``lengths`` [B], ``state`` is filled with what follows each sequence.
        """
        batch, length = ids.shape
        positions = torch.arange(length, device=self.device)[None]
        real = None if lengths is None else (positions < lengths[:, None])[..., None].float()
        h = F.embedding(ids, self.embedding).float()
        captured = []
        for i in range(self.n_layers):
            b = f"blk.{i}."
            x = rms(h, self.w[b + "attn_norm.weight"], self.eps)
            if self.recurrent[i]:
                mixed = F.pad(self.linear(x, b + "attn_qkv.weight").float(), (0, 0, 3, 0))
                q, k, v, g, beta = self.delta_inputs(mixed, x, b)
                if real is not None:
                    g, beta = g * real, beta * real
                first = torch.zeros(batch, self.delta_values, self.delta_dim, self.delta_dim, device=self.device)
                out, last = delta_rule(q, k, v, g, beta, first)
                h = h + self.delta_output(out, x, b)
                if state is not None and lengths is not None:
                    rows = lengths[:, None] + torch.arange(3, device=self.device)
                    state.conv[i].copy_(mixed.gather(1, rows[..., None].expand(-1, -1, mixed.shape[-1])))
                    state.delta[i].copy_(last)
            else:
                q, gate, k, v = self.qkv(x, b, positions)
                out = F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
                ).transpose(1, 2)
                h = h + self.linear((out * gate.sigmoid()).flatten(-2), b + "attn_output.weight")
                if state is not None:
                    state.keys[i][:, :, :length] = k.transpose(1, 2)
                    state.values[i][:, :, :length] = v.transpose(1, 2)
            h = h + self.mlp(rms(h, self.w[b + "post_attention_norm.weight"], self.eps), b)
            if i in capture:
                captured.append(h.to(self.dtype))
        hidden = rms(h, self.w["output_norm.weight"], self.eps)
        return hidden.to(self.dtype), torch.cat(captured, -1) if captured else None

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, state: State) -> Tensor:
        """Logits [B, V] after one more token of each sequence, at its position [B]; ``state`` moves on in place."""
        h = F.embedding(tokens, self.embedding).float()[:, None]
        rows = torch.arange(len(tokens), device=self.device)
        for i in range(self.n_layers):
            b = f"blk.{i}."
            x = rms(h, self.w[b + "attn_norm.weight"], self.eps)
            if self.recurrent[i]:
                mixed = torch.cat((state.conv[i], self.linear(x, b + "attn_qkv.weight").float()), 1)
                state.conv[i].copy_(mixed[:, 1:])
                step = delta_step if self.device == "cuda" else plain
                out = step(*(y[:, 0] for y in self.delta_inputs(mixed, x, b)), state.delta[i])[:, None]
                h = h + self.delta_output(out * self.delta_dim**-0.5, x, b)
            else:
                q, gate, k, v = self.qkv(x, b, positions[:, None])
                keys, values = state.keys[i], state.values[i]
                keys[rows, :, positions], values[rows, :, positions] = k[:, 0], v[:, 0]
                group = q[:, 0].unflatten(1, (self.kv_heads, -1))  # [B, Hk, G, D]
                scores = (group @ keys.mT).float() * self.head_dim**-0.5
                hidden_keys = torch.arange(keys.shape[2], device=self.device) > positions[:, None]
                scores = scores.masked_fill(hidden_keys[:, None, None], float("-inf"))
                out = (scores.softmax(-1).to(self.dtype) @ values).flatten(1, 2)[:, None]
                h = h + self.linear((out * gate.sigmoid()).flatten(-2), b + "attn_output.weight")
            h = h + self.mlp(rms(h, self.w[b + "post_attention_norm.weight"], self.eps), b)
        return self.head(rms(h, self.w["output_norm.weight"], self.eps))[:, 0]
