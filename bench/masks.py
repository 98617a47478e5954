"""What does constrained output cost?  Masks by vocabulary and schema, and a decode with and without them.

    python bench/masks.py [--seconds 20] [--save]

*Masks*: microseconds of one mask, of looking at 3 drafts (with the token before taken), and of applying a mask to a row
of logits with torch on one core, for the demo's vocabulary and for one of 248,320 tokens made of pairs of its tokens.
Outputs are random walks through the grammars of tests/e2e/schemas.py.  *Decode*: the demo on one cpu group, plain and
by a schema in turns: milliseconds a token, and the difference as a share.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import tempfile
import time
from pathlib import Path

import structlog
import torch
from records import save

from daemons.sampling import apply_masks
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import GrammarCompiler, GrammarError
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tokenizer import Tokenizer
from tests.e2e.schemas import schemas
from tests.e2e.service import DEMO, running, write_config
from tests.text.vocabularies import demo_metadata

LARGE = 248_320
ROWS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "rows": {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "label": {"type": "string"}, "ok": {"type": "boolean"}},
                "required": ["id", "label", "ok"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "rows"],
    "additionalProperties": False,
}


def large_metadata():
    """The demo's vocabulary, and pairs of its tokens up to 248,320 in all."""
    metadata = dict(demo_metadata())
    rng, tokens, types = (
        random.Random(1),
        list(metadata["tokenizer.ggml.tokens"]),
        list(metadata["tokenizer.ggml.token_type"]),
    )
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == 1]
    known = set(tokens)
    while len(tokens) < LARGE:
        pair = rng.choice(plain) + rng.choice(plain)
        if pair not in known and len(pair) <= 16:
            known.add(pair)
            tokens.append(pair)
    types += [1] * (LARGE - len(types))
    return metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def compiled(compiler, tokenizer, schema):
    rules = Rules(tokenizer)
    return compiler.compile(rules.grammar(rules.part(forms.json_schema(schema))))


def percentiles(values):
    values = sorted(values)
    return {f"p{p}": round(values[min(len(values) - 1, len(values) * p // 100)], 1) for p in (50, 90, 99)} | {
        "max": round(values[-1], 1)
    }


def walk(grammar, tokenizer, rng, n_most):
    """Times in microseconds along one random output: a mask, a look at three drafts."""
    one, masks, looks = grammar.matcher(), [], []
    token, drafts = [], []
    for n in range(n_most):
        began = time.perf_counter()
        one.n_valid(n - len(token), token, drafts)
        between = time.perf_counter()
        row = one.masks(n - len(token), token, [])
        masks.append(1e6 * (time.perf_counter() - between))
        looks.append(1e6 * (between - began))
        bits = [8 * i + b for i, byte in enumerate(row) if byte for b in range(8) if byte >> b & 1]
        choices = [i for i in rng.sample(bits, min(len(bits), 20)) if i not in tokenizer.eos_ids]
        if not choices:
            break
        token = [min(choices, key=lambda i: len(tokenizer.token_bytes(i))) if rng.random() < 0.5 else choices[0]]
        drafts = rng.sample(bits, min(3, len(bits)))
    return masks, looks


def measure_masks(seconds):
    found = {}
    for name, metadata in (("demo, 8,192", demo_metadata()), ("248,320", large_metadata())):
        tokenizer = Tokenizer.from_gguf(metadata)
        compiler, rng = GrammarCompiler(tokenizer), random.Random(2)
        began = time.perf_counter()
        compiled(compiler, tokenizer, {"type": "null"})
        first_s = time.perf_counter() - began
        masks, looks, compile_ms = [], [], []
        wanted = [ROWS, *schemas()]
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            schema = rng.choice(wanted)
            began = time.perf_counter()
            try:
                grammar = compiled(compiler, tokenizer, schema)
            except GrammarError:
                continue
            compile_ms.append(1e3 * (time.perf_counter() - began))
            more, looked = walk(grammar, tokenizer, rng, 60)
            masks += more
            looks += looked
        row = torch.zeros(1, tokenizer.n_vocab)
        mask = torch.full((1, -(-tokenizer.n_vocab // 8)), 0x55, dtype=torch.uint8)
        applied = []
        for _ in range(50):
            began = time.perf_counter()
            apply_masks(row, mask, [0])
            applied.append(1e6 * (time.perf_counter() - began))
        found[name] = {
            "masks": len(masks),
            "vocabulary_s": round(first_s, 2),
            "compile_ms": percentiles(compile_ms),
            "mask_us": percentiles(masks),
            "mean_us": round(statistics.mean(masks), 1),
            "look_us": percentiles(looks),
            "apply_us": percentiles(applied),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


async def decode(service, tokenizer, grammar, n_sequences, n_tokens):
    """Seconds a token of all sequences together."""
    handles = []
    for i in range(n_sequences):
        sampling = SamplingParams(seed=i, banned=() if grammar else tuple(tokenizer.eos_ids))
        constraint = grammar.matcher() if grammar else None
        prompt = tuple(tokenizer.encode("The table of functions as JSON: "))
        request = GenerationRequest(
            request_id=f"{time.perf_counter_ns()}", prompt=prompt, max_tokens=n_tokens, sampling=sampling,
            stop_ids=tokenizer.eos_ids, constraint=constraint,
        )  # fmt: skip
        handles.append(service.only.engine.submit(request))
    began, n = None, 0
    for handle in handles:
        async for event in handle:
            if isinstance(event, TokenEvent):
                began = began or time.perf_counter()
                n += 1
    return (time.perf_counter() - began) / max(1, n / n_sequences)


async def measure_decode(directory, rounds):
    tokenizer = Tokenizer.from_gguf(demo_metadata())
    grammar = compiled(GrammarCompiler(tokenizer), tokenizer, ROWS)
    config = write_config(directory, DEMO, {"a": 1}, ["0-8"], '[engine]\nmax_sequences = 8\n[draft]\nkind = "off"\n')
    found = {}
    async with running(config, directory) as service:
        for n_sequences in (1, 8):
            times = {"plain": [], "schema": []}
            for _ in range(rounds + 1):
                times["plain"].append(await decode(service, tokenizer, None, n_sequences, 80))
                times["schema"].append(await decode(service, tokenizer, grammar, n_sequences, 80))
            plain, schema = (1e3 * statistics.median(values[1:]) for values in times.values())
            found[n_sequences] = {
                "plain_ms": round(plain, 2),
                "schema_ms": round(schema, 2),
                "share": round(schema / plain - 1, 3),
            }
            print(f"{n_sequences} sequences", json.dumps(found[n_sequences]), flush=True)
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"masks": measure_masks(options.seconds)}
    with tempfile.TemporaryDirectory() as place:
        result["decode"] = asyncio.run(measure_decode(Path(place), options.rounds))
    if options.save:
        save("masks", result)
