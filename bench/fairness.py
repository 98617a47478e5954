"""Time to the first token of short prompts, alone and beside long ones, and what the long ones lose by it.

    python bench/fairness.py [--model FILE] [--backend cpu|cuda|hip] [--groups 2] [--long 4000] [--short 64]
                             [--answer 16] [--pause 3] [--seconds 45] [--rounds 3] [--threads N] [--name NAME] [--save]

A supervisor with real daemons, asked over HTTP by another process: four clients that ask, read the answer, pause and
ask again, and two long prompts that are sent again as soon as both are computed.  A round measures the long prompts
alone, the short ones alone, and both together, each for --seconds after a warm-up; rounds are interleaved and pooled.
Prefix slots are off, every prompt is new.  Target: p95 of the time to the first token of short prompts beside long ones
at most 3 x alone, prompt tokens a second of the long ones at least 0.9 x alone.  --save writes
bench/results/fairness-NAME.json.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

import aiohttp
from records import machine, save, write_json
from services import DEMO, groups_toml, supervisor

N_SHORT, N_LONG = 4, 2
FIRST_ID, IDS = 300, 5000  # ordinary tokens
WARM_S = 3.0


def configuration(options, directory):
    """A TOML file for the groups that were asked for."""
    text = groups_toml(options, options.threads)
    text += """
[cache]
prefix_slots = 0
[server]
port = 0
"""
    path = directory / "fairness.toml"
    path.write_text(text)
    return path


class Load:
    """Clients of one server."""

    def __init__(self, session, url, options):
        self.session, self.url, self.options = session, url, options
        self.chance = random.Random(1)
        self.first_s = []  # of short prompts
        self.gaps_s = []  # between tokens of their answers
        self.computed = []  # (seconds, tokens) of each two long prompts

    async def ask(self, n_prompt, n_answer):
        """Yield the seconds to each token from the one before."""
        prompt = [FIRST_ID + self.chance.randrange(IDS) for _ in range(n_prompt)]
        body = {"prompt": prompt, "max_tokens": n_answer, "temperature": 0, "stream": True, "ignore_eos": True}
        last = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise SystemExit(await reply.text())
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    yield now - last
                    last = now

    async def short(self):
        while True:
            await asyncio.sleep(self.options.pause * self.chance.uniform(0.5, 1.5))
            n = 0
            async for seconds in self.ask(self.options.short, self.options.answer):
                (self.gaps_s if n else self.first_s).append(seconds)
                n += 1

    async def whole(self, n_prompt):
        async for _ in self.ask(n_prompt, 1):
            pass

    async def long(self):
        while True:
            started = time.perf_counter()
            await asyncio.gather(*(self.whole(self.options.long) for _ in range(N_LONG)))
            self.computed.append((time.perf_counter() - started, N_LONG * self.options.long))  # seconds, tokens


async def measure(session, url, options, n_short, n_long):
    """What clients see within --seconds after a warm-up; long prompts that were under way at its ends are left out."""
    load = Load(session, url, options)
    tasks = [asyncio.create_task(load.short()) for _ in range(n_short)]
    await asyncio.sleep(options.pause if n_short else 0)  # the short ones first: they are what goes on all day
    tasks += [asyncio.create_task(load.long()) for _ in range(n_long)]
    await asyncio.sleep(WARM_S)
    load.first_s.clear()
    load.gaps_s.clear()
    done, _ = await asyncio.wait(tasks, timeout=options.seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0)
    return load


def times(values):
    """p50 and p95 in milliseconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"n": len(values), "p50_ms": round(1e3 * cuts[9], 1), "p95_ms": round(1e3 * cuts[18], 1)}


async def bench(url, options):
    arms = {"long alone": (0, 1), "short alone": (N_SHORT, 0), "together": (N_SHORT, 1)}
    first, gaps, rates = ({arm: [] for arm in arms} for _ in range(3))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for number in range(options.rounds):
            for arm, (n_short, n_long) in arms.items():
                load = await measure(session, url, options, n_short, n_long)
                first[arm] += load.first_s
                gaps[arm] += load.gaps_s
                rates[arm] += [n / seconds for seconds, n in load.computed]
                print(f"round {number + 1}: {arm}", times(load.first_s), [round(n / s) for s, n in load.computed])
    tokens_per_s = {arm: round(statistics.median(found)) for arm, found in rates.items() if found}
    found = {
        "time to first token": {arm: times(values) for arm, values in first.items() if values},
        "between tokens": {arm: times(values) for arm, values in gaps.items() if values},
        "long prompt tokens a second": tokens_per_s,
    }
    if len(tokens_per_s) < 2 or len(found["time to first token"]) < 2:
        raise SystemExit(f"too little was measured, give more --seconds: {found}")
    alone, together = (found["time to first token"][arm] for arm in ("short alone", "together"))
    found["ratios"] = {
        "p50 of the first token": round(together["p50_ms"] / alone["p50_ms"], 2),
        "p95 of the first token": round(together["p95_ms"] / alone["p95_ms"], 2),
        "long": round(tokens_per_s["together"] / tokens_per_s["long alone"], 3),
    }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--pause", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of a cpu group; default: its share of the cores")
    parser.add_argument("--name", default="")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--json", type=Path, help="write to this file")
    options = parser.parse_args()
    options.model = options.model.resolve()
    before = machine()
    with supervisor("fairness", partial(configuration, options)) as status:
        found = asyncio.run(bench(status["url"], options))
    conditions = {
        "model": options.model.name,
        "backend": options.backend,
        "groups": options.groups,
        "short": {"clients": N_SHORT, "prompt": options.short, "answer": options.answer, "pause_s": options.pause},
        "long": {"prompts at once": N_LONG, "prompt": options.long},
        "seconds": options.seconds,
        "rounds": options.rounds,
        **before,
    }
    print(json.dumps(found, indent=1))
    if options.save:
        save(f"fairness-{options.name or options.backend}", {"conditions": conditions, **found})
    if options.json is not None:
        write_json(options.json, {"conditions": conditions, **found})


if __name__ == "__main__":
    main()
