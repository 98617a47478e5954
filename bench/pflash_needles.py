"""How much PFlash keeps, and whether what a question asks for is among it: needles in prompts for the demo model.

    python bench/pflash_needles.py --count 5 --out bench/results/pflash-demo.json

A needle, "The secret number of harbor is 73935.", lies at 10, 50 or 90 % of source code of Python's standard library.
The prompt ends with its first words (asked alike), or with another question for it (asked otherwise), of which only
the keeping is measured: the demo model answers none. Methods: the demo's scoring model as PFlash uses it; its scores
without anchors; the demo model itself as scoring model; as much at random, head and tail kept in all. Greedy answers.
"""

import argparse
import asyncio
import difflib
import inspect
import json
import logging
import platform
import random
import tarfile
import tempfile
import textwrap
import zipfile
from pathlib import Path

import structlog
from services import DEMO, ROOT, running

from lucevisor.compression.compressor import CHUNK_TOKENS, anchor_chunks, select
from lucevisor.compression.windows import QUERY_TOKENS, QUESTION_TOKENS
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.model.gguf_files import open_model
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.tokenizer import Tokenizer

SCORER = ROOT / "etc" / "demo" / "demo-scorer-q8_0.gguf"
DEPTHS = (0.1, 0.5, 0.9)
RATIOS = (0.1, 0.3, 0.6)
WORDS = ["apple", "river", "stone", "cloud", "garden", "silver", "window", "candle", "forest", "orange", "rocket",
         "pencil", "mirror", "basket", "violin", "harbor", "meadow", "lantern", "copper", "marble", "ribbon", "saddle",
         "tunnel", "velvet", "walnut", "island", "hammer"]  # fmt: skip


def config_of(folder, scorer, n_tokens):
    path = Path(folder) / "config.toml"
    path.write_text(
        f'[model]\npath = "{DEMO}"\n[groups.main]\nbackend = "cpu"\nthreads = 1\n'
        '[placement]\ntarget_devices = ["main:0"]\n[draft]\nkind = "off"\n[cache]\nprefix_slots = 0\n'
        f"[engine]\nmax_context = {n_tokens + 128}\nmax_sequences = 1\n"
        f'[pflash]\nmode = "always"\npath = "{scorer}"\nwindow = 8192\n'
    )
    return path


def prompts(texts, n_tokens, count, seed):
    """(depth, ids, where the needle lies without its line ends, the number, whether it is asked alike)"""
    modules = (textwrap, argparse, difflib, tarfile, zipfile)
    filler = texts.encode("".join(inspect.getsource(module) for module in modules))
    rng = random.Random(seed)
    for alike in (True, False):
        for depth in DEPTHS:
            for _ in range(count):
                word, number = rng.choice(WORDS), str(rng.randint(10000, 99999))
                needle = texts.encode(f"\nThe secret number of {word} is {number}.\n")
                asked = (
                    f"\n\nThe secret number of {word} is"
                    if alike
                    else f"\n\nQuestion: which number belongs to {word}?\nAnswer:"
                )
                question = texts.encode(asked)
                room = n_tokens - len(needle) - len(question)
                start, at = rng.randrange(len(filler) - room), int(depth * room) + rng.randrange(-16, 16)
                body = filler[start : start + room]
                yield depth, [*body[:at], *needle, *body[at:], *question], (at + 1, at + len(needle) - 1), number, alike


async def scores_of(service, ids):
    """A score for each token of a raw prompt of one window, as the compressor asks for them."""
    question = ids[-QUESTION_TOKENS:]
    found = await service.only.deployment.scoring.score(ids, QUERY_TOKENS)
    return [*found[: -len(question)], *[0.0] * len(question)]


async def answer(service, ids, texts, numbers, told):
    """The greedy answer; ``told``: those given before."""
    if tuple(ids) in told:
        return told[tuple(ids)]
    request = GenerationRequest(
        request_id=f"n{next(numbers)}", prompt=ids, max_tokens=12, sampling=SamplingParams(temperature=0.0)
    )
    with service.only.engine.submit(request) as handle:
        found = texts.decode([event.token async for event in handle if isinstance(event, TokenEvent)])
    told[tuple(ids)] = found
    return found


class Tally:
    def __init__(self):
        self.rows = {}

    def add(self, method, ratio, alike, depth, n, n_kept, found, answered):
        row = self.rows.setdefault((method, ratio, alike), {"n": 0, "kept": [], "found": {}, "answered": {}})
        row["n"] += 1
        row["kept"].append(n_kept / n)
        assert abs(n_kept - ratio * n) <= CHUNK_TOKENS, (method, ratio, n, n_kept)
        row["found"][depth] = row["found"].get(depth, 0) + found
        row["answered"][depth] = row["answered"].get(depth, 0) + answered

    def records(self):
        for (method, ratio, alike), row in sorted(self.rows.items()):
            n, told = row["n"], alike and method != "demo model"
            yield {
                "method": method, "keep_ratio": ratio, "asked_alike": alike, "prompts": n,
                "kept_share": [round(f(row["kept"]), 4) for f in (min, max)],
                "found": sum(row["found"].values()), "found_by_depth": row["found"],
                "answered": sum(row["answered"].values()) if told else None,
                "answered_by_depth": row["answered"] if told else None,
            }  # fmt: skip


async def measure(options, scorer, methods, tally):
    texts = Tokenizer.from_gguf(open_model([DEMO]).metadata)
    numbers, rng, before = iter(range(10**9)), random.Random(options.seed + 1), {}
    with tempfile.TemporaryDirectory() as folder:
        async with running(config_of(folder, scorer, options.tokens), folder) as service:
            for depth, ids, needle, number, alike in prompts(texts, options.tokens, options.count, options.seed):
                scores, question = await scores_of(service, ids), ids[-QUESTION_TOKENS:]
                anchors = anchor_chunks(ids, question, len(ids) - len(question))
                if "whole" in methods:
                    told = await answer(service, ids, texts, numbers, before) if alike else ""
                    tally.add("whole", 1.0, alike, depth, len(ids), len(ids), True, number in told)
                for ratio in RATIOS:
                    kept = {
                        "pflash": select(scores, ratio, anchors),
                        "scores alone": select(scores, ratio),
                        "demo model": select(scores, ratio),
                        "random": select([rng.random() for _ in ids], ratio),
                    }
                    for method in methods & kept.keys():
                        ranges = kept[method]
                        found = any(start <= needle[0] and needle[1] <= stop for start, stop in ranges)
                        shorter = [token for start, stop in ranges for token in ids[start:stop]]
                        asked = alike and method != "demo model"  # of which only the keeping is measured
                        told = await answer(service, shorter, texts, numbers, before) if asked else ""
                        tally.add(method, ratio, alike, depth, len(ids), len(shorter), found, number in told)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--count", type=int, default=5, help="prompts of each depth and way of asking")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    tally = Tally()
    asyncio.run(measure(options, SCORER, {"whole", "pflash", "scores alone", "random"}, tally))
    save(options, list(tally.records()))
    asyncio.run(measure(options, DEMO, {"demo model"}, tally))
    rows = list(tally.records())
    save(options, rows)
    for row in rows:
        print(json.dumps(row))


def save(options, rows):
    if options.out:
        about = {
            "command": "python bench/pflash_needles.py", "python": platform.python_version(),
            "tokens": options.tokens, "count": options.count, "seed": options.seed, "scorer": SCORER.name,
        }  # fmt: skip
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
