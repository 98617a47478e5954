"""What the journal costs, and how long requests pause when a shard is lost, restarted or moved.

    python bench/recovery.py [--model FILE] [--backend cpu|cuda|hip] [--groups 2] [--tokens 2048] [--streams 4]
                             [--rounds 5] [--kills 2] [--spares 0] [--move] [--dtype auto] [--save | --json PATH]
    python bench/recovery.py --journal

Real daemons, requests straight into the engine.  Cost: the same prompts, then the same decodes, in turns on a service
with the journal and on one without; the first round is not counted.  Recovery: each group's daemon is killed in turn,
first beside nobody, for what its load takes alone, then beside decoding streams of ``--tokens`` of context: seconds
until supervision heard of it, until a process is sent its load, of the load, until READY, and from then until steps
are planned.  --move: restarts the first group, and moves layers, beside streams whose tokens are compared.  --save
writes bench/results/recovery-NAME.json, --json any other file, after each part; the cost that it has is not measured
again.  --journal times the journal alone, without daemons, with rows of 10 KiB: what
the event loop does for a chunk and for a decode step, and when a chunk's rows are copied.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import structlog
import uvloop
from records import machine, save, write_json
from services import DEMO, groups_toml, running

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.boundaries import JournalRows
from lucevisor.engine.journal import Journal
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.engine.sequence import LiveSequence
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import PageTable
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.model.values import KvGroup
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan, PoolSizes
from lucevisor.protocol.steps import SamplingParams, Slice, Step
from lucevisor.supervision.events import State

GREEDY = SamplingParams(temperature=0.0)
N_DECODED = 64
N_MOVED = 400
PARTS = ("notice", "start", "loading", "rebuild")
CHUNK = 2048
ROW_BYTES = 10 * 1024  # of the 27B shape in bfloat16


def configuration(options, directory, journal):
    pages = (options.tokens // 64 + 64) * options.streams
    text = groups_toml(options)
    text += f"""
[engine]
dtype = "{options.dtype}"
max_sequences = {options.streams}
max_context = {options.tokens + 4000}
pages = {pages}
[cache]
prefix_slots = 0
[draft]
kind = "off"
[recovery]
journal = "{journal}"
restart_limit = "999/60s"
spares = {options.spares}
"""
    path = Path(directory) / f"{journal}.toml"
    path.write_text(text)
    return path


async def ask(service, prompt, n, on_token=lambda: None, sampling=GREEDY):
    request = GenerationRequest(
        request_id=f"bench-{random.random()}",
        prompt=tuple(prompt),
        max_tokens=n,
        sampling=sampling,
    )
    tokens = []
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
                on_token()
            elif event.error is not None:
                raise SystemExit(event.error.message)
    return tokens


async def speeds(service, prompts):
    """Prompt tokens a second of all prompts at once, and tokens a second of the same prompts' answers after that."""
    n_first, first = 0, asyncio.Event()
    started = time.perf_counter()

    async def one(prompt):
        nonlocal n_first
        n = 0

        def on_token():
            nonlocal n, n_first
            n += 1
            n_first += n == 1
            if n_first == len(prompts):
                first.set()

        await ask(service, prompt, N_DECODED, on_token)

    tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
    await first.wait()
    between = time.perf_counter()
    await asyncio.gather(*tasks)
    ended = time.perf_counter()
    n_prompt = sum(map(len, prompts))
    return n_prompt / (between - started), len(prompts) * (N_DECODED - 1) / (ended - between)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - states of several parts have no event in common
        await asyncio.sleep(0.001)


async def warm(service):
    """Wait until all groups have their warm spares."""
    n_spares = service.config.recovery.spares * len(service.groups)
    await until(lambda: sum(spare["warm"] for one in service.groups.values() for spare in one.spares) == n_spares)


