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

from kernels import mixer

CHUNK = 64  # positions per chunk of the delta rule


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps)


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


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Gated delta rule in chunks.  q, k, v [B, T, H, D], g and beta [B, T, H]; state [B, H, D, D] moves on in place."""
    length, chunk = q.shape[1], CHUNK if q.shape[1] > 1 else 1
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2) for x in (g, beta))
    total = g.cumsum(-1)  # [B, H, N, C]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~later, float("-inf")).exp()
    inverse = unit_lower_inverse((beta[..., None] * (k @ k.mT) * decay).tril(-1))
    reached = total[..., None].exp()
    from_state = inverse @ (beta[..., None] * reached * k)
    updates = inverse @ (beta[..., None] * v)
    queries = q * reached
    keys = (k * (total[..., -1:] - total).exp()[..., None]).mT
    kept = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for n in range(q.shape[2]):
        updates[:, :, n] -= from_state[:, :, n] @ state
        out[:, :, n] = queries[:, :, n] @ state
        state.mul_(kept[:, :, n]).add_(keys[:, :, n] @ updates[:, :, n])
    out += ((q @ k.mT) * decay) @ updates
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length] * q.shape[-1] ** -0.5


@dataclass
class State:
    """What decoding keeps of B sequences, by layer: keys and values or convolution rows and delta state."""

    keys: dict[int, Tensor]  # [B, Hk, T, D]
    values: dict[int, Tensor]
    conv: dict[int, Tensor]  # [B, 3, C], before convolution and SiLU
    delta: dict[int, Tensor]  # [B, H, D, D], float32

    def part(self, rows: slice) -> State:
        kept = (self.keys, self.values, self.conv, self.delta)
        return State(*({i: t[rows] for i, t in tensors.items()} for tensors in kept))


class Target:
    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        self.meta, tensors = read_gguf(path)
        self.device, self.dtype = device, dtype
        m = {k.removeprefix("qwen35."): v for k, v in self.meta.items() if k.startswith("qwen35.")}
        self.n_layers, self.width = m["block_count"], m["embedding_length"]
        self.eps = m["attention.layer_norm_rms_epsilon"]
        self.heads, self.kv_heads = m["attention.head_count"], m["attention.head_count_kv"]
        self.head_dim, self.n_rot, self.theta = (
            m["attention.key_length"],
            m["rope.dimension_count"],
            m["rope.freq_base"],
        )
        self.delta_keys, self.delta_values = m["ssm.group_count"], m["ssm.time_step_rank"]
        self.delta_dim = m["ssm.state_size"]
        self.channels = (2 * self.delta_keys + self.delta_values) * self.delta_dim
        self.recurrent = m["attention.recurrent_layers"]
        self.mask_token = self.meta["tokenizer.ggml.mask_token_id"]
        self.eos = self.meta["tokenizer.ggml.eos_token_id"]
        for i in range(self.n_layers):  # one product for all that reads the same input
            b = f"blk.{i}."
            inputs = (
                ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
                if self.recurrent[i]
                else ("attn_q", "attn_k", "attn_v")
            )
            tensors[b + "inputs.weight"] = torch.cat([tensors.pop(f"{b}{n}.weight") for n in inputs])
            tensors[b + "gate_up.weight"] = torch.cat([tensors.pop(f"{b}{n}.weight") for n in ("ffn_gate", "ffn_up")])
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
        pages = (batch, self.kv_heads, length, self.head_dim)
        square = (batch, self.delta_values, self.delta_dim, self.delta_dim)
        return State(
            {i: torch.zeros(pages, device=self.device, dtype=self.dtype) for i in attention},
            {i: torch.zeros(pages, device=self.device, dtype=self.dtype) for i in attention},
            {i: torch.zeros(batch, 3, self.channels, device=self.device) for i in delta},
            {i: torch.zeros(square, device=self.device) for i in delta},
        )

    # parts shared by prefill and decoding ---------------------------------------------------------------------------

    def mlp(self, h: Tensor, b: str) -> Tensor:
        gate, up = self.linear(rms(h, self.w[b + "post_attention_norm.weight"], self.eps), b + "gate_up.weight").chunk(
            2, -1
        )
        return h + self.linear(F.silu(gate) * up, b + "ffn_down.weight")

    def qkv(self, x: Tensor, b: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, gate [B, T, H, D] and k, v [B, T, Hk, D]; positions [B or 1, T]."""
        n = self.kv_heads * self.head_dim
        q, k, v = self.linear(x, b + "inputs.weight").split((2 * self.heads * self.head_dim, n, n), -1)
        q, gate = q.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, -1)
        k, v = (y.unflatten(-1, (self.kv_heads, self.head_dim)) for y in (k, v))
        q, k = (
            rope(rms(y, self.w[b + f"attn_{n}_norm.weight"], self.eps), positions[..., None], self.n_rot, self.theta)
            for y, n in ((q, "q"), (k, "k"))
        )
        return q.to(self.dtype), gate, k.to(self.dtype), v

    def delta_net(self, x: Tensor, b: str, lengths: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        """One delta net; conv [B, 3, C] and state [B, H, D, D] move on in place to what follows ``lengths`` rows."""
        rows = self.linear(x, b + "inputs.weight")
        weight, rates, bias = (self.w[b + n] for n in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias"))
        if self.device == "cuda":
            out = mixer(rows, conv, weight, rates, bias, lengths, state, self.delta_keys).float()
            mixed = torch.cat((conv, rows[..., : self.channels].float()), 1)
        else:
            mixed = torch.cat((conv, rows[..., : self.channels].float()), 1)
            out = self.plain_mixer(rows, mixed, weight, rates, bias, lengths, state)
        at = (lengths[:, None] + torch.arange(3, device=x.device))[..., None]
        conv.copy_(mixed.gather(1, at.expand(-1, -1, self.channels)))
        z = rows[..., self.channels : self.channels + out[0, 0].numel()].float().view(out.shape)
        return self.linear(
            (rms(out, self.w[b + "ssm_norm.weight"], self.eps) * F.silu(z)).flatten(-2), b + "ssm_out.weight"
        )

    def plain_mixer(  # noqa: PLR0913
        self, rows: Tensor, mixed: Tensor, weight: Tensor, rates: Tensor, bias: Tensor, lengths: Tensor, state: Tensor
    ) -> Tensor:
        """kernels.mixer without a kernel; ``mixed`` [B, 3 + T, C] are the rows with the three before them."""
        length, n = rows.shape[1], self.delta_keys * self.delta_dim
        y = F.silu(sum(mixed[:, j : j + length] * weight[:, j] for j in range(4)))
        q, k, v = (p.unflatten(-1, (-1, self.delta_dim)) for p in y.split((n, n, y.shape[-1] - 2 * n), -1))
        repeat = self.delta_values // self.delta_keys
        q, k = ((p * torch.rsqrt(p.square().sum(-1, keepdim=True) + 1e-6)).repeat(1, 1, repeat, 1) for p in (q, k))
        alpha, beta = rows[..., -2 * self.delta_values :].float().chunk(2, -1)
        real = (torch.arange(length, device=rows.device) < lengths[:, None])[..., None].float()
        return delta_rule(q, k, v, rates * F.softplus(alpha + bias) * real, beta.sigmoid() * real, state)

    # whole passes ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, lengths: Tensor | None = None, capture: tuple[int, ...] = (), state: State | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after output_norm [B, T, E] and the captured layers' outputs [B, T, n * E].

        ids [B, T], padded on the right to longer than ``lengths`` [B]; ``state``, empty at first, is filled with what
        follows each sequence.
        """
        batch, length = ids.shape
        if lengths is None:
            lengths = torch.full((batch,), length, device=ids.device)
        positions = torch.arange(length, device=self.device)[None]
        h = F.embedding(ids, self.embedding).float()
        captured = []
        for i in range(self.n_layers):
            b = f"blk.{i}."
            x = rms(h, self.w[b + "attn_norm.weight"], self.eps)
            if self.recurrent[i]:
                if state is None:
                    conv = torch.zeros(batch, 3, self.channels, device=self.device)
                    delta = conv.new_zeros(batch, self.delta_values, self.delta_dim, self.delta_dim)
                else:
                    conv, delta = state.conv[i].zero_(), state.delta[i].zero_()
                h = h + self.delta_net(x, b, lengths, conv, delta)
            else:
                q, gate, k, v = self.qkv(x, b, positions)
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
                h = h + self.linear((out * gate.sigmoid()).flatten(-2), b + "attn_output.weight")
                if state is not None:
                    state.keys[i][:, :, :length], state.values[i][:, :, :length] = k, v
            h = self.mlp(h, b)
            if i in capture:
                captured.append(h.to(self.dtype))
        hidden = rms(h, self.w["output_norm.weight"], self.eps)
        return hidden.to(self.dtype), torch.cat(captured, -1) if captured else None

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, state: State) -> Tensor:
        """Logits [B, V] after one more token of each sequence, at its position [B]; ``state`` moves on in place."""
        h = F.embedding(tokens, self.embedding).float()[:, None]
        rows, one = torch.arange(len(tokens), device=self.device), torch.ones_like(tokens)
        for i in range(self.n_layers):
            b = f"blk.{i}."
            x = rms(h, self.w[b + "attn_norm.weight"], self.eps)
            if self.recurrent[i]:
                h = h + self.delta_net(x, b, one, state.conv[i], state.delta[i])
            else:
                q, gate, k, v = self.qkv(x, b, positions[:, None])
                keys, values = state.keys[i], state.values[i]
                keys[rows, :, positions], values[rows, :, positions] = k[:, 0], v[:, 0]
                group = q[:, 0].unflatten(1, (self.kv_heads, -1))  # [B, Hk, G, D]
                scores = (group @ keys.mT).float() * self.head_dim**-0.5
                unseen = torch.arange(keys.shape[2], device=self.device) > positions[:, None]
                scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
                out = (scores.softmax(-1).to(self.dtype) @ values).flatten(1, 2)[:, None]
                h = h + self.linear((out * gate.sigmoid()).flatten(-2), b + "attn_output.weight")
            h = self.mlp(h, b)
        return self.head(rms(h, self.w["output_norm.weight"], self.eps))[:, 0]
