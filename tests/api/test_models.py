"""One server of several models: each request goes to the one that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from lucevisor.api.contexts import ModelCard
from lucevisor.api.preprocessing import Preprocessor
from lucevisor.api.server import create_app, listen, serve
from tests.api.scripted_model import Rig, metadata

NAMES = ("large", "small")
ALIASES = {"large": ("claude-*", "small"), "small": ("claude-haiku-*", "gpt-4o")}


class Server:
    """``rigs``: the model of each name."""

    def __init__(self, rigs: dict[str, Rig], url: str, session: aiohttp.ClientSession) -> None:
        self.rigs, self._url, self._session = rigs, url, session

    async def get(self, path: str) -> tuple[int, dict]:
        async with self._session.get(self._url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, **body: object) -> tuple[int, dict]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json(content_type=None)

    async def metrics(self) -> list[str]:
        async with self._session.get(self._url + "/metrics") as response:
            return (await response.text()).splitlines()

    def opened(self) -> dict[str, int]:
        """Sequences that each model has opened since the last call."""
        counts = {}
        for name, rig in self.rigs.items():
            counts[name] = len(rig.stage.opened)
            rig.stage.opened.clear()
        return counts


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    preprocessor = Preprocessor(metadata(), metadata())
    rigs = {
        name: Rig(
            model=ModelCard(
                name=name,
                created_s=1_700_000_000,
                path=f"/models/{name}-Q8_0.gguf",
                architecture="qwen35",
                aliases=ALIASES[name],
            ),
            preprocessor=preprocessor,
            max_context=1024 if name == "large" else 512,
        )
        for name in NAMES
    }
    runner, url = await serve(create_app(*(rig.context for rig in rigs.values())), listen("127.0.0.1", 0))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        yield Server(rigs, url, session)
    await runner.cleanup()


MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 2}}),
    ("/completion", {"prompt": "Hi", "n_predict": 2}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_each_dialect_asks_the_model_that_the_request_names(server: Server, path: str, body: dict) -> None:
    for name in NAMES:
        status, answer = await server.post(path, model=name, **body)
        assert (status, answer["model"]) == (200, name)
        assert server.opened() == {other: int(other == name) for other in NAMES}
    status, answer = await server.post(path, model="huge", **body)
    assert status == 404
    assert "this server has large, small" in str(answer)
    status, answer = await server.post(path, **body)
    assert status == 400
    assert "model: is missing; this server has large, small" in str(answer)
    assert server.opened() == {"large": 0, "small": 0}


ALIASED = [
    ("claude-sonnet-4-5", "large"),
    ("claude-haiku-4", "small"),
    ("gpt-4o:latest", "small"),
    ("small", "small"),
    ("small-Q8_0", "small"),
]


@pytest.mark.parametrize(("asked", "name"), ALIASED)
@pytest.mark.parametrize(("path", "body"), [REQUESTS[0], REQUESTS[3], REQUESTS[4]])
async def test_an_alias_asks_for_its_model_unless_another_one_has_that_id(
    server: Server, path: str, body: dict, asked: str, name: str
) -> None:
    status, answer = await server.post(path, model=asked, **body)
    assert (status, answer["model"]) == (200, name)
    status, answer = await server.post(path, model="gpt-4", **body)
    assert (status, "this server has large, small" in str(answer)) == (404, True)
    assert (await server.get(f"/v1/models/{asked}"))[1]["id"] == name


async def test_a_long_body_is_read_for_its_model_in_a_worker(server: Server) -> None:
    long = [{"role": "user", "content": "word " * 600}]  # more than the small model's context
    status, answer = await server.post("/v1/chat/completions", model="large", messages=long, max_tokens=2)
    assert (status, answer["model"]) == (200, "large")
    status, answer = await server.post("/v1/chat/completions", model="small", messages=long, max_tokens=2)
    assert status == 400
    assert "512" in answer["error"]["message"]
    assert server.opened() == {"large": 1, "small": 0}


async def test_lists_and_properties_know_all_models(server: Server) -> None:
    _, listed = await server.get("/v1/models")
    assert [card["id"] for card in listed["data"]] == [*NAMES]
    assert (listed["first_id"], listed["last_id"]) == NAMES
    assert [card["max_model_len"] for card in listed["data"]] == [1024, 512]
    assert listed["data"][1]["aliases"] == ["claude-haiku-*", "gpt-4o"]
    assert (await server.get("/v1/models/small"))[1]["id"] == "small"
    assert (await server.get("/v1/models/huge"))[0] == 404
    for path in ("/api/tags", "/api/ps"):
        _, listed = await server.get(path)
        assert [card["model"] for card in listed["models"]] == ["large:latest", "small:latest"]
    _, shown = await server.post("/api/show", model="small:latest")
    assert shown["model_info"]["qwen35.context_length"] == 512
    assert (await server.get("/props?model=small"))[1]["model_alias"] == "small"
    assert (await server.get("/props"))[0] == 400
    assert (await server.get("/slots?model=large"))[1][0]["n_ctx"] == 1024


async def test_metrics_have_a_series_for_each_model(server: Server) -> None:
    for _ in range(2):
        await server.post("/v1/chat/completions", model="small", messages=MESSAGES, max_tokens=3, ignore_eos=True)
    lines = await server.metrics()
    assert 'lucevisor_generated_tokens_total{model="small"} 6.0' in lines
    assert 'lucevisor_generated_tokens_total{model="large"} 0.0' in lines
    assert 'lucevisor_prefix_lookups_total{model="small"} 2.0' in lines
    assert 'lucevisor_prefix_lookups_total{model="large"} 0.0' in lines
    assert 'lucevisor_time_to_first_token_seconds_count{model="small"} 2.0' in lines
    assert sum(line.startswith("# TYPE lucevisor_requests_running ") for line in lines) == 1