async def kill(service, group):
    """Kill a group's daemon; seconds of the pause and of its parts."""
    engine, one = service.only.engine, service.groups[group]
    before = engine.statistics().recovery
    pid, at = one.pid, [time.perf_counter()]
    os.kill(pid, signal.SIGKILL)
    for reached in (
        lambda: one.state is not State.READY,
        lambda: one.pid != pid and one.state in (State.LOADING, State.READY),
        lambda: one.pid != pid and one.state is State.READY,
        lambda: service.state == "ready",
    ):
        await until(reached)
        at.append(time.perf_counter())
    now = engine.statistics().recovery
    return {
        "group": group,
        "pause_s": now.pauses["loss"].seconds - before.pauses["loss"].seconds,
        **{f"{name}_s": b - a for name, (a, b) in zip(PARTS, pairwise(at), strict=True)},
        "load_s": one.loads[0].seconds,
        "replayed": one.loads[0].replayed,
        "rebuilt_tokens": now.n_rebuilt - before.n_rebuilt,
        "recomputed_tokens": now.n_recomputed - before.n_recomputed,
    }


async def move(service, path, prompts):
    """Restart a group, then give it one part of four, beside streams: pauses, and how many streams got other tokens."""
    answers = await asyncio.gather(*(ask(service, prompt, N_MOVED) for prompt in prompts))
    shares = [1] + [3] * (len(service.groups) - 1)
    moved = load(path, [f"placement.target_layer_split={','.join(map(str, shares))}"])
    found = {}
    for name, work in (
        ("restart", lambda: AdminOperations(service).restart_all([next(iter(service.groups))], now=False)),
        ("reload", lambda: AdminOperations(service).reload(moved)),
    ):
        before, told = service.only.engine.statistics().recovery, [0] * len(prompts)

        def count(at, told=told):
            told[at] += 1

        streams = [
            asyncio.create_task(ask(service, prompt, N_MOVED, partial(count, at))) for at, prompt in enumerate(prompts)
        ]
        await until(lambda told=told: all(n > 5 for n in told))
        started = time.perf_counter()
        await work()
        seconds = time.perf_counter() - started
        n_left = sum(not stream.done() for stream in streams)
        same = sum(a == b for a, b in zip(answers, await asyncio.gather(*streams), strict=True))
        now = service.only.engine.statistics().recovery
        found[name] = {
            "pause_s": now.pauses[name].seconds - before.pauses[name].seconds,
            "command_s": seconds,
            "kept_tokens": now.n_kept - before.n_kept,
            "recomputed_tokens": now.n_recomputed + now.n_rebuilt - before.n_recomputed - before.n_rebuilt,
            "streams": len(prompts), "still running": n_left, "same tokens": same,
        }  # fmt: skip
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    return found


def told_cost(found):
    """Print and return the speeds with the journal and without."""
    rows = {}
    for i, what in enumerate(("prefill", "decode")):
        on, off = ([round(run[i]) for run in found[name]] for name in ("on", "off"))
        ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
        rows[what] = {"on": on, "off": off, "ratio": ratio}
        print(f"{what}, tokens/s: {on} with the journal, {off} without: {ratio:.3f}, the median of rounds", flush=True)
    return rows


def told_kill(one):
    """Print and return a pause and its parts."""
    parts = ", ".join(f"{what} {one[f'{what}_s']:.2f}" for what in (*PARTS, "load"))
    counts = f"{one['rebuilt_tokens']} tokens rebuilt, while loading: {one['replayed']}"
    by_all = f"{one['recomputed_tokens']} by all"
    print(f"{one['group']} {one['beside']}: pause {one['pause_s']:.2f} s; {parts}; {counts}, {by_all}", flush=True)
    return one


