"""Generate, train and evaluate the demo model's drafters on one GPU, each part within its seconds.

Text: the target's own continuations (generate.py), and the corpus it was trained on. Loss of a drafted token:
cross-entropy against half the token that came, half the target's distribution there. Figures: tokens per verify step
of greedy decoding on held-out prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dflash
import mtp
from acceptance import evaluate_dflash, evaluate_mtp
from data import Batch, Loader, Sequences, read_corpus
from dflash import DFlash, DFlashShape
from generate import continue_prompts
from gguf_files import DFLASH_KIND, MTP_KIND, write_dflash, write_mtp
from losses import dflash_loss, mtp_loss
from mtp import Mtp
from optimizer import Optimizer
from target import Target, read_gguf
from trainer import Loss, Trainer

START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


class Progress:
    """Prints and logs running means, and the loss on the same held-out batches each time."""

    def __init__(self, name: str, every: int, loss_of: Loss, held: list[Batch], log: list[dict[str, Any]]) -> None:
        self.name, self.every, self.loss_of, self.held, self.log = name, every, loss_of, held, log
        self.mean: Tensor | None = None
        self.start = self.mark = time.monotonic()

    def validate(self) -> list[float]:
        entries = []
        for batch in self.held:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=batch.ids.is_cuda):
                loss, right = self.loss_of(batch)
            entries.append(torch.cat((loss[None].float(), right)))
        return [round(v, 4) for v in torch.stack(entries).mean(0).tolist()]

    def add(self, step: int, entry: Tensor) -> None:
        self.mean = entry.clone() if self.mean is None else self.mean.lerp(entry, 0.01)
        if step % self.every:
            return
        with torch.compiler.set_stance("force_eager"):
            held = self.validate()
        train = [round(v, 4) for v in self.mean.tolist()]
        took, self.mark = time.monotonic() - self.mark, time.monotonic()
        speed = round(took / self.every * 1e3, 1)
        entry = {"drafter": self.name, "step": step, "train": train, "held": held, "ms": speed}
        self.log.append({**entry, "seconds": round(self.mark - self.start, 1)})
        say(self.name, step, "loss and right: train", train, "held", held, f"{speed} ms a step")


def fit(
    model: nn.Module, loader: Loader, held: Sequences, loss_of: Loss, args: argparse.Namespace, seconds: float, name: str,
    log: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Train by the clock: warm-up, constant rate, linear decay to 0 in the last 60%."""
    torch.compiler.set_stance("default")
    optimizer = Optimizer(model, args.lr, args.adam_lr, args.decay)
    trainer = Trainer(model, loss_of, optimizer, args.graphs and loader.target.device == "cuda")
    fixed = Loader(loader.target, [(held, 1.0)], args.tokens, loader.capture, args.seed)
    start, step = time.monotonic(), 0
    with torch.cuda.stream(trainer.stream) if trainer.stream else contextlib.nullcontext():
        progress = Progress(name, args.log_every, loss_of, [fixed.fresh() for _ in range(args.held_batches)], log)
        while True:
            done = max((time.monotonic() - start) / seconds, step / args.steps if args.steps else 0.0)
            if done >= 1:
                break
            rate = min(1.0, (step + 1) / args.warmup, (1 - done) / 0.6)
            entry = trainer.step(loader.next(), rate)
            step += 1
            progress.add(step, entry)
            if trainer.stream and step % 8 == 0:
                trainer.stream.synchronize()  # keeps the clock honest
    if trainer.stream:
        torch.cuda.synchronize()
    say(name, step, "steps,", len(trainer.graphs), "graphs")
    torch.compiler.set_stance("force_eager")  # evaluation has other shapes


def check_generation(target: Target, held: Sequences) -> None:
    """Decoding (its own kernel, a CUDA graph) must choose what a prefill over the whole sequence chooses."""
    loader = Loader(target, [(held, 1.0)], 1, (), 0)
    chosen = np.arange(min(64, len(held)))
    batch = loader.rows(loader.sources[0], chosen, int(held.lengths()[chosen].max()))
    same = target.head(batch.hidden).argmax(-1)[:, :-1] == batch.ids[:, 1:]
    share = float(same[batch.counts[:, 1:]].float().mean())
    say(f"{share:.4f} of the generated tokens are a prefill's choice")
    if share < 0.97:  # narrow formats flip a few near-ties
        raise RuntimeError("batched decoding disagrees with prefill")


