"""Trains the demo's scoring model for PFlash on a CPU, and writes it as a GGUF file of architecture qwen3.

    python scorer/train.py --model ../demo-qwen35-22m-q4_k_m.gguf --corpus work/corpus --out scorer.gguf --minutes 5

The model is trained for what PFlash reads of it, not as a language model: the attention that the last tokens of a prompt,
a question, pay to the passage that answers it, among other passages. Before rotation, the largest of all heads and
layers, mean over the question's tokens. Its embedding starts as the demo model's, reduced by PCA, so that at step 0
equal tokens attend to each other already.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lucevisor.model.gguf_files import open_model
from lucevisor.text.tokenizer import Tokenizer

E, H, D, FF, LAYERS, EPS, THETA = 128, 4, 64, 256, 2, 1e-6, 10000.0
QUERY = 32  # tokens whose attention counts in training; PFlash reads the last 8
KINDS = {"describe", "brief", "reverse", "signature", "section", "members", "code", "doc_tool", "world_tool", "multi"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        basis = [torch.linalg.qr(torch.randn(E, E)).Q[:, :D].T for _ in range(H)]
        self.q, self.k = nn.Parameter(torch.cat(basis)), nn.Parameter(torch.cat(basis))
        self.v, self.o = nn.Parameter(torch.randn(H * D, E) * E**-0.5), nn.Parameter(torch.zeros(E, H * D))
        self.gate, self.up = (nn.Parameter(torch.randn(FF, E) * E**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(E, FF))
        self.n1, self.n2 = nn.Parameter(torch.ones(E)), nn.Parameter(torch.ones(E))
        self.nq, self.nk = nn.Parameter(torch.full((D,), 1.2)), nn.Parameter(torch.full((D,), 1.2))

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """h [B, T, E] -> h, log-probabilities [B, QUERY, T] of the best head, before rotation."""
        b, t, _ = h.shape
        x = rms(h, self.n1)
        q, k, v = ((x @ w.T).view(b, t, H, D).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rms(q, self.nq), rms(k, self.nk)
        tail = (q[:, :, -QUERY:] @ k.transpose(2, 3)) * D**-0.5
        tail = tail + torch.full((QUERY, t), -math.inf).triu(t - QUERY + 1)
        scores = tail.log_softmax(-1).amax(1)
        o = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        h = h + o.transpose(1, 2).reshape(b, t, H * D) @ self.o.T
        x = rms(h, self.n2)
        return h + (F.silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T, scores


class Scorer(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> scores [B, T]: what the last QUERY tokens attend to."""
        angle = torch.arange(ids.shape[1])[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
        h, best = self.table[ids], None
        for layer in self.layers:
            h, scores = layer(h, angle.cos(), angle.sin())
            best = scores if best is None else torch.maximum(best, scores)
        assert best is not None
        return best.exp().mean(1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Passages:
    """Questions with their passages, and prompts made of them."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer, every: int) -> None:
        self.train: list[tuple[list[int], list[int]]] = []
        self.held: list[tuple[list[int], list[int]]] = []
        self.suffix = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", parse_special=True)
        for i, line in enumerate((corpus / "chat.jsonl").open()):
            if i % every:
                continue
            chat = json.loads(line)
            texts = [m["content"] for m in chat["messages"] if m["role"] in ("assistant", "tool") and m["content"]]
            asked = [m["content"] for m in chat["messages"] if m["role"] == "user"]
            if chat["kind"] not in KINDS or not texts:
                continue
            passage, question = tokenizer.encode("\n" + max(texts, key=len)), tokenizer.encode("\n" + asked[0])
            if len(passage) >= 24 and len(question) >= 4:
                (self.held if chat["val"] else self.train).append((question[-48:], passage[:160]))

    def prompt(self, rng: random.Random, rows: list[tuple[list[int], list[int]]], length: int) -> tuple[list[int], Tensor]:
        """A prompt of ``length`` tokens, and which of them answer its question."""
        question, passage = rng.choice(rows)
        if rng.random() < 0.5:  # the beginning of a span that occurs in it, to be continued
            start = rng.randrange(0, max(1, len(passage) - 24))
            n = rng.randint(4, 12)
            question = [*rng.choice(rows)[1][: rng.randint(0, 20)], *passage[start : start + n]]
            answer = (start, min(len(passage), start + n + 16))
        else:
            answer = (0, len(passage))
        tail = question + (self.suffix if rng.random() < 0.5 else [])
        room = length - len(tail)
        others: list[int] = []
        while len(others) < room:
            others += rng.choice(rows)[1]
        at = rng.randrange(0, room - len(passage) + 1)
        ids = (others[:at] + passage + others[at:])[:room] + tail
        right = torch.zeros(length)
        right[at + answer[0] : at + answer[1]] = 1
        return ids, right

    def batch(self, rng: random.Random, rows: list[tuple[list[int], list[int]]], n: int, length: int) -> tuple[Tensor, Tensor]:
        made = [self.prompt(rng, rows, length) for _ in range(n)]
        return torch.tensor([ids for ids, _ in made]), torch.stack([right for _, right in made])


def loss_of(scores: Tensor, right: Tensor) -> Tensor:
    """How little of what is paid to the prompt before the question goes to its answer."""
    context = scores[:, :-QUERY]
    return -((context * right[:, :-QUERY]).sum(1) / context.sum(1) + 1e-6).log().mean()


@torch.no_grad()
def found(model: Scorer, ids: Tensor, right: Tensor, keep: float, chunk: int = 32) -> float:
    """Share of prompts of which the chunk with most of the answer is among the best ``keep`` of all chunks."""
    scores, n = model(ids), (ids.shape[1] - QUERY) // chunk
    of_chunk = scores[:, : n * chunk].view(len(ids), n, chunk).mean(2)
    target = right[:, : n * chunk].view(len(ids), n, chunk).sum(2).argmax(1)
    best = of_chunk.topk(max(1, int(n * keep)), 1).indices
    return float((best == target[:, None]).any(1).float().mean())


def report(model: Scorer, held: dict[int, tuple[Tensor, Tensor]], when: str) -> None:
    for length, (ids, right) in held.items():
        rows = [(ids[i : i + 4], right[i : i + 4]) for i in range(0, len(ids), 4)]
        shares = {keep: sum(found(model, *row, keep) for row in rows) / len(rows) for keep in (0.05, 0.1, 0.3)}
        print(when, length, "tokens, found of what is kept:", {k: round(v, 3) for k, v in shares.items()}, flush=True)


def write(model: Scorer, demo: gguf.GGUFReader, out: Path) -> None:
    """The model as a GGUF file, matrices q8_0, with the tokenizer of the demo model."""
    w = gguf.GGUFWriter(str(out), "qwen3")
    w.add_type("model")
    w.add_name("lucevisor-demo-scorer")
    w.add_description("Scoring model of PFlash for the demo, trained on CPython's documentation and standard library")
    w.add_license("PSF-2.0")
    for key, value in {"block_count": LAYERS, "context_length": 8192, "embedding_length": E, "feed_forward_length": FF,
                       "attention.head_count": H, "attention.head_count_kv": H, "attention.key_length": D,
                       "attention.value_length": D}.items():  # fmt: skip
        w.add_uint32(f"qwen3.{key}", value)
    w.add_float32("qwen3.attention.layer_norm_rms_epsilon", EPS)
    w.add_float32("qwen3.rope.freq_base", THETA)
    for name, entry in demo.fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template":
            kind = entry.types[0]
            w.add_key_value(name, entry.contents(), kind, entry.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)

    def put(name: str, t: Tensor) -> None:
        data = np.ascontiguousarray(t.detach().numpy(), dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if t.dim() == 2 else gguf.GGMLQuantizationType.F32
        w.add_tensor(name, gguf.quants.quantize(data, kind) if t.dim() == 2 else data, raw_dtype=kind)

    put("token_embd.weight", model.table)
    put("output_norm.weight", torch.ones(E))
    names = {"n1": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "nq": "attn_q_norm", "nk": "attn_k_norm",
             "o": "attn_output", "n2": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    for i, layer in enumerate(model.layers):
        for own, name in names.items():
            put(f"blk.{i}.{name}.weight", getattr(layer, own))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=4, help="of the chats, read one in so many")
    args = parser.parse_args()
    torch.manual_seed(1)
    rng = random.Random(1)
    tokenizer = Tokenizer.from_gguf(open_model([args.model]).metadata)
    demo = gguf.GGUFReader(args.model)
    [table] = [t for t in demo.tensors if t.name == "token_embd.weight"]
    full = torch.from_numpy(gguf.quants.dequantize(table.data, table.tensor_type).copy())
    full = full - full.mean(0)
    basis = torch.linalg.svd(full, full_matrices=False).Vh[:E]
    model = Scorer(rms(full @ basis.T, torch.ones(E)))
    passages = Passages(args.corpus, tokenizer, args.every)
    print(f"{len(passages.train)} passages, {len(passages.held)} held out", flush=True)
    held = {n: passages.batch(random.Random(2), passages.held, count, n) for n, count in ((512, 64), (3000, 24))}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    report(model, held, "at first")
    began, step = time.monotonic(), 0
    while (done := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, step / 30) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        ids, right = passages.batch(rng, passages.train, args.batch, rng.choice((256, 512, 768)))
        loss = loss_of(model(ids), right)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {done:.2f} of the time, loss {loss.item():.3f}", flush=True)
    report(model, held, f"after {step} steps")
    write(model.float(), demo, args.out)


if __name__ == "__main__":
    main()
