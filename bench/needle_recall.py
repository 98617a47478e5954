"""Which KV Flash policies find a fact in the middle of a long prompt?  The demo model's answers, through the service.

    python bench/needle_recall.py [--count 8] [--pools 1024 512] [--policies lru qk drafter exact] [--save]

Source code of Python's standard library, "The secret number of harbor is 73935." at 10, 50 or 90 % of it, and the
question "What is the secret number of harbor?" at its end, as a chat.  Its names and numbers were not trained on.  All
prompts are answered greedily with all pages resident, then with every policy and pool.  An answer with the number is
right.  --save writes bench/results/needle-recall-demo.json.
"""

import argparse
import asyncio
import difflib
import inspect
import json
import logging
import random
import tarfile
import tempfile
import textwrap
import zipfile
from pathlib import Path

import structlog
from demo_drafts import answer
from records import save
from services import DEMO, ROOT, running

from lucevisor.app.extra_models import make_page_scorer
from lucevisor.model.gguf_files import open_model
from lucevisor.text.tokenizer import Tokenizer

DEPTHS = (0.1, 0.5, 0.9)
WORDS = ["apple", "river", "stone", "cloud", "garden", "silver", "window", "candle", "forest", "orange", "rocket",
         "pencil", "mirror", "basket", "violin", "harbor", "meadow", "lantern", "copper", "marble", "ribbon", "saddle",
         "tunnel", "velvet", "walnut", "island", "hammer"]  # fmt: skip
SCORER = ROOT / "etc" / "demo" / "demo-scorer-q8_0.gguf"
USER = [8183, 328, 198]  # <|im_start|>user
ASSISTANT = [8184, 198, 8183, 320, 198, 8186, 284, 8187, 284]  # <|im_end|>, <|im_start|>assistant, no thoughts


def prompts(texts, n_tokens, count, seed):
    """(depth, ids, the number)"""
    modules = (textwrap, argparse, difflib, tarfile, zipfile)
    filler = texts.encode("".join(inspect.getsource(module) for module in modules))
    ends = [i + 1 for i, token in enumerate(filler) if texts.decode([token]).endswith("\n")]
    rng = random.Random(seed)
    for depth in DEPTHS:
        for _ in range(count):
            word, number = rng.choice(WORDS), str(rng.randint(10000, 99999))
            needle = texts.encode(f"The secret number of {word} is {number}.\n")
            question = texts.encode(f"\nWhat is the secret number of {word}?")
            room = n_tokens - len(needle) - len(question) - len(USER) - len(ASSISTANT)
            start = rng.choice([at for at in ends if at < len(filler) - room])
            wanted = start + depth * room + rng.randrange(-96, 96)  # anywhere in a page, or over two
            at = min(ends, key=lambda end: abs(end - wanted))
            body = [*filler[start:at], *needle, *filler[at : start + room]]
            yield depth, [*USER, *body, *question, *ASSISTANT], number


async def score(asked, texts, settings, options):
    """Right answers by depth, and the answers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(
            f'[model]\npath = "{DEMO}"\n[groups.main]\nbackend = "cpu"\nthreads = {options.threads}\n'
            '[placement]\ntarget_devices = ["main:0"]\n[draft]\nkind = "off"\n[cache]\nprefix_slots = 0\n'
            f"[engine]\nmax_context = {options.tokens + 64}\nmax_sequences = 1\n{settings}"
        )
        right, told = dict.fromkeys(DEPTHS, 0), []
        async with running(path, folder) as service:
            if service.config.kvflash.policy == "drafter":
                while not service.only.deployment.scoring.attached:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.05)
                service.only.engine.relevance.score = make_page_scorer(service.only, texts)
            for i, (depth, ids, number) in enumerate(asked):
                tokens, _ = await answer(service, f"n{i}", ids, 32)
                told.append(texts.decode(tokens))
                right[depth] += number in told[-1]
    return right, told


async def measure(options):
    texts = Tokenizer.from_gguf(open_model([DEMO]).metadata)
    asked = list(prompts(texts, options.tokens, options.count, options.seed))
    rows = []
    policies = [("all pages", 0)] + [(policy, pool) for pool in options.pools for policy in options.policies]
    for policy, pool in policies:
        settings = f'[kvflash]\npool_tokens = {pool}\npolicy = "{policy}"\n' if pool else ""
        if policy == "drafter":
            settings += f'[pflash]\npath = "{SCORER}"\ndevice = "main:0"\n'
        right, told = await score(asked, texts, settings, options)
        share = round(sum(right.values()) / len(asked), 4)
        rows.append({"policy": policy, "pool_tokens": pool or None, "right": sum(right.values()), "share": share,
                     "of_all_pages": round(share / max(1e-9, rows[0]["share"] if rows else share), 4),
                     "prompts": len(asked), "right_by_depth": right})  # fmt: skip
        print(json.dumps(rows[-1]), repr(told[0]), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3968)
    parser.add_argument("--count", type=int, default=8, help="prompts of each depth")
    parser.add_argument("--pools", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--policies", nargs="+", default=["lru", "qk", "drafter", "exact"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write bench/results/needle-recall-demo.json")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(measure(options))
    if options.save:
        about = {"tokens": options.tokens, "count": options.count, "seed": options.seed, "rows": rows}
        save("needle-recall-demo", about)


if __name__ == "__main__":
    main()
