"""What other clients do to a few short requests: two keys, 200 long requests, 400 clients that ignore Retry-After.

    python bench/isolation.py [--seconds 40] [--case keys|long|full] [--name NAME] [--save]

A supervisor of the demo as `lucevisor start` runs it, with two API keys, 8 sequences and a queue of 256.  Four clients
stream short answers, first alone, then beside a crowd:

- keys: 320 clients of the other key, answers of 64 tokens; after a 429 they ask again in a second.
- long: 200 clients of the same key, answers of 400 tokens.
- full: 400 of those, which ask again half a second after a 429, whatever Retry-After says.

Targets: no 429 for the four, and the p95 of their first token at most 3 x alone, or 0.5 s.  --save writes
bench/results/isolation-NAME.json, with every time.
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
from records import machine, save
from services import ROOT, supervisor

CASES = {  # crowd: clients, key, tokens of the prompt and of the answer, pause after a 429
    "keys": (320, "other", 60, 64, 1.0),
    "long": (200, "own", 60, 400, 1.0),
    "full": (400, "own", 60, 400, 0.5),
}
PAUSE_S = 0.5


async def client(session, url, key, n_prompt, n_answer, pause_s, retry_s, seen, end):
    """Ask until ``end``; append (seconds to the first token, when it was asked, tokens) of each answer to ``seen``."""
    headers = {"Authorization": f"Bearer {key}"}
    number = 0
    while (began := time.monotonic()) < end:
        number += 1
        prompt = f"{id(seen)} {began} {number} " + "alpha beta " * (n_prompt // 2)
        body = {"prompt": prompt, "max_tokens": n_answer, "ignore_eos": True, "stream": True, "temperature": 0}
        first, n = None, 0
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                seen["codes"][str(reply.status)] += 1
                if reply.status == 200:
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            n += 1
                            first = first or time.monotonic() - began
                            if time.monotonic() > end:
                                break
                elif reply.status == 429:
                    seen["retry after"].append(float(reply.headers["Retry-After"]))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen["codes"][type(error).__name__] += 1
            continue
        if first is not None:
            seen["first token s"].append(round(first, 4))
        seen["tokens"] += n
        await asyncio.sleep(pause_s if first is not None else retry_s)


def fresh():
    return {"codes": Counter(), "first token s": [], "tokens": 0, "retry after": []}


def p95(values):
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else None


async def measure(url, case, seconds):
    """Return what all saw: the four alone, then beside the crowd, which begins five seconds ahead."""
    n_crowd, key, n_prompt, n_answer, retry_s = CASES[case]
    alone, beside, crowd = fresh(), fresh(), fresh()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def four(seen, seconds):
            end = time.monotonic() + seconds
            each = (client(session, url, "own", 16, 16, PAUSE_S, PAUSE_S, seen, end) for _ in range(4))
            await asyncio.gather(*each)

        await four(fresh(), 3)
        await four(alone, seconds / 2)
        end = time.monotonic() + 5 + seconds
        crowding = [
            asyncio.create_task(client(session, url, key, n_prompt, n_answer, 0.0, retry_s, crowd, end))
            for _ in range(n_crowd)
        ]
        await asyncio.sleep(5)
        await four(beside, seconds)
        for task in crowding:
            task.cancel()
        await asyncio.gather(*crowding, return_exceptions=True)
    found = {"alone": alone, "beside": beside, "crowd": crowd}
    for seen in found.values():
        seen["p95 s"] = p95(seen["first token s"])
        seen["n"] = len(seen["first token s"])
        seen["codes"] = dict(seen["codes"])
        seen["retry after"] = dict(Counter(seen["retry after"]).most_common(5))
    crowd["first token s"] = sorted(crowd["first token s"])[:: max(1, len(crowd["first token s"]) // 50)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--name", default=f"cpu-{platform.machine()}")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    result = {"seconds": options.seconds, **machine()}
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text("own own\nother other\n")
        keys.chmod(0o600)
        for case in options.case or CASES:
            settings = ("server.port=0", "engine.max_sequences=8", f"server.api_keys_file={keys}")
            with supervisor("isolation", ROOT / "etc" / "demo.toml", *settings) as status:
                result[case] = found = asyncio.run(measure(status["url"], case, options.seconds))
            times = [found[seen]["p95 s"] for seen in ("alone", "beside")]
            print(case, "p95 alone, beside:", times, "codes:", found["beside"]["codes"], found["crowd"]["codes"])
            print(json.dumps({seen: found[seen]["retry after"] for seen in found}))
    if options.save:
        save(f"isolation-{options.name}", result)


if __name__ == "__main__":
    main()