async def measure(options, cost, keep):
    """The cost unless it is known, pauses, and moves; ``keep`` gets them whenever one is there."""
    rng = random.Random(1)
    found = {"on": [], "off": []}
    kills, moves = [], {}
    with tempfile.TemporaryDirectory() as directory:
        paths = {"on": configuration(options, directory, "8GiB"), "off": configuration(options, directory, "0")}
        compared = options.rounds and not cost
        without = running(paths["off"], directory) if compared else contextlib.nullcontext()
        async with running(paths["on"], directory) as on, without as off:
            vocabulary = on.only.model.spec.vocabulary

            def prompts():
                return [[rng.randrange(vocabulary) for _ in range(options.tokens)] for _ in range(options.streams)]

            for i in range(options.rounds + 1 if compared else 0):
                asked = prompts()
                for name, service in (("on", on), ("off", off)) if i % 2 else (("off", off), ("on", on)):
                    measured = await speeds(service, asked)
                    if i:
                        found[name].append(measured)
            if compared:
                cost = told_cost(found)
                keep(cost, kills, moves)
            asked = prompts()
            right = [await ask(on, prompt, 8) for prompt in asked]
            for group in on.groups if options.kills else ():
                await warm(on)
                alone = await kill(on, group)
                kills.append(told_kill(alone | {"beside": "alone"}))
                keep(cost, kills, moves)
            for i in range(options.kills):
                for group in on.groups:
                    await warm(on)
                    told = [0] * len(asked)

                    def count(at, told=told):
                        told[at] += 1

                    streams = [
                        asyncio.create_task(ask(on, prompt, 3000, partial(count, at)))
                        for at, prompt in enumerate(asked)
                    ]
                    await until(lambda told=told: all(told))
                    await asyncio.sleep(0.2 + 0.1 * i)
                    kills.append(told_kill(await kill(on, group) | {"beside": "with streams"}))
                    keep(cost, kills, moves)
                    for stream in streams:
                        stream.cancel()
                    await asyncio.gather(*streams, return_exceptions=True)
            again = [await ask(on, prompt, 8) for prompt in asked]
            if options.dtype == "float32" and again != right:
                raise SystemExit("answers changed")
            if options.move:
                moves = await move(on, paths["on"], asked)
    return cost, kills, moves


def journal_alone():
    pools = PagePools({KvGroup.FULL}, PoolSizes(2000, 0, 0))
    arena, copies = Arena.create(ArenaPlan(0, CHUNK * ROW_BYTES, 3)), []
    rows = JournalRows({0: arena}, ROW_BYTES, 2 << 30, HostMemory())
    journal = Journal(copies, rows.has_rows, pools[KvGroup.FULL], rows.n_pages)
    lives = {i: LiveSequence(i, -1, PageTable(pools, None)) for i in range(8)}
    for live in lives.values():
        live.table.grow(0, 8000)

    def file(step_id, slices):
        step = Step(step_id, 0, [], slices)
        arena.ring(0, step_id, 0)
        started = time.perf_counter()
        journal.on_step_planned(step, lives)
        journal.on_stage_answered(step_id, 0)
        journal.on_step_finished(step_id)
        between = time.perf_counter()
        for one in copies:
            rows.file(one.boundary, one.region, one.copies)
        copies.clear()
        return between - started, time.perf_counter() - started

    chunks = [file(1 + 2 * i + at, [Slice(i, at * CHUNK, [1] * CHUNK, sample=False)]) for i in lives for at in (0, 1)]
    decodes = [file(100 + k, [Slice(i, 2 * CHUNK + k, [1], sample=True) for i in lives]) for k in range(2000)]
    loop_s, copied_s = (statistics.median(one[i] for one in chunks) for i in (0, 1))
    print(f"chunk of {CHUNK} tokens: {1e3 * loop_s:.2f} ms of the event loop, copied after {1e3 * copied_s:.1f} ms")
    print(f"decode step of {len(lives)}: {1e6 * statistics.median(one[0] for one in decodes):.0f} us of the event loop")


TOLD = frozenset({
    "replayed while loading", "nothing was replayed while loading", "kernels are ready", "state exported",
    "state imported",
})  # fmt: skip


def told(_logger, level, fields):
    """Keep errors, and what daemons and deployment say about the parts of a pause."""
    if fields["event"] not in TOLD and level != "error":
        raise structlog.DropEvent
    return fields


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda", "hip"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--move", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--json", type=Path, help="write to this file, and take the cost from there")
    parser.add_argument("--journal", action="store_true")
    options = parser.parse_args()
    if options.journal:
        journal_alone()
        return
    structlog.configure(
        processors=[structlog.processors.add_log_level, told, structlog.processors.KeyValueRenderer(["event"])],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    about = {key: value for key, value in vars(options).items() if key != "json"} | {"model": options.model.name}
    about = {"options": about, **machine()}
    known = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else {}

    def keep(cost, kills, moves):
        if options.json is not None:
            write_json(options.json, about | {"cost": cost, "kills": kills, "moves": moves})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cost, kills, moves = runner.run(measure(options, known.get("cost", {}), keep))
    keep(cost, kills, moves)
    if options.save:
        save(f"recovery-{options.name}", about | {"cost": cost, "kills": kills, "moves": moves})


if __name__ == "__main__":
    main()
