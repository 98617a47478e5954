"""No body, however long or odd, keeps the event loop from running for more than 20 ms (on a slower machine: more).

The server runs in a process of its own (watched_server.py) and its clients here, so that no client's work counts.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.costs import loop_s

MOST_MS = 20.0  # of 99.9 % of all times that the loop is late, where USUAL_LOOP_MS holds
WORST_MS = 60.0  # of all: bodies of 16 MB took 6,500
N_LOOP = 262_144
USUAL_LOOP_MS = 8.0  # of a plain Python loop over as many numbers; slower machines, and busy ones, get more time
TRIES = 5  # a machine with other work has its own pauses
FRESH_PAGES_MS = 500.0  # see test_bodies_at_once_wait_their_turn
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""So that a second try finds the pages of the first: fresh ones may take a virtual machine's host its time."""
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ROOT = Path(__file__).parents[2]


class Server:
    """A watched server; `gaps` are those since the last call, in milliseconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.watched_server"],
            cwd=ROOT,
            env=os.environ | KEEP_MEMORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http")

    def gaps(self) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(100) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[Callable[[str, bytes], Awaitable[tuple[int, Any]]]]:
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(100)) as session:

        async def post(path: str, body: bytes) -> tuple[int, Any]:
            async with session.post(url + path, data=io.BytesIO(body), headers=headers) as response:
                raw = await response.read()
                return response.status, json.loads(raw) if len(raw) < 100_000 else None

        yield post


async def watched(server: Server, work: Callable[[], Awaitable[None]], most_ms: float = MOST_MS) -> None:
    """Do the work until the loop was never late for long, at most TRIES times."""
    seen = []
    for _ in range(TRIES):
        before_s = loop_s(range(N_LOOP))
        server.gaps()
        await work()
        gaps = sorted(server.gaps())
        slower = max(1.0, 1000 * max(before_s, loop_s(range(N_LOOP))) / USUAL_LOOP_MS)
        seen.append((gaps[-1 - len(gaps) // 1000], gaps[-1], len(gaps), slower))
        if seen[-1][0] <= slower * most_ms and seen[-1][1] <= slower * max(most_ms, WORST_MS):
            return
    raise AssertionError(f"p99.9 and longest gap of the loop in ms, of how many, on a machine how slow: {seen}")


def chat(text: str = "Hi", **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}).encode()


def tools(n: int) -> list[object]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "d" * 300}}}
    function = {"description": "d" * 600, "parameters": parameters}
    return [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(n)]


SCHEMA = {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(27_000)}}
PROSE = "The quick brown fox jumps over the lazy dog. "

# name: path, body, status, code of the error
CASES: dict[str, Callable[[], tuple[str, bytes, int, str | None]]] = {
    "a word of 33 MB": lambda: (CHAT, chat("x" * 33_000_000), 400, "template_error"),
    "10 MB of arrays": lambda: (CHAT, b'{"messages":[' + b"[]," * 3_300_000 + b"[]]}", 400, "invalid_value"),
    "10 MB of objects": lambda: (
        CHAT,
        b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"prediction":{"x":['
        + b'{"a":1},' * 1_250_000
        + b"1]}}",
        200,
        None,
    ),
    "a template of 1 MB": lambda: (CHAT, chat(" " * 1_000_000), 200, None),
    "a template of 1 MB that does not fit": lambda: (CHAT, chat(PROSE * 22_000), 400, "context_length_exceeded"),
    "10,000 messages": lambda: (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 10_000, "max_tokens": 2}).encode(),
        200,
        None,
    ),
    "tools of 1 MB": lambda: (CHAT, chat(tools=tools(1000)), 400, "context_length_exceeded"),
    "tools of many values": lambda: (CHAT, chat(tools=[{"a": [1] * 400_000}]), 400, "invalid_value"),
    "a schema of 1 MB": lambda: (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        400,
        "invalid_grammar",
    ),
    "an expression that explodes": lambda: (CHAT, chat(regex="((a{1000}){1000}){1000}"), 400, "invalid_grammar"),
    "biases for every token": lambda: (
        CHAT,
        chat(logit_bias={str(i): 1 for i in range(100_000)}),
        400,
        "invalid_value",
    ),
    "ids of 1 MB": lambda: (
        PLAIN,
        json.dumps({"prompt": [300] * 200_000, "n": 4, "max_tokens": 1}).encode(),
        200,
        None,
    ),
    "an echo of 4 MB": lambda: (
        PLAIN,
        json.dumps({"prompt": " " * 1_000_000, "echo": True, "n": 4, "max_tokens": 1}).encode(),
        200,
        None,
    ),
    "/tokenize of 1 MB": lambda: ("/tokenize", json.dumps({"content": PROSE * 22_000}).encode(), 200, None),
    "/tokenize with pieces": lambda: (
        "/tokenize",
        json.dumps({"content": PROSE * 10_000, "with_pieces": True}).encode(),
        200,
        None,
    ),
    "/detokenize of 1 MB": lambda: ("/detokenize", json.dumps({"tokens": [300] * 250_000}).encode(), 200, None),
}


QUICK = ("a template of 1 MB", "a schema of 1 MB")
"""What clients send; the others are slow tests."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
async def test_one_body(server, name):
    path, body, status, code = CASES[name]()

    async def work() -> None:
        async with clients(server.url) as post:
            got, answer = await post(path, body)
            assert got == status, answer
            assert code is None or answer["error"]["code"] == code

    await watched(server, work)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_500_clients():
    """In a fresh process: what the bodies above left behind is looked at by the garbage collector."""
    server = Server()
    try:

        async def work() -> None:
            async with clients(server.url) as post:

                async def client() -> None:
                    status, answer = await post(CHAT, chat())
                    assert status == 200, answer

                await asyncio.gather(*(client() for _ in range(500)))

        await watched(server, work)
    finally:
        server.close()


async def test_bodies_at_once_wait_their_turn(server):
    """Four bodies of 33 MB: one after the other is read, and a short request beside them is answered at once.

    The loop stood 100 to 140 ms in one run of the whole suite, and never alone or beside other load.  That a virtual
    machine asks its host for the 132 MB of fresh pages is suspected, not shown; reading them in the loop takes seconds.
    """

    async def work() -> None:
        async with clients(server.url) as post:
            long = [asyncio.create_task(post(CHAT, chat("x" * 33_000_000))) for _ in range(4)]
            await asyncio.sleep(0.2)
            status, _ = await post(CHAT, chat())
            assert status == 200
            assert not all(task.done() for task in long)
            assert [status for status, _ in await asyncio.gather(*long)] == [400] * 4

    await watched(server, work, FRESH_PAGES_MS)
