"""Speculative greedy decoding with a drafter's GGUF file in float32 on a CPU, block by block, compared with plain decoding.

Shares no code with the training but the target: drafts are made one block at a time from cached keys and values, as
a server makes them.  Fails when the tokens differ from plain greedy decoding.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from target import Target, read_gguf, rms, rope

Weights = dict[str, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """q [N, H, D], k and v [T, Hk, D], ``hidden`` [N, T]: keys not to see.  [N, H * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (y.repeat_interleave(group, 1) for y in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q, k) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), v).flatten(1)


class DFlashDrafter:
    def __init__(self, meta: dict[str, Any], w: Weights, target: Target) -> None:
        m = {k.removeprefix("dflash."): v for k, v in meta.items() if k.startswith("dflash.")}
        assert m["attention.causal"] is False and "attention.sliding_window" not in m
        self.m, self.w, self.target = m, w, target
        self.eps, self.theta, self.d = (
            m["attention.layer_norm_rms_epsilon"],
            m["rope.freq_base"],
            m["attention.key_length"],
        )
        self.layers, self.count = m["block_count"], m["block_size"] - 1
        self.capture = tuple(i - 1 for i in m["target_layers"])
        self.mask = meta["tokenizer.ggml.mask_token_id"]
        self.convolved, self.selects = "conv_kernel_size" in m, "selector_top_k" in m
        self.context: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]

    def key(self, x: Tensor, b: str, positions: Tensor) -> Tensor:
        k = rms(
            (x @ self.w[b + "attn_k.weight"].T).unflatten(-1, (-1, self.d)), self.w[b + "attn_k_norm.weight"], self.eps
        )
        return rope(k, positions[:, None], self.d, self.theta)

    def commit(self, tokens: list[int], hidden: Tensor, features: Tensor, first: int) -> None:
        """Inject the features [T, n * E] of tokens committed at positions from ``first``."""
        c = rms(features @ self.w["fc.weight"].T, self.w["enc.output_norm.weight"], self.eps)
        positions = torch.arange(first, first + len(c))
        for i in range(self.layers):
            b = f"blk.{i}."
            v = (c @ self.w[b + "attn_v.weight"].T).unflatten(-1, (-1, self.d))
            self.context[i].append((self.key(c, b, positions), v))

    def convolve(self, x: Tensor, delta: Tensor, base: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(x)
        for tap in range(self.m["conv_kernel_size"]):
            shifted = torch.cat((torch.zeros(tap, x.shape[1]), x[: len(x) - tap]))
            out += (base[side, tap] + delta[:, side, tap].repeat_interleave(self.m["conv_group_size"], -1)) * shifted
        return out

    def sublayer(self, h: Tensor, b: str, kind: str, function: Any) -> Tensor:
        x = rms(h, self.w[f"{b}{kind}_norm.weight"], self.eps)
        if not self.convolved:
            return h + function(x)
        groups = h.shape[1] // self.m["conv_group_size"]
        delta = (x @ self.w[f"{b}{kind}_conv_proj.weight"].T).view(len(x), 2, self.m["conv_kernel_size"], groups)
        base = self.w[f"{b}{kind}_conv_base"]
        return h + self.convolve(function(self.convolve(x, delta, base, 0)), delta, base, 1)

    def draft(self, last: int, position: int) -> list[int]:
        h = self.target.embedding[torch.tensor([last] + [self.mask] * self.count)]
        positions = torch.arange(position, position + len(h))
        for i in range(self.layers):
            b = f"blk.{i}."
            w = {
                n: self.w[f"{b}{n}.weight"]
                for n in ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
            }

            def attention(x: Tensor, b: str = b, i: int = i, w: Weights = w) -> Tensor:
                q = rms((x @ w["attn_q"].T).unflatten(-1, (-1, self.d)), self.w[b + "attn_q_norm.weight"], self.eps)
                own = self.key(x, b, positions), (x @ w["attn_v"].T).unflatten(-1, (-1, self.d))
                k, v = (torch.cat(parts) for parts in zip(*self.context[i], own, strict=True))
                return attend(rope(q, positions[:, None], self.d, self.theta), k, v) @ w["attn_output"].T

            def mlp(x: Tensor, w: Weights = w) -> Tensor:
                return (F.silu(x @ w["ffn_gate"].T) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T

            h = self.sublayer(h, b, "attn", attention)
            h = self.sublayer(h, b, "ffn", mlp)
        hidden = rms(h, self.w["output_norm.weight"], self.eps)[1:]
        logits = self.target.head(hidden)
        return self.select(last, hidden, logits) if self.selects else logits.argmax(-1).tolist()

    def select(self, last: int, hidden: Tensor, logits: Tensor) -> list[int]:
        unary, candidates = logits.topk(self.m["selector_top_k"], -1)
        out = []
        for u, c, z in zip(unary, candidates, hidden @ self.w["selector_hidden.weight"].T, strict=True):
            scores = u + self.w["selector_successor.weight"][c] @ (self.w["selector_predecessor.weight"][last] * z)
            last = int(c[scores.argmax()])
            out.append(last)
        return out


class MtpDrafter:
    count, capture = 3, (0,)

    def __init__(self, meta: dict[str, Any], w: Weights, target: Target) -> None:
        assert meta["qwen35.nextn_predict_layers"] == 1
        self.block = f"blk.{meta['qwen35.block_count'] - 1}."
        self.w, self.target = {k.removeprefix(self.block): v for k, v in w.items()}, target
        self.keys = torch.zeros(0, target.kv_heads, target.head_dim)
        self.values, self.g = self.keys, torch.zeros(0)

    def rows(self, tokens: list[int], g: Tensor, first: int) -> Tensor:
        """Rows at positions from ``first`` (1 or later); their keys and values are appended."""
        t, w, eps = self.target, self.w, self.target.eps
        e = rms(t.embedding[torch.tensor(tokens)], w["nextn.enorm.weight"], eps)
        u = torch.cat((e, rms(g, w["nextn.hnorm.weight"], eps)), -1) @ w["nextn.eh_proj.weight"].T
        x = rms(u, w["attn_norm.weight"], eps)
        positions = torch.arange(first, first + len(tokens))
        q, gate = (x @ w["attn_q.weight"].T).unflatten(-1, (t.heads, -1)).chunk(2, -1)
        k = (x @ w["attn_k.weight"].T).unflatten(-1, (t.kv_heads, -1))
        q, k = (
            rope(rms(y, w[f"attn_{n}_norm.weight"], eps), positions[:, None], t.n_rot, t.theta)
            for y, n in ((q, "q"), (k, "k"))
        )
        self.keys = torch.cat((self.keys, k))
        self.values = torch.cat((self.values, (x @ w["attn_v.weight"].T).view(k.shape)))
        later = torch.arange(1, len(self.keys) + 1) > positions[:, None]
        out = attend(q, self.keys, self.values, later) * gate.flatten(1).sigmoid()
        u = u + out @ w["attn_output.weight"].T
        x = rms(u, w["post_attention_norm.weight"], eps)
        u = u + (F.silu(x @ w["ffn_gate.weight"].T) * (x @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
        return rms(u, w["nextn.shared_head_norm.weight"], eps)

    def commit(self, tokens: list[int], hidden: Tensor, features: Tensor, first: int) -> None:
        """Fill rows of committed tokens with the target's true hidden states [T, E]."""
        g = torch.cat((self.g, hidden[:-1]))
        start = first or 1  # token 0 has no row
        self.rows(tokens[len(tokens) - len(g) :], g, start)
        self.g = hidden[-1:]

    def draft(self, last: int, position: int) -> list[int]:
        kept, out, g = len(self.keys), [], self.g
        for n in range(self.count):
            g = self.rows([last], g, position + n)
            last = int(self.target.head(g)[0].argmax())
            out.append(last)
        self.keys, self.values = self.keys[:kept], self.values[:kept]
        return out


def speculate(
    target: Target, drafter: DFlashDrafter | MtpDrafter, prompt: list[int], new: int
) -> tuple[list[int], list[int]]:
    """Generated tokens and accepted drafts per verify step."""
    hidden, features = target.prefill(torch.tensor([prompt]), capture=drafter.capture)
    drafter.commit(prompt, hidden[0], features[0], 0)
    tokens, accepted = [*prompt, int(target.head(hidden[0, -1]).argmax())], []
    while tokens[-1] != target.eos and len(tokens) - len(prompt) < new:
        n = len(tokens) - 1
        drafts = drafter.draft(tokens[-1], n)
        hidden, features = target.prefill(torch.tensor([tokens + drafts]), capture=drafter.capture)
        chosen = target.head(hidden[0, n:]).argmax(-1).tolist()
        a = next((i for i, (d, c) in enumerate(zip(drafts, chosen, strict=False)) if d != c), len(drafts))
        kept = chosen[: a + 1]
        if target.eos in kept:
            kept = kept[: kept.index(target.eos) + 1]
        drafter.commit(tokens[n:] + drafts[:a], hidden[0, n : n + a + 1], features[0, n : n + a + 1], n)
        tokens, accepted = tokens + kept, [*accepted, a]
    return tokens[len(prompt) :][:new], accepted


def plain(target: Target, prompt: list[int], new: int) -> list[int]:
    state = target.new_state(1, len(prompt) + new)
    hidden, _ = target.prefill(torch.tensor([prompt]), torch.tensor([len(prompt)]), state=state)
    out = [int(target.head(hidden[0, -1]).argmax())]
    while out[-1] != target.eos and len(out) < new:
        position = torch.tensor([len(prompt) + len(out) - 1])
        out.append(int(target.decode(torch.tensor(out[-1:]), position, state)[0].argmax()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="held-out.json")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    target = Target(args.model, "cpu", torch.float32)
    prompts = [p["tokens"] for p in json.loads(args.prompts.read_text())[: args.count]]
    answers = [plain(target, p, args.new) for p in prompts]
    for path in args.drafters:
        meta, w = read_gguf(path)
        kind = DFlashDrafter if meta["general.architecture"] == "dflash" else MtpDrafter
        made, steps, counts = 0, 0, Counter[int]()
        for prompt, answer in zip(prompts, answers, strict=True):
            drafter = kind(meta, w, target)
            tokens, accepted = speculate(target, drafter, prompt, args.new)
            if tokens != answer:
                raise SystemExit(f"{path}: speculative decoding gave other tokens than plain decoding after {prompt}")
            made, steps = made + len(tokens) - 1, steps + len(accepted)
            counts.update(accepted)
        reached = [sum(c for a, c in counts.items() if a >= j) / steps for j in range(1, drafter.count + 1)]
        print(f"{path.name}: {made / steps:.3f} tokens per verify step ({made} in {steps}); share of steps that accept")
        print("  at least j drafts:", ", ".join(f"{x:.3f}" for x in reached), flush=True)


if __name__ == "__main__":
    main()
