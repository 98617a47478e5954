"""Time to the first token of a prompt that is computed, and of one whose beginning is remembered in memory or on disk.

    python bench/prefix.py [--model FILE] [--backend cpu|cuda|hip] [--groups 2] [--tokens 512,1024,2048,3072]
                           [--rounds 9] [--dtype auto] [--save] [--verbose]

Real daemons, requests straight into the engine.  A round asks, one after the other: a new prompt with the cache off, a
new one with the cache on (what remembering costs), that one again with another ending of two tokens (what it gains),
and, when its file is written and all memory forgotten, once more with another ending: then it is restored from its
file, which is in the page cache.  The first round is not counted.  `floor`: a prompt of three tokens, which no cache
can beat.  What is remembered is checked by cached_tokens, what is computed by the tokens of all steps.
--save writes bench/results/prefix-NAME.json.
"""

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import structlog
import uvloop
from records import machine, save
from services import DEMO, groups_toml, running

from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams

ENDING = 2
ARMS = ("floor", "computed, cache off", "computed, cache on", "from memory", "from disk")
SAVED_S = 120.0


def configuration(options, directory, n_slots):
    """A TOML file for the asked groups."""
    pages = (max(options.tokens) // 64 + 2) * (options.rounds + 3) * (len(options.tokens) + 1)
    text = groups_toml(options)
    text += f"""
[engine]
dtype = "{options.dtype}"
max_sequences = 1
max_context = {max(options.tokens) + 64}
pages = {pages if n_slots else max(options.tokens) // 64 + 2}
[cache]
prefix_slots = {n_slots}
memory = "{options.memory}"
"""
    if n_slots:
        text += f'dir = "{directory}/snapshots"\ndisk = "{options.disk}"\nstates = "{options.states}"\nhost = 0\n'
    path = Path(directory) / f"{n_slots}.toml"
    path.write_text(text)
    return path


async def first_token(service, prompt, n_cached):
    """Seconds to the first token; complains when more or less than expected was computed."""
    request = GenerationRequest(
        request_id=f"bench-{time.monotonic_ns()}",
        prompt=tuple(prompt),
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        turn_boundaries=(len(prompt) - ENDING,),
    )
    before = service.only.engine.statistics().steps.n_tokens
    start, found = time.perf_counter(), 0.0
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                found = time.perf_counter() - start
            elif isinstance(event, FinishedEvent):
                n_computed = service.only.engine.statistics().steps.n_tokens - before
                if (event.usage.cached_tokens, n_computed) != (n_cached, len(prompt) - n_cached):
                    raise SystemExit(
                        f"{event.usage.cached_tokens} tokens cached, {n_computed} computed of {len(prompt)}"
                    )
    return found


async def saved(service, beginning):
    """Wait until a prompt's file is written; complains when it is not."""
    store, end = service.only.snapshots.store, time.monotonic() + SAVED_S
    while (match := store.find(beginning, len(beginning))) is None or match.n_tokens < len(beginning):
        if time.monotonic() > end:
            raise SystemExit(
                f"no snapshot after {SAVED_S} s: {store.statistics}; --verbose shows why, if it was not worth it"
            )
        await asyncio.sleep(0.01)


async def remembered(service, prompt, n):
    """A prompt whose first n tokens are in memory, when their file is written."""
    await saved(service, prompt[:n])
    return await first_token(service, prompt, n)


async def restored(service, prompt, n):
    """A prompt whose first n tokens are in a file only."""
    forget(service)
    return await first_token(service, prompt, n)


def forget(service):
    """Drop every slot in memory."""
    prefixes = service.only.engine.prefixes
    for slot in prefixes.slots:
        prefixes.drop(slot)


async def measure(options):
    """{(tokens, arm): seconds}"""
    rng, times = random.Random(1), {}
    with tempfile.TemporaryDirectory() as directory:
        off, on = (configuration(options, directory, n) for n in (0, options.slots))
        async with running(off, directory) as plain, running(on, directory) as cached:
            vocabulary = plain.only.model.spec.vocabulary

            def tokens(n):
                return [rng.randrange(vocabulary) for _ in range(n)]

            for turn in range(options.rounds + 1):
                for n in options.tokens:
                    beginning = tokens(n)
                    found = (
                        await first_token(plain, tokens(3), 0),
                        await first_token(plain, tokens(n + ENDING), 0),
                        await first_token(cached, beginning + tokens(ENDING), 0),
                        await remembered(cached, beginning + tokens(ENDING), n),
                        await restored(cached, beginning + tokens(ENDING), n),
                    )
                    for arm, seconds in zip(ARMS, found, strict=True):
                        if turn:
                            times.setdefault((n, arm), []).append(seconds)
            now = cached.only.snapshots.store.statistics
            seen = {
                "saved": now.n_saved, "saved_bytes": now.saved_bytes, "save_s": now.save_s, "restored": now.n_restored,
                "restored_bytes": now.restored_bytes, "restore_s": now.restore_s, "failures": dict(now.failures),
            }  # fmt: skip
    return times, seen


def conditions(options):
    return {
        "model": Path(options.model).name,
        "backend": options.backend,
        "groups": options.groups,
        "dtype": options.dtype,
        "states": options.states,
        **machine(),
        "torch": version("torch"),
        "rounds": options.rounds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--backend", choices=["cpu", "cuda", "hip"], default="cpu")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[512, 1024, 2048, 3072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--memory", default="4GiB", help="cache.memory")
    parser.add_argument("--states", default="device", help="cache.states")
    parser.add_argument("--disk", default="20GiB", help="cache.disk")
    parser.add_argument("--name", help="of the result; default: the backend")
    parser.add_argument("--save", action="store_true", help="write bench/results/prefix-NAME.json")
    parser.add_argument("--verbose", action="store_true", help="show the log: what is not worth a file, and why")
    options = parser.parse_args()
    options.model = options.model.resolve()
    level = logging.DEBUG if options.verbose else logging.WARNING
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    where = conditions(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        times, seen = runner.run(measure(options))
    rows = []
    for (n, arm), found in sorted(times.items(), key=lambda item: (item[0][0], ARMS.index(item[0][1]))):
        p50, p90 = statistics.median(found), statistics.quantiles(found, n=10)[-1]
        base = statistics.median(times[n, ARMS[1]])
        floor = statistics.median(times[n, ARMS[0]])
        rows.append(
            {
                "tokens": n, "arm": arm, "p50_ms": 1e3 * p50, "p90_ms": 1e3 * p90, "ratio": p50 / base,
                "over_floor_ms": 1e3 * (p50 - floor),
            }
        )  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{'time to first token':40} | {'p50':>10} | {'p90':>10} | ratio | over floor")
    for row in rows:
        label = f"{row['tokens']} tokens: {row['arm']}"
        times_ms = f"{row['p50_ms']:7.1f} ms | {row['p90_ms']:7.1f} ms"
        print(f"{label:40} | {times_ms} | {row['ratio']:.3f} | {row['over_floor_ms']:.1f} ms")
    if options.save:
        save(f"prefix-{options.name or options.backend}", {"conditions": where, "rows": rows, "snapshots": seen})


if __name__ == "__main__":
    main()
