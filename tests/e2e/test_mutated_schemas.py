"""Schemas that are odd, huge or wrong: whatever a client sends ends its own request at most, below 500."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import aiohttp
import psutil
import pytest

from tests.fuzz.schema_requests import Request, mutant, pathological
from tests.fuzz.steady import amounts

AT_ONCE = 4
WORKERS = 2
MANY = 200


def workers(supervisor: int) -> set[int]:
    """The preprocessing workers of a supervisor."""
    found = set()
    for child in psutil.Process(supervisor).children():
        try:
            if "--multiprocessing-fork" in child.cmdline():
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


class Outcome:
    """Statuses of all requests, and the workers that were seen."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.workers: set[int] = set()
        self.faults: list[str] = []
        self.slowest: list[tuple[float, str, Request]] = []


async def send(url: str, pid: int, requests: dict[str, Request], outcome: Outcome) -> None:
    """Send requests, some at once."""
    waiting = list(requests.items())[::-1]

    async def sender(session: aiohttp.ClientSession) -> None:
        while waiting:
            seed, (path, body) = waiting.pop()
            start = time.monotonic()
            headers = {"Content-Type": "application/json"}
            async with session.post(url + path, data=body.encode("utf-8", "surrogatepass"), headers=headers) as answer:
                text = await answer.text()
            outcome.slowest.append((time.monotonic() - start, seed, (path, body)))
            outcome.statuses[answer.status] += 1
            if answer.status >= 500 or '"server_error"' in text or "Traceback" in text:
                outcome.faults.append(f"seed {seed!r}: {answer.status} {text[:500]}\n{path} {body[:2000]}")
            outcome.workers |= workers(pid)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(sender(session) for _ in range(AT_ONCE)))


async def stream_beside(url: str, gaps: list[tuple[float, float]]) -> None:
    """Answer after answer until cancelled; what comes between two of its chunks is noted."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        while True:
            last = 0.0
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        now = time.monotonic()
                        if last:
                            gaps.append((now - last, now))
                        last = now


async def check(url: str, pid: int, requests: dict[str, Request]) -> str:
    """Send the requests, many of them beside a stream, and judge; returns what to print."""
    outcome, gaps = Outcome(), list[tuple[float, float]]()
    sent = asyncio.create_task(send(url, pid, requests, outcome))
    if len(requests) < MANY:
        await sent
    else:
        beside = asyncio.create_task(stream_beside(url, gaps))
        await asyncio.wait([beside, sent], return_when=asyncio.FIRST_COMPLETED)
        assert not beside.done(), beside.exception()
        beside.cancel()
        await sent
    assert not outcome.faults, "\n\n".join(outcome.faults)
    assert len(outcome.workers) <= WORKERS, f"{len(outcome.workers) - WORKERS} workers lost or more: {outcome.workers}"
    longest = ", ".join(f"{gap * 1000:.0f}" for gap, _ in sorted(gaps, reverse=True)[:5])
    slow = sorted(outcome.slowest, key=lambda one: -one[0])[:3]
    told = "; ".join(f"{seconds:.2f} s {seed!r} {path}" for seconds, seed, (path, _) in slow)
    return f"{dict(outcome.statuses)}; longest gaps of the stream beside: {longest} ms of {len(gaps)}; slowest: {told}"


def drawn(name: str, n: int, draw: Callable[[random.Random], Request]) -> dict[str, Request]:
    return {seed: draw(random.Random(seed)) for seed in (f"{name} {i}" for i in range(n))}


@pytest.mark.parametrize("n", amounts(30, 2400))
def test_mutated_schemas(endpoint: str, demo_status: dict[str, object], n: int) -> None:
    url, pid = endpoint.removesuffix("/v1"), demo_status["pid"]
    assert isinstance(pid, int)
    print(asyncio.run(check(url, pid, drawn("mutant", n, mutant))), file=sys.stderr)


@pytest.mark.parametrize("n", amounts(5, 200))
def test_pathological_schemas(endpoint: str, demo_status: dict[str, object], n: int) -> None:
    url, pid = endpoint.removesuffix("/v1"), demo_status["pid"]
    assert isinstance(pid, int)
    print(asyncio.run(check(url, pid, drawn("pathological", n, pathological))), file=sys.stderr)