def train_one(
    target: Target, sources: list[tuple[Sequences, float]], held: Sequences, name: str, seconds: float,
    args: argparse.Namespace, log: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Train a drafter, write its file and measure it."""
    torch.manual_seed(args.seed)
    model: DFlash | Mtp
    if name.startswith("mtp"):
        model, capture = Mtp(target, int(target.meta["qwen35.feed_forward_length"])).to(target.device), ()
    else:
        rank, group = (args.rank, 16) if name.startswith("dflash2") else (0, 0)
        shape = DFlashShape(tuple(args.capture), args.layers, kv_heads=args.kv_heads, ffn=args.ffn, conv_group=group, selector_rank=rank)
        model, capture = DFlash(shape, target).to(target.device), shape.capture
    if args.start:
        weights = load_file(args.start) if args.start.suffix == ".safetensors" else read_gguf(args.start)[1]
        for tensor, parameter in model.tensors().items():
            parameter.data.copy_(weights[tensor].view(parameter.shape))
    say(name, f"{sum(p.numel() for p in model.parameters()):,} parameters", getattr(model, "shape", ""))

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(model, Mtp):
            return mtp_loss(model, batch, args.depth, args.soft)
        return dflash_loss(model, batch, args.soft, args.gamma, args.spacing, 1.0, args.follow)

    loader = Loader(target, sources, args.tokens, capture, args.seed, args.reuse)
    fit(model, loader, held, loss_of, args, seconds, name, log)
    kind = MTP_KIND if isinstance(model, Mtp) else DFLASH_KIND
    path = args.out / f"demo-qwen35-22m-{name}-{kind.name.lower()}.gguf"
    if isinstance(model, Mtp):
        write_mtp(path, model)
        found = evaluate_mtp(model, held, args.eval_rows, 3)
    else:
        write_dflash(path, model)
        found = evaluate_dflash(model, held, args.eval_rows)
    log.append({"drafter": name, **found})
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
    parser.add_argument(
        "--corpus",
        nargs="*",
        default=(),
        metavar="FILE:SHARE",
        help="files of encode.py to train on too; the generated sequences have share 1",
    )
    parser.add_argument("--generate", type=float, default=60, help="seconds of generation")
    parser.add_argument("--batch", type=int, default=2048, help="sequences generated at a time")
    parser.add_argument("--new", type=int, default=256, help="tokens generated at most")
    parser.add_argument("--left", type=float, default=0.05, help="share of a batch that may be cut off")
    parser.add_argument("--reuse", type=int, default=1, help="steps on a batch, on average")
    parser.add_argument("--sampled", type=float, default=0.4, help="share of continuations that begin sampled")
    parser.add_argument("--tokens", type=int, default=15_360, help="tokens of a training batch")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps (0: by the clock)")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--soft", type=float, default=0.5, help="share of the target's distribution in the loss")
    parser.add_argument("--gamma", type=float, default=2.0, help="positions after which a block's weights fall by e")
    parser.add_argument("--spacing", type=int, default=4, help="tokens of a batch for each of a step's blocks")
    parser.add_argument("--follow", action="store_true", help="half of the blocks begin where the others end")
    parser.add_argument("--start", type=Path, help="go on from a drafter's GGUF file, or from drafter.safetensors of ../train.py; the job's shape must be that of it")
    parser.add_argument("--depth", type=int, default=4, help="chained drafts of the MTP head")
    parser.add_argument("--capture", type=int, nargs="+", default=(1, 3, 5, 6, 7))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=64, help="selector rank of DFlash 2")
    parser.add_argument("--compile", action="store_true", help="compile the drafters' parts")
    parser.add_argument("--graphs", action="store_true", help="record whole steps as CUDA graphs")
    parser.add_argument("--held-batches", type=int, default=3, help="fixed held-out batches for the log")
    parser.add_argument("--eval-rows", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def texts(target: Target, args: argparse.Namespace) -> tuple[Sequences, Sequences]:
    """Held-out and training sequences: generated and saved, or those of an earlier run."""
    if args.sequences:
        return Sequences.load(args.sequences / "held.npz"), Sequences.load(args.sequences / "train.npz")
    rows = min(args.batch, args.eval_rows)
    held = continue_prompts(target, args.prompts, 1, rows, args.new, args.generate, args.seed, 0.0, 0.0)
    say(f"{len(held):,} held-out sequences, {held.made():,} tokens generated")
    held.save(args.out / "held.npz")
    check_generation(target, held)
    data = continue_prompts(
        target, args.prompts, 0, args.batch, args.new, args.generate, args.seed, args.sampled, args.left
    )
    say(f"{len(data):,} sequences, {data.made():,} tokens generated")
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
    sources = [(data, 1.0)]
    for item in args.corpus:
        path, _, share = item.rpartition(":")
        sources.append((read_corpus(Path(path), target.meta["tokenizer.ggml.padding_token_id"]), float(share)))
        say(f"{path}: {len(sources[-1][0]):,} texts, {len(sources[-1][0].tokens):,} tokens")
    for name, seconds, own in args.jobs:
        train_one(target, sources, held, name, seconds, argparse.Namespace(**{**vars(args), **own}), log)
        (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    if args.device == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
