"""Servers on real sockets, in the test's own loop and in a thread of their own (for blocking clients)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import uvloop

from lucevisor.api.server import create_app, listen, serve
from tests.api.scripted_model import Rig, Script, Seen, say, tokenizer


class Client:
    """An HTTP client of a server that runs beside it."""

    def __init__(self, rig: Rig, runner: aiohttp.web.AppRunner, url: str, session: aiohttp.ClientSession) -> None:
        self.rig, self.runner, self.url, self.session = rig, runner, url, session

    async def ask(self, path: str, body: object = None, **more: Any) -> tuple[int, Any]:
        """POST a JSON body, or GET without one; return status and decoded answer."""
        method = "GET" if body is None and "data" not in more else "POST"
        if body is not None:
            more["json"] = body
        async with self.session.request(method, self.url + path, **more) as response:
            return response.status, await response.json()

    async def chat(self, text: str = "Hi", **more: Any) -> tuple[int, Any]:
        """Ask a chat completion of one user message."""
        return await self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """POST and return the data of each server-sent event."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = (await response.read()).decode("utf-8")  # strict: no character is split
        assert text.endswith("\n\n")
        lines = [line for line in text.split("\n\n")[:-1] if not line.startswith(":")]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line.removeprefix("data: ") for line in lines]


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Start servers: `client = await start(rig)`; all are closed at the end, and no task may be left."""
    clients: list[Client] = []

    async def run(rig: Rig | None = None) -> Client:
        rig = rig or Rig()
        runner, url = await serve(create_app(rig.context), listen("127.0.0.1", 0))
        client = Client(rig, runner, url, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)))
        clients.append(client)
        return client

    yield run
    for client in clients:
        await client.session.close()
        await client.runner.cleanup()
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not [task for task in left if "pytest" not in repr(task)]


@pytest.fixture
async def client(start: Callable[..., Any]) -> Client:
    """A client of a fresh server."""
    result: Client = await start()
    return result


class Live:
    """A server on uvloop in a thread, for clients that block."""

    def __init__(self, make_rig: Callable[[], Rig]) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def begin() -> None:
            self.rig = make_rig()
            self.runner, self.url = await serve(create_app(self.rig.context), listen("127.0.0.1", 0))

        self._wait(begin())

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def do(self, work: Callable[[Rig], Any]) -> Any:
        """Run something in the server's loop."""

        async def run() -> Any:
            return work(self.rig)

        return self._wait(run())

    def close(self) -> None:
        self._wait(self.runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(100)
        self._loop.close()


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    """Start servers in threads: `server = live(lambda: Rig())`."""
    servers: list[Live] = []

    def run(make_rig: Callable[[], Rig] = Rig) -> Live:
        servers.append(Live(make_rig))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server in a thread, for the tests of a module."""
    live = Live(Rig)
    yield live
    live.close()


@pytest.fixture
async def shared_client(server: Live) -> AsyncIterator[Client]:
    """A client of the server of the module, as new: starting one, and its preprocessing worker, takes seconds."""

    def renew(rig: Rig) -> None:
        rig.stage.script, rig.stage.step_s = say("Hello!"), 0.0
        rig.stage.opened.clear()

    server.do(renew)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        yield Client(server.rig, server.runner, server.url, session)


def script(server: Live, value: Script, step_s: float = 0.0) -> None:
    """Set what the model answers, and how long a step takes."""

    def put(rig: Rig) -> None:
        rig.stage.script, rig.stage.step_s = value, step_s

    server.do(put)


def decoded(seen: Seen) -> str:
    """The text of a prompt, with its control tokens."""
    return tokenizer().decode(seen.prompt, skip_special=False)


def prompt_of(server: Live) -> str:
    """The text of the prompt that came last."""
    text: str = server.do(lambda rig: decoded(rig.stage.opened[-1]))
    return text
