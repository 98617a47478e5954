"""What several replicas do together, beside one of them.

    python bench/replicas.py [--replicas 2] [--streams 32] [--requests 3] [--rounds 3] [--paced] [--name NAME] [--save]

The demo model in replicas of one cpu group with one thread each.  --streams clients ask --requests times each for 64
tokens after a random prompt of 200; in turns of one replica alone and all.  Tokens a second of all streams together.
--paced: daemons that compute nothing and take 10 ms a step of up to 8 sequences (paced_daemon.py), so that router and
supervisor are measured, not the cores.  Target: --replicas times as much, where each has cores of its own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from functools import partial

import aiohttp
from records import machine, save
from services import DEMO, paced_python, supervisor

N_PROMPT, N_ANSWER = 200, 64


def configuration(options, n_replicas, directory):
    """A TOML file for so many replicas."""
    text = f'[model]\npath = "{DEMO}"\n[engine]\nmax_sequences = 8\n[server]\nport = 0\n[draft]\nkind = "off"\n'
    more = ""
    if options.paced:
        more = f'python = "{paced_python(directory)}"\nenv = {{PACED_STEP_S = "0.01", PACED_IDS = "300,301"}}\n'
    for i in range(n_replicas):
        text += f'[groups.g{i}]\nbackend = "cpu"\nthreads = 1\n{more}[replicas.r{i}]\ngroups = ["g{i}"]\n'
    path = directory / f"replicas{n_replicas}.toml"
    path.write_text(text)
    return path


async def stream(session, url, rng, n_requests):
    for _ in range(n_requests):
        body = {
            "prompt": [rng.randrange(5, 4000) for _ in range(N_PROMPT)],
            "max_tokens": N_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200 or answer["usage"]["completion_tokens"] != N_ANSWER:
                raise SystemExit(json.dumps(answer))


async def tokens_per_s(url, options, seed):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:  # until all replicas serve
            async with session.get(f"{url}/v1/models") as response:
                replicas = (await response.json())["data"][0].get("replicas", {})
            if replicas and all(each["ready"] for each in replicas.values()):
                break
            await asyncio.sleep(0.1)
        await stream(session, url, random.Random(0), 2)
        started = time.perf_counter()
        streams = (stream(session, url, random.Random(seed + i), options.requests) for i in range(options.streams))
        await asyncio.gather(*streams)
        return options.streams * options.requests * N_ANSWER / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    before, found = machine(), {1: [], options.replicas: []}
    for number in range(options.rounds):
        for n_replicas, speeds in found.items():
            with supervisor("replicas", partial(configuration, options, n_replicas)) as status:
                speeds.append(round(asyncio.run(tokens_per_s(status["url"], options, 1000 * number)), 1))
            print(f"round {number + 1}: {n_replicas} replicas {speeds[-1]} tokens/s")
    medians = {n: statistics.median(speeds) for n, speeds in found.items()}
    conditions = vars(options) | before | {"load average after": [round(load, 2) for load in os.getloadavg()]}
    record = {
        "conditions": {key: value for key, value in conditions.items() if key not in ("save", "name")},
        "tokens/s": {str(n): speeds for n, speeds in found.items()},
        "median": {str(n): value for n, value in medians.items()},
        "ratio": round(medians[options.replicas] / medians[1], 3),
    }
    print(json.dumps(record, indent=1))
    if options.save:
        save(f"replicas-{options.name}", record)


if __name__ == "__main__":
    main()
