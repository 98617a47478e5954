"""Generate, train and evaluate the demo model's drafters on one GPU, each part within its seconds.

Text: the target's own continuations (generate.py). Loss of a drafted token: cross-entropy against half the token that
came, half the target's distribution there. Figures: tokens per verify step of greedy decoding on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dflash
import mtp
from acceptance import evaluate_dflash, evaluate_mtp
from data import Batch, Loader
from dflash import DFlash, DFlashShape
from generate import Sequences, continue_prompts
from gguf_files import write_dflash, write_mtp
from kernels import MixedLoss
from mtp import Mtp
from optimizer import Muon
from target import Target

START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


def choose_anchors(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Random anchors [B, A] among the generated tokens but the last, and which of them are real."""
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    valid = (columns >= batch.prompt[:, None]) & (columns < batch.length[:, None] - 1)
    keys = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1)
    value, anchors = keys.topk(min(count, keys.shape[1]), -1)
    return anchors, value >= 0


def dflash_loss(model: DFlash, batch: Batch, soft: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Loss of one step and the share of right tokens per position."""
    n, target = model.shape.block - 1, model.target
    anchors, real = choose_anchors(batch, batch.ids.shape[1] // 8)
    hidden = model(batch.features, batch.ids, anchors)[..., 1:, :].flatten(0, 2)
    steps = torch.arange(n, device=anchors.device)
    at = anchors[..., None] + steps + 1  # positions of the drafted tokens [B, A, n]
    kept = real[..., None] & (at < batch.length[:, None, None])
    at = at.clamp(max=batch.ids.shape[1] - 1).flatten(1)
    label, before = batch.ids.gather(1, at).flatten(), batch.ids.gather(1, at - 1).flatten()
    weight = (torch.exp(-steps / gamma) * kept).flatten()
    weight = weight / weight.sum()
    rows = (at - 1)[..., None].expand(-1, -1, target.width)
    teacher = target.head(batch.hidden.gather(1, rows)).flatten(0, 1).detach()
    logits = F.linear(hidden, target.embedding.to(hidden.dtype))
    total, right = MixedLoss.apply(logits, teacher, label, weight, soft)
    if model.selector is not None:
        logits = logits + F.linear(model.selector.gate(before, hidden), model.selector.successor.weight).to(
            logits.dtype
        )
        paired, right = MixedLoss.apply(logits, teacher, label, weight, soft)
        total = total + paired
    per_step = (right.view(kept.shape) * kept).sum((0, 1)) / kept.sum((0, 1)).clamp(min=1)
    return total, per_step


def mtp_loss(model: Mtp, batch: Batch, depth: int, soft: float) -> tuple[Tensor, Tensor]:
    """Loss of one step, over half of the batch's rows, and the share of right tokens per draft."""
    target, length = model.target, batch.ids.shape[1]
    outputs = model.chain(batch.hidden, batch.ids, depth, False)
    columns = torch.arange(length, device=batch.ids.device)
    # column c predicts x_{c + 1 + d}; c + 1 is at least the first generated token
    valid = (columns + 1 >= batch.prompt[:, None]) & (columns + 2 < batch.length[:, None])
    keys = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1).flatten()
    rows = keys.topk(len(keys) // 2).indices
    sequence, column = rows // length, rows % length
    total, shares = torch.zeros((), device=rows.device), []
    for d, output in enumerate(outputs, 1):
        kept = (valid.flatten()[rows] & (column + 1 + d < batch.length[sequence])).float()
        label = batch.ids[sequence, (column + 1 + d).clamp(max=length - 1)]
        teacher = target.head(batch.hidden[sequence, (column + d).clamp(max=length - 1)]).detach()
        logits = F.linear(output.flatten(0, 1)[rows], target.embedding.to(output.dtype))
        loss, right = MixedLoss.apply(logits, teacher, label, kept / kept.sum().clamp(min=1), soft)
        total = total + loss * 0.8 ** (d - 1)
        shares.append((right * kept).sum() / kept.sum().clamp(min=1))
    return total, torch.stack(shares)


def fit(
    model: nn.Module, loader: Loader, loss_of: Callable[[Batch], tuple[Tensor, Tensor]], args: argparse.Namespace,
    seconds: float, name: str, log: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Train by the clock: warm-up, constant rate, linear decay to 0 in the last 60%."""
    torch.compiler.set_stance("default")
    optimizer = Muon(model, args.lr, args.adam_lr, args.decay)
    start, step, mark = time.monotonic(), 0, time.monotonic()
    cuda = loader.target.device == "cuda"
    mean: Tensor | None = None
    while True:
        progress = max((time.monotonic() - start) / seconds, step / args.steps if args.steps else 0.0)
        if progress >= 1:
            break
        batch = loader.next()
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss, right = loss_of(batch)
        loss.backward()
        optimizer.step(min(1.0, (step + 1) / args.warmup, (1 - progress) / 0.6))
        step += 1
        entry = torch.cat((loss.detach()[None].float(), right))
        mean = entry if mean is None else mean.lerp(entry, 0.02)
        if step % args.log_every == 0:
            values = [round(v, 4) for v in mean.tolist()]  # waits for the device
            took, mark = time.monotonic() - mark, time.monotonic()
            log.append({"drafter": name, "step": step, "loss": values[0], "right": values[1:], "seconds": mark - start})
            say(
                name,
                "step",
                step,
                "loss",
                values[0],
                "right",
                values[1:],
                f"{took / args.log_every * 1e3:.1f} ms a step",
            )
        elif cuda and step % 4 == 0:
            torch.cuda.synchronize()  # keeps the clock honest
    say(name, step, "steps")
    torch.compiler.set_stance("force_eager")  # evaluation has other shapes


def check_generation(target: Target, held: Sequences) -> None:
    """Decoding (its own kernel, a CUDA graph) must choose what a prefill over the whole sequence chooses."""
    loader = Loader(target, held, 1, (), 0)
    chosen = np.arange(min(64, len(held)))
    batch = loader.rows(chosen, int(held.lengths()[chosen].max()))
    same = target.head(batch.hidden).argmax(-1)[:, :-1] == batch.ids[:, 1:]
    at = torch.arange(1, batch.ids.shape[1], device=same.device)
    made = (at >= batch.prompt[:, None]) & (at < batch.length[:, None])
    share = float(same[made].float().mean())
    say(f"{share:.4f} of the generated tokens are a prefill's choice")
    if share < 0.97:  # narrow formats flip a few near-ties
        raise RuntimeError("batched decoding disagrees with prefill")


def train_dflash(
    target: Target, data: Sequences, held: Sequences, shape: DFlashShape, name: str, seconds: float, args: argparse.Namespace,
    log: list[dict[str, Any]],
) -> None:  # fmt: skip
    torch.manual_seed(args.seed)
    model = DFlash(shape, target).to(target.device)
    say(name, shape, f"{sum(p.numel() for p in model.parameters()):,} parameters")
    loader = Loader(target, data, args.tokens, shape.capture, args.seed, args.reuse)
    fit(model, loader, lambda b: dflash_loss(model, b, args.soft, args.gamma), args, seconds, name, log)
    write_dflash(args.out / f"demo-qwen35-22m-{name}-q8_0.gguf", model)
    log.append({"drafter": name, **evaluate_dflash(model, held, args.eval_rows)})
    say(name, json.dumps(log[-1]))


def train_mtp(
    target: Target, data: Sequences, held: Sequences, name: str, seconds: float, args: argparse.Namespace,
    log: list[dict[str, Any]],
) -> None:  # fmt: skip
    torch.manual_seed(args.seed)
    model = Mtp(target, int(target.meta["qwen35.feed_forward_length"])).to(target.device)
    say(name, f"{sum(p.numel() for p in model.parameters()):,} parameters")
    loader = Loader(target, data, args.tokens, (), args.seed, args.reuse)
    fit(model, loader, lambda b: mtp_loss(model, b, args.depth, args.soft), args, seconds, name, log)
    write_mtp(args.out / f"demo-qwen35-22m-{name}-q8_0.gguf", model)
    log.append({"drafter": name, **evaluate_mtp(model, held, args.eval_rows, 3)})
    say(name, json.dumps(log[-1]))


def parse_job(text: str) -> tuple[str, float, dict[str, Any]]:
    name, seconds, options = (*text.split(":", 2), "")[:3]
    found: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, value = option.split("=")
        if key == "capture":
            found[key] = tuple(int(v) for v in value.split("+"))
        else:
            found[key] = int(value) if value.isdigit() else float(value)
    return name, float(seconds), found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the target's GGUF file")
    parser.add_argument("--prompts", type=Path, help="prompts.npz")
    parser.add_argument(
        "--sequences", type=Path, help="folder with an earlier run's held.npz and train.npz: nothing is generated"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--jobs",
        type=parse_job,
        nargs="+",
        required=True,
        metavar="NAME:SECONDS[:OPTION=VALUE,...]",
        help="dflash..., dflash2... or mtp..., its training time, options of its own such as lr=0.02,capture=1+3+5",
    )
    parser.add_argument("--generate", type=float, default=60, help="seconds of generation")
    parser.add_argument("--batch", type=int, default=2048, help="sequences generated at a time")
    parser.add_argument("--new", type=int, default=256, help="tokens generated at most")
    parser.add_argument("--left", type=float, default=0.05, help="share of a batch that may be cut off")
    parser.add_argument("--reuse", type=int, default=4, help="steps on a batch, on average")
    parser.add_argument("--sampled", type=float, default=0.4, help="share of continuations that begin sampled")
    parser.add_argument("--tokens", type=int, default=15_360, help="tokens of a training batch")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps (0: by the clock)")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--soft", type=float, default=0.5, help="share of the target's distribution in the loss")
    parser.add_argument("--gamma", type=float, default=3.0, help="positions after which a block's weights fall by e")
    parser.add_argument("--depth", type=int, default=4, help="chained drafts of the MTP head")
    parser.add_argument("--capture", type=int, nargs="+", default=(1, 3, 5, 6))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=64, help="selector rank of DFlash 2")
    parser.add_argument("--compile", action="store_true", help="compile the drafters' parts")
    parser.add_argument("--eval-rows", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def texts(target: Target, args: argparse.Namespace) -> tuple[Sequences, Sequences]:
    """Held-out and training sequences: generated and saved, or those of an earlier run."""
    if args.sequences:
        return Sequences.load(args.sequences / "held.npz"), Sequences.load(args.sequences / "train.npz")
    rows = min(args.batch, args.eval_rows)
    held = continue_prompts(target, args.prompts, 1, rows, args.new, args.generate, args.seed, 0.0, 0.0)
    say(f"{len(held):,} held-out sequences, {len(held.tokens) - held.prompt.sum():,} tokens generated")
    held.save(args.out / "held.npz")
    check_generation(target, held)
    data = continue_prompts(
        target, args.prompts, 0, args.batch, args.new, args.generate, args.seed, args.sampled, args.left
    )
    say(f"{len(data):,} sequences, {len(data.tokens) - data.prompt.sum():,} tokens generated")
    data.save(args.out / "train.npz")
    say("saved")
    return held, data


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # rather slow than not at all
        dflash.compile_parts()
        mtp.compile_parts()
    target = Target(args.model, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    say("target read;", vars(args))
    held, data = texts(target, args)
    log: list[dict[str, Any]] = []
    for name, seconds, own in args.jobs:
        job = argparse.Namespace(**{**vars(args), **own})
        if name.startswith("mtp"):
            train_mtp(target, data, held, name, seconds, job, log)
        else:
            rank, group = (job.rank, 16) if name.startswith("dflash2") else (0, 0)
            shape = DFlashShape(tuple(job.capture), job.layers, ffn=job.ffn, conv_group=group, selector_rank=rank)
            train_dflash(target, data, held, shape, name, seconds, job, log)
        (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    if args.device == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
