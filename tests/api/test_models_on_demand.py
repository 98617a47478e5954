"""Loading and unloading over each API, and what lists say of a model that is not loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest

from lucevisor.api.contexts import ModelCard
from lucevisor.api.dialects.ollama import keep_alive
from lucevisor.api.errors import ApiError
from lucevisor.api.server import create_app, listen, serve
from lucevisor.errors import LucevisorError
from tests.api.scripted_model import Rig


@dataclass
class Control:
    """A model that loads at once, unless there is a ``problem``."""

    state: str = "unloaded"
    problem: str = ""
    unloads_in_s: float | None = None
    pin: bool = False
    calls: list[object] = field(default_factory=list)

    async def load(self) -> None:
        self.calls.append("load")
        if self.problem:
            raise LucevisorError(f"model m is not loaded: {self.problem}")
        self.state = "loaded"

    async def unload(self) -> None:
        self.calls.append("unload")
        if self.pin:
            raise LucevisorError("model m is pinned")
        self.state = "unloaded"

    def keep_alive(self, seconds: float) -> None:
        self.calls.append(seconds)
        self.unloads_in_s = None if seconds < 0 else seconds


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, control: Control) -> None:
        self._session, self._url, self.control = session, url, control

    async def get(self, path: str) -> dict:
        async with self._session.get(self._url + path) as response:
            return await response.json()

    async def post(self, path: str, **body: object) -> tuple[int, dict]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    control = Control()
    rig = Rig(model=ModelCard(name="m", created_s=1_700_000_000, path="m.gguf", architecture="qwen35"))
    rig.context.control = control
    runner, url = await serve(create_app(rig.context), listen("127.0.0.1", 0))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield Client(session, url, control)
    await runner.cleanup()


STATES = [("unloaded", "unloaded", 0), ("parked", "sleeping", 0), ("loading", "loading", 0), ("loaded", "loaded", 1)]


@pytest.mark.parametrize(("state", "shown", "n_running"), [*STATES, ("leaving", "loaded", 1)])
async def test_lists_show_the_state_as_the_servers_do_that_they_come_from(client, state, shown, n_running) -> None:
    client.control.state = state
    assert (await client.get("/v1/models"))["data"][0]["status"] == {"value": shown}
    assert len((await client.get("/api/ps"))["models"]) == n_running
    assert len((await client.get("/api/tags"))["models"]) == 1


async def test_a_model_is_loaded_and_unloaded_by_its_name(client) -> None:
    assert await client.post("/models/load", model="m") == (200, {"success": True})
    assert (await client.get("/v1/models"))["data"][0]["status"] == {"value": "loaded"}
    assert await client.post("/models/unload", model="m") == (200, {"success": True})
    assert client.control.calls == ["load", "unload"]
    assert (await client.post("/models/load", model="other"))[0] == 404
    assert (await client.post("/models/load", name="m"))[0] == 400


async def test_a_load_that_fails_is_answered_with_the_reason(client) -> None:
    client.control.problem = "group gpu: cuda:0: out of memory"
    status, answer = await client.post("/models/load", model="m")
    assert (status, answer["error"]["message"]) == (409, "model m is not loaded: group gpu: cuda:0: out of memory")
    status, answer = await client.post("/api/generate", model="m")
    assert (status, answer["error"]) == (503, "model m is not loaded: group gpu: cuda:0: out of memory")
    shown = (await client.get("/v1/models"))["data"][0]["status"]
    assert shown == {"value": "unloaded", "failed": True, "reason": "group gpu: cuda:0: out of memory"}


async def test_an_unload_that_cannot_be_is_a_conflict_with_the_reason(client) -> None:
    client.control.pin = True
    status, answer = await client.post("/models/unload", model="m")
    assert (status, answer["error"]["message"], answer["error"]["code"]) == (
        409, "model m is pinned", "model_not_unloaded",
    )  # fmt: skip
    status, answer = await client.post("/api/generate", model="m", keep_alive=0)
    assert (status, answer["error"]) == (409, "model m is pinned")


ORDERS = [
    ({}, "load", ["load"]),
    ({"keep_alive": 0}, "unload", ["unload"]),
    ({"keep_alive": "1h30m"}, "load", ["load", 5400.0]),
    ({"keep_alive": -1}, "load", ["load", -1]),
]


@pytest.mark.parametrize(("more", "reason", "calls"), ORDERS)
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_ollamas_requests_without_a_prompt_load_and_unload(client, path, more, reason, calls) -> None:
    status, answer = await client.post(path, model="m", **more)
    assert (status, answer["done_reason"], client.control.calls) == (200, reason, calls)


async def test_ollamas_keep_alive_holds_from_a_request_on(client) -> None:
    client.control.state = "loaded"
    body = {"model": "m", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    assert (await client.post("/api/generate", **body, keep_alive="5m"))[0] == 200
    assert (await client.post("/api/generate", **body))[0] == 200
    assert client.control.calls == [300.0]
    [model] = (await client.get("/api/ps"))["models"]
    assert model["expires_at"] < "2100"
    client.control.unloads_in_s = None
    [model] = (await client.get("/api/ps"))["models"]
    assert model["expires_at"] == "9999-12-31T23:59:59Z"


DURATIONS = [
    (None, None),
    (0, 0),
    (300, 300),
    ("0", 0),
    ("5m", 300),
    ("1.5h", 5400),
    ("500ms", 0.5),
    ("-1", -1),
    ("-1m", -60),
    (1e300, 3.1536e9),
    ("9999999h", 3.1536e9),
]


@pytest.mark.parametrize(("written", "seconds"), DURATIONS)
def test_durations_are_those_of_ollama(written: float | str | None, seconds: float | None) -> None:
    assert keep_alive(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "soon", "5 m", "5x", "m5", "nan", "inf", "-infinity", "1e400", "1_0", "-", "٣m"]
)
def test_what_is_no_duration_is_refused(written: str) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        keep_alive(written)
