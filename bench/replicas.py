"""What several replicas do together, beside one of them.

    python bench/replicas.py [--replicas 2] [--streams 32] [--requests 3] [--rounds 3] [--paced] [--name NAME] [--save]
                             [--model FILE --backend cuda] [--watched 400]

The demo model in replicas of one cpu group with one thread each, or a model in replicas of a GPU each, in turns of one
replica alone and all.  Throughput: --streams clients, and so many for each replica, ask --requests times each for 64
tokens after a random prompt of 200.  Reuse: the share of the prompts
of 8 conversations of 6 turns, at the same time, that was cached.  Loss (not of one alone): the daemon of a replica is
killed under 8 streams of --watched tokens; the longest time between two tokens of each stream.
--paced: throughput alone, with daemons that compute nothing and take 10 ms a step of up to 8 sequences
(paced_daemon.py), so that router and supervisor are measured, not the cores.
Targets: --replicas times the throughput, where each has cores of its own; 0.95 of the reuse; no request fails.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from functools import partial
from pathlib import Path

import aiohttp
from records import machine, save
from services import DEMO, paced_python, supervisor

N_PROMPT, N_ANSWER = 200, 64


def configuration(options, n_replicas, directory):
    """A TOML file for so many replicas."""
    text = f'[model]\npath = "{options.model}"\n[server]\nport = 0\n[draft]\nkind = "off"\n'
    more = ""
    if options.backend == "cpu":
        text += '[engine]\nmax_sequences = 8\ndtype = "float32"\n'
    if options.paced:
        more = f'python = "{paced_python(directory)}"\nenv = {{PACED_STEP_S = "0.01", PACED_IDS = "300,301"}}\n'
    for i in range(n_replicas):
        device = "threads = 1" if options.backend == "cpu" else f'visible_devices = ["{i}"]'
        text += f'[groups.g{i}]\nbackend = "{options.backend}"\n{device}\n{more}'
        text += f'[replicas.r{i}]\ngroups = ["g{i}"]\n'
    path = directory / f"replicas{n_replicas}.toml"
    path.write_text(text)
    return path


def random_tokens(rng, n):
    return [rng.randrange(5, 4000) for _ in range(n)]


async def stream(session, url, rng, n_requests):
    for _ in range(n_requests):
        await complete(session, url, random_tokens(rng, N_PROMPT))


async def complete(session, url, prompt, n_answer=N_ANSWER):
    body = {"prompt": prompt, "max_tokens": n_answer, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != n_answer:
            raise SystemExit(json.dumps(answer))
        return answer


async def conversation(session, url, system, rng, n_turns):
    """Tokens of the prompts, and how many of them were cached."""
    prompt, n_tokens, n_cached = [*system], 0, 0
    for _ in range(n_turns):
        prompt += random_tokens(rng, 60)
        answer = await complete(session, url, prompt, 32)
        n_tokens += len(prompt)
        n_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        prompt += answer["choices"][0]["token_ids"]
    return n_tokens, n_cached


async def reuse(session, url, seed):
    system = random_tokens(random.Random(seed), 300)
    await complete(session, url, system, 1)
    talks = [conversation(session, url, system, random.Random(seed + 1 + i), 6) for i in range(8)]
    found = await asyncio.gather(*talks)
    return round(sum(cached for _, cached in found) / sum(n for n, _ in found), 4)


async def gaps_of(session, url, rng, n_tokens):
    """Seconds between the tokens of a stream, in order."""
    body = {"prompt": random_tokens(rng, N_PROMPT), "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    n, last, gaps = 0, None, []
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.content:
            if b'"error"' in line:
                raise SystemExit(line.decode())
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                gaps += [now - last] if last is not None else []
                n, last = n + 1, now
    return gaps


async def loss(session, url, pids, n_tokens):
    """The longest gap of each stream, of those whose replica lost its daemons first."""
    streams = [asyncio.create_task(gaps_of(session, url, random.Random(99 + i), n_tokens)) for i in range(8)]
    await asyncio.sleep(3.0)
    if any(stream.done() for stream in streams):
        raise SystemExit("streams ended before the loss; give them more tokens")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return sorted((round(max(gaps), 3) for gaps in await asyncio.gather(*streams)), reverse=True)


async def tokens_per_s(session, url, options, seed, n_streams):
    await stream(session, url, random.Random(0), 2)
    started = time.perf_counter()
    streams = (stream(session, url, random.Random(seed + i), options.requests) for i in range(n_streams))
    await asyncio.gather(*streams)
    return round(n_streams * options.requests * N_ANSWER / (time.perf_counter() - started), 1)


async def measured(status, options, n_replicas, seed):
    """What one supervisor does."""
    url, pids = status["url"], [group["pid"] for group in status["groups"] if group["name"] == "g0"]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:  # until all replicas serve
            async with session.get(f"{url}/v1/models") as response:
                replicas = (await response.json())["data"][0].get("replicas", {})
            if len(replicas) == n_replicas and all(each["ready"] for each in replicas.values()):
                break
            await asyncio.sleep(0.1)
        for n_streams in {options.streams, options.streams * n_replicas} if options.backend != "cpu" else ():
            await tokens_per_s(session, url, options, seed + 500, n_streams)  # graphs are captured
        found = {"tokens/s": await tokens_per_s(session, url, options, seed, options.streams)}
        if n_replicas > 1:
            n_streams = options.streams * n_replicas
            found["tokens/s, so many streams each"] = await tokens_per_s(session, url, options, seed + 300, n_streams)
        if not options.paced:
            found["cached share"] = await reuse(session, url, seed)
        if not options.paced and n_replicas > 1:
            found["longest gaps, s"] = await loss(session, url, pids, options.watched)
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--backend", choices=("cpu", "cuda", "hip"), default="cpu")
    parser.add_argument("--watched", type=int, default=400)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    before, found = machine(), {1: [], options.replicas: []}
    for number in range(options.rounds):
        for n_replicas, rounds in found.items():
            with supervisor("replicas", partial(configuration, options, n_replicas)) as status:
                rounds.append(asyncio.run(measured(status, options, n_replicas, 1000 * number)))
            print(f"round {number + 1}: {n_replicas} replicas {rounds[-1]}")
    conditions = vars(options) | before | {"load average after": [round(load, 2) for load in os.getloadavg()]}
    conditions["model"] = options.model.name
    record = {"conditions": {key: value for key, value in conditions.items() if key not in ("save", "name")}}
    for figure in ("tokens/s", "cached share"):
        medians = {n: statistics.median(one.get(figure, 0.0) for one in rounds) for n, rounds in found.items()}
        if medians[1]:
            record[figure] = {**medians, "ratio": round(medians[options.replicas] / medians[1], 3)}
    record["rounds"] = found
    print(json.dumps(record, indent=1))
    if options.save:
        save(f"replicas-{options.name}", record)


if __name__ == "__main__":
    main()
