"""Two API keys at a supervisor of the demo: long requests of one fill its sequences and its part of the queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.process import DEMO, Cli

LONG = {"prompt": "import os\n", "max_tokens": 3000, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT = {"prompt": "import sys\n", "max_tokens": 4, "temperature": 0}


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, f"{url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._n_asked = 0

    async def long(self, n_tokens: asyncio.Queue[int]) -> int:
        """Stream a long answer, and count its tokens; return the status where there is none."""
        self._n_asked += 1
        body = {**LONG, "prompt": f"# {self._n_asked}\n{LONG['prompt']}"}
        async with self._session.post(self._url, json=body, headers=self._headers) as reply:
            if reply.status != 200:
                return reply.status
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    n_tokens.put_nowait(1)
            return 200

    async def short(self) -> tuple[int, dict[str, object], str]:
        async with self._session.post(self._url, json=SHORT, headers=self._headers) as reply:
            return reply.status, json.loads(await reply.text()), reply.headers.get("Retry-After", "")

    async def refused(self) -> tuple[int, str]:
        body = {**LONG, "stream": False}
        async with self._session.post(self._url, json=body, headers=self._headers) as reply:
            return reply.status, reply.headers.get("Retry-After", "")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as found:
        yield found


@pytest.mark.timeout(420)
async def test_a_full_queue_takes_short_requests_and_those_of_other_keys(
    cli: Cli, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one first\ntwo second\n")
    keys.chmod(0o600)
    settings = ("engine.max_sequences=2", "server.max_queue=4", f"server.api_keys_file={keys}")
    url = cli.start(DEMO, *settings)["url"]
    one, two = Client(session, url, "one"), Client(session, url, "two")
    tokens: asyncio.Queue[int] = asyncio.Queue()
    crowd = [asyncio.create_task(one.long(tokens)) for _ in range(6)]  # two run, four wait
    for _ in range(200):  # by then one of the two was served more than a short request asks for
        await tokens.get()
    status, retry_after = await one.refused()
    assert status == 429
    assert int(retry_after) >= 1
    status, body, _ = await one.short()
    assert status == 200
    assert body["usage"]["completion_tokens"] == 4  # type: ignore[index]
    others: asyncio.Queue[int] = asyncio.Queue()
    crowd.append(asyncio.create_task(two.long(others)))
    await others.get()  # it started, though three of the other key were before it
    status, _, _ = await two.short()
    assert status == 200
    assert not any(task.done() for task in crowd)
    assert cli.status()["engine"]["preemptions"] >= 2
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    cli.stop()
