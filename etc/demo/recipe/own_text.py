"""Rows of what a model answers itself, greedily, to the drafters' prompts: own_train.bin.xz, for a second stage of train.py.

A drafter meets the model's own text, much of it about objects that do not exist.  Trained on it together, the model's
layers learn to tell what comes next there too, and the model becomes surer of what it says.
"""

from __future__ import annotations

import argparse
import lzma
import random
import sys
from pathlib import Path

import numpy as np
import torch

from encode import FLAG, pack
from make_gguf import main as make_gguf

sys.path.append(str(Path(__file__).parent / "drafters"))

from generate import continue_prompts  # noqa: E402
from target import Target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, or a folder for make_gguf.py")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts.npz of drafters/prompts.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--left", type=float, default=0.3, help="share of a batch that may be cut off")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.model.is_dir():
        make_gguf(args.model, args.out / "model.gguf")
        args.model = args.out / "model.gguf"
    target = Target(args.model, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    data = continue_prompts(target, args.prompts, 0, args.batch, args.new, args.seconds, args.seed, 0.0, args.left)
    end = np.uint16(target.meta["tokenizer.ggml.padding_token_id"])
    rows = [np.append(data.tokens[a:b], end) for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
    random.Random(args.seed).shuffle(rows)
    packed = pack(rows, args.length, end)
    (args.out / "own_train.bin.xz").write_bytes(lzma.compress(packed.astype("<u2").tobytes(), preset=0))
    print(f"{len(rows):,} answers, {len(packed)} rows, {int((packed >= FLAG).sum()):,} tokens in the loss", flush=True)


if __name__ == "__main__":
    main()
