"""What 500 clients do to a supervisor that runs 8 sequences at once: which status codes they get, and how memory grows.

    python bench/overload.py [--clients 500] [--seconds 300] [--name NAME] [--save]

A supervisor of the demo as `lucevisor start` runs it, with `engine.max_sequences = 8` and a queue of 256.  Each
client asks for 4 to 40 tokens, streamed or not, again and again; after a 429 it waits as Retry-After says, two seconds
at most.  One in twenty goes away in the middle of its answer.  Memory: resident bytes of all processes of the
supervisor, every two seconds.  Target: no status but 200 and 429, no connection that breaks, memory flat.  --save
writes bench/results/overload-NAME.json.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections import Counter

import aiohttp
import psutil
from records import machine, save
from services import ROOT, supervisor

WAIT_S = 2.0
SAMPLE_S = 2.0
AWAY = 0.05


class Crowd:
    """Clients of one endpoint, and what they got."""

    def __init__(self, url, rng, max_total_tokens):
        self.url, self.rng, self.max_total_tokens = url, rng, max_total_tokens
        self.codes = Counter()  # status codes, "away" and kinds of failures
        self.n_tokens = 0
        self.seconds = []  # of whole answers
        self.examples = []

    async def ask(self, session, seconds):
        """One client."""
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            stream = self.rng.random() < 0.5
            body = {
                "prompt": f"import module_{self.rng.randrange(1000)}\n",
                "max_tokens": self.rng.randrange(4, self.max_total_tokens + 1),
                "ignore_eos": True,
                "stream": stream,
            }
            try:
                code, wait_s = await self._answer(session, body, away=self.rng.random() < AWAY)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                code, wait_s = type(error).__name__, 0.1
                self.examples.append(repr(error))
            self.codes[code] += 1
            if code == 200:
                self.n_tokens += body["max_tokens"]
                self.seconds.append(time.monotonic() - began)
            if wait_s:
                await asyncio.sleep(min(wait_s, WAIT_S) * self.rng.uniform(0.5, 1.0))

    async def _answer(self, session, body, *, away):
        async with session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                if reply.status != 429:
                    self.examples.append(f"{reply.status}: {(await reply.text())[:200]}")
                return reply.status, float(reply.headers.get("Retry-After", 1))
            if away and body["stream"]:
                await reply.content.readline()
                reply.close()
                return "away", 0.0
            text = await reply.text()
            if body["stream"] and not text.endswith("data: [DONE]\n\n"):
                self.examples.append(text[-200:])
                return "cut", 0.0
            return 200, 0.0

    @property
    def failures(self):
        return {code: n for code, n in self.codes.items() if code not in (200, 429, "away")}


async def crowd(url, n_clients, seconds, max_total_tokens):
    """Let clients ask for some seconds."""
    found = Crowd(url, random.Random(1), max_total_tokens)
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as clients:
        for _ in range(n_clients):
            clients.create_task(found.ask(session, seconds))
    return found


async def watch_memory(pid, samples):
    """Append resident bytes of a process and all below it, until cancelled."""
    supervisor = psutil.Process(pid)
    while True:
        processes = [supervisor, *supervisor.children(recursive=True)]
        samples.append(sum(process.memory_info().rss for process in processes))
        await asyncio.sleep(SAMPLE_S)


async def overload(status, n_clients, seconds, max_total_tokens=40):
    """Return the crowd and the memory's samples."""
    samples = []
    watching = asyncio.create_task(watch_memory(status["pid"], samples))
    found = await crowd(status["url"], n_clients, seconds, max_total_tokens)
    watching.cancel()
    return found, samples


def growth(samples):
    """The last fifth beside the second: the first has pages that are touched for the first time."""
    fifth = len(samples) // 5
    return statistics.mean(samples[-fifth:]) / statistics.mean(samples[fifth : 2 * fifth])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--name", default=f"cpu-{platform.machine()}")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with supervisor("overload", ROOT / "etc" / "demo.toml", "server.port=0", "engine.max_sequences=8") as status:
        found, samples = asyncio.run(overload(status, options.clients, options.seconds))
    fifth = len(samples) // 5
    result = {
        "clients": options.clients,
        "seconds": options.seconds,
        "codes": {str(code): n for code, n in found.codes.most_common()},
        "failures": {str(code): n for code, n in found.failures.items()},
        "examples": found.examples[:5],
        "tokens/s": round(found.n_tokens / options.seconds, 1),
        "seconds of an answer": {
            "p50": round(statistics.median(found.seconds), 2),
            "p95": round(statistics.quantiles(found.seconds, n=20)[-1], 2),
            "longest": round(max(found.seconds), 2),
        },
        "MiB by fifths": [round(statistics.mean(samples[i * fifth : (i + 1) * fifth]) / 2**20, 1) for i in range(5)],
        "growth": round(growth(samples), 4),
        **machine(),
    }
    print(json.dumps(result, indent=2))
    if options.save:
        save(f"overload-{options.name}", result)


if __name__ == "__main__":
    main()
