"""How fast are long prompts alone, right after short ones and beside them, and how long do short ones and decodes wait?

    python bench/chunks.py --file FILE.gguf [--devices cuda:0 cuda:0] [--set engine.prefill_chunk=512] [--json PATH]

One service in this process, asked by token ids (no HTTP), a group for each of --devices; prefix slots and drafts are
off.  --rounds times: decode of 1 and of 8 sequences with prompts of 16 tokens, and --prompt tokens right after.  Then,
with short prompts long past, --prompt tokens and --long tokens; one sequence decoding beside --long tokens; four
clients with short prompts and pauses alone, two prompts of 4,000 alone, and both together.  Printed: medians, and what
the scheduler found steps of each size to take.  bench/make_gguf.py makes full-size files.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import structlog
from full_size import write_config
from records import conditions, write_json
from services import Observer

from lucevisor.app.benchmark import Case, generate, tokens_per_s
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Service
from lucevisor.engine.scheduling.chunking import RECENT_S
from lucevisor.model.families import open_spec

N_SHORT, SHORT, ANSWER = 4, 64, 16
PAUSE_S = 2.0
N_LONG, LONG = 2, 4000
WARM_S = 3.0


class Client:
    """Requests with names and prompts of their own."""

    def __init__(self, service):
        self.service, self.chance, self.n = service, random.Random(1), 0

    async def ask(self, n_prompt, n_tokens):
        """When it was sent, and when each token came."""
        self.n += 1
        return await generate(self.service, n_prompt, n_tokens, f"chunks {self.n}")

    async def prefill(self, n_prompt):
        """Tokens/s until the first token."""
        self.n += 1
        return await tokens_per_s(self.service, Case(prompt=n_prompt), self.n)

    async def decode(self, n, n_tokens):
        """Tokens/s of all while all decode."""
        self.n += 1
        return await tokens_per_s(self.service, Case(answer=n_tokens, streams=n), self.n)


def spread(values):
    cut = [round(f(values), 1) for f in (statistics.median, min, max)]
    return dict(zip(("median", "least", "most"), cut, strict=True)) | {"n": len(values)}


async def rounds(client, options):
    """Decode, and long prompts right after; then long prompts alone."""
    found = {"decode_1": [], "decode_8": [], "prefill after short": []}
    for turn in range(options.rounds + 1):
        now = await client.decode(1, options.tokens), await client.decode(8, options.tokens)
        for values, value in zip(found.values(), (*now, await client.prefill(options.prompt)), strict=True):
            if turn:  # the first one warms up
                values.append(value)
    await client.prefill(options.long)
    await asyncio.sleep(RECENT_S)
    found["prefill alone"] = [await client.prefill(options.prompt) for _ in range(options.rounds)]
    found["long prefill alone"] = [await client.prefill(options.long) for _ in range(2)]
    return {f"{key}, tokens/s": spread(values) for key, values in found.items()}


async def beside_decode(client, options):
    """The milliseconds between tokens of one sequence while a long prompt is computed."""
    decode = asyncio.create_task(client.ask(16, 200))
    await asyncio.sleep(0.3)
    sent, [first] = await client.ask(options.long, 1)
    _, times = await decode
    gaps = [1e3 * (b - a) for a, b in pairwise(times) if sent < a and b < first]
    return {
        "between tokens beside a long prompt, ms": spread(gaps) if gaps else None,
        "that prompt, tokens/s": round(options.long / (first - sent)),
    }


async def shared(client, options):
    """First tokens of short prompts and throughput of long ones, alone and together."""
    firsts, pairs, ending = [], [], asyncio.Event()

    async def short():
        while not ending.is_set():
            await asyncio.sleep(PAUSE_S * client.chance.uniform(0.5, 1.5))
            sent, times = await client.ask(SHORT, ANSWER)
            firsts.append((sent, 1e3 * (times[0] - sent)))

    async def long():
        while not ending.is_set():
            sent = time.perf_counter()
            await asyncio.gather(*(client.prefill(LONG) for _ in range(N_LONG)))
            pairs.append((sent, N_LONG * LONG / (time.perf_counter() - sent)))

    async def arm(*works):
        firsts.clear(), pairs.clear(), ending.clear()
        began = time.perf_counter() + WARM_S
        tasks = [asyncio.create_task(work()) for work in works]
        await asyncio.sleep(WARM_S + options.seconds)
        ending.set()
        await asyncio.gather(*tasks)
        return [[value for sent, value in values if sent >= began] for values in (firsts, pairs)]

    alone, _ = await arm(*[short] * N_SHORT)
    await asyncio.sleep(RECENT_S)
    _, long_alone = await arm(long)
    beside, long_beside = await arm(*[short] * N_SHORT, long)
    p95 = [statistics.quantiles(values, n=20, method="inclusive")[-1] for values in (alone, beside)]
    rates = [statistics.median(values) for values in (long_alone, long_beside)]
    return {
        "first token of short prompts, p95 ms": {
            "alone": round(p95[0], 1),
            "beside": round(p95[1], 1),
            "n": len(beside),
        },
        "long prompts, tokens/s": {"alone": round(rates[0]), "beside": round(rates[1]), "n": len(long_beside)},
        "ratios": {"first token": round(p95[1] / p95[0], 2), "long": round(rates[1] / rates[0], 3)},
    }


async def measure(service, options):
    client = Client(service)
    found = {"prefill_chunk": service.placement.prefill_chunk} | await rounds(client, options)
    if options.seconds:
        found |= await beside_decode(client, options) | await shared(client, options)
    cost = service.engine._scheduler.chunks.cost  # no client sees it
    found["steps, ms"] = {} if cost is None else {round(n): round(1e3 * s, 1) for n, s in cost.points}
    return found


async def run(options, directory):
    settings = ["cache.prefix_slots=0", "draft.kind=off", "engine.max_context=8192", "engine.pages=1024", *options.set]
    config = write_config(directory / "config.toml", options.file, options.devices, settings)
    (directory / "run").mkdir()
    model = ServedModel(open_spec(options.file), (options.file,), "chunks")
    service = Service(config, model, directory / "run", Observer())
    try:
        await service.start()
        if not await service.wait_ready(options.timeout):
            raise RuntimeError(f"not ready: {service.reason()}")
        return await measure(service, options)
    finally:
        await service.stop(0.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="BACKEND:INDEX, one daemon each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the configuration")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a sequence decodes")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--long", type=int, default=7900)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each arm with clients; 0: none")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start")
    parser.add_argument("--json", type=Path, help="write to this file")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory(prefix="chunks-") as directory:
        found = asyncio.run(run(options, Path(directory)))
    found = {"devices": options.devices, "settings": options.set, **conditions(), **found}
    print(json.dumps(found, indent=1))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
