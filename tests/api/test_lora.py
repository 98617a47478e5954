"""LoRA adapters are models to clients: named by requests, listed with a parent, chosen by llama.cpp's `lora`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from lucevisor.api.contexts import ModelCard
from lucevisor.api.server import create_app, listen, serve
from tests.api.scripted_model import Rig
from tests.api.test_models import REQUESTS, Server

SQL = ModelCard(name="sql", created_s=1_700_000_001, path="sql.gguf", architecture="qwen35", parent="base", scale=0.5)
POET = ModelCard(name="poet", created_s=1_700_000_002, path="poet.gguf", architecture="qwen35", parent="base")
BASE = ModelCard(
    name="base", created_s=1_700_000_000, path="base.gguf", architecture="qwen35", adapters=(SQL, POET), aliases=("*",)
)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    rig = Rig(model=BASE)
    runner, url = await serve(create_app(rig.context), listen("127.0.0.1", 0))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        yield Server({"base": rig}, url, session)
    await runner.cleanup()


def adapters(server: Server) -> list[str]:
    """The adapters of the sequences that were opened since the last call."""
    opened = server.rigs["base"].stage.opened
    found = [one.adapter for one in opened]
    opened.clear()
    return found


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_each_dialect_names_an_adapter_as_its_model(server: Server, path: str, body: dict) -> None:
    for name, adapter in (("sql", "sql"), ("poet:latest", "poet"), ("base", ""), ("gpt-4o", "")):
        status, answer = await server.post(path, model=name, **body)
        assert status == 200, answer
        assert adapters(server) == [adapter]
        assert answer["model"].removesuffix(":latest") == (adapter or "base")
    status, answer = await server.post(path, **body)
    assert (status, adapters(server)) == (200, [""])


async def test_a_long_body_and_each_choice_have_the_adapter(server: Server) -> None:
    messages = [{"role": "user", "content": "long " * 80}, {"role": "user", "content": "x" * 4000}]
    status, answer = await server.post("/v1/chat/completions", model="sql", messages=messages[:1], n=2, max_tokens=2)
    assert (status, adapters(server)) == (200, ["sql", "sql"]), answer
    ignored = "y" * 8000
    status, answer = await server.post("/v1/completions", model="poet", prompt="Hi", max_tokens=2, user=ignored)
    assert (status, adapters(server)) == (200, ["poet"]), answer


async def test_adapters_are_listed_with_their_parent(server: Server) -> None:
    _, listed = await server.get("/v1/models")
    found = [(one["id"], one.get("parent"), one.get("root")) for one in listed["data"]]
    assert found == [("base", None, None), ("sql", "base", "sql.gguf"), ("poet", "base", "poet.gguf")]
    _, one = await server.get("/v1/models/sql")
    assert (one["id"], one["parent"]) == ("sql", "base")
    _, tags = await server.get("/api/tags")
    assert [tag["name"] for tag in tags["models"]] == ["base:latest", "sql:latest", "poet:latest"]
    assert (await server.post("/lora-adapters"))[0] == 405
    _, listed = await server.get("/lora-adapters")
    assert listed == [
        {"id": 0, "name": "sql", "path": "sql.gguf", "scale": 0.5},
        {"id": 1, "name": "poet", "path": "poet.gguf", "scale": 1.0},
    ]


@pytest.mark.parametrize(
    ("lora", "adapter"),
    [
        ([{"id": 1, "scale": 1.0}], "poet"),
        ([{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0}], "sql"),
        ([{"id": 0, "scale": 0.0}], ""),
        ([], ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("named", [{}, {"model": "base"}])
async def test_llama_cpp_chooses_by_id(server: Server, lora: list | None, adapter: str, named: dict) -> None:
    for path, body in REQUESTS[-1:] + REQUESTS[:1]:
        status, answer = await server.post(path, lora=lora, **body, **named)
        assert (status, adapters(server)) == (200, [adapter]), answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora": [{"id": 2, "scale": 1}]}, "lora: has the id 2"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora: has the scale 1; that of sql is 0.5"),
        ({"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1}]}, "lora: has several adapters"),
        ({"lora": "sql"}, 'lora: "sql" is not a list of adapters'),
        ({"lora": [{"id": "x", "scale": 1}]}, 'lora[0].id: "x": expected integer, got string'),
        ({"lora": [{"id": 0, "scale": 0.5}, 5]}, "lora[1]: 5: expected object, got integer"),
        ({"lora": [{"id": 0}]}, "lora[0].scale: is missing; it is required"),
        ({"lora": [{"id": 1, "scale": 1}], "model": "sql"}, 'lora: is beside model "sql"'),
    ],
)
async def test_what_cannot_be_is_refused_by_name(server: Server, body: dict, message: str) -> None:
    status, answer = await server.post("/completion", prompt="Hi", n_predict=2, **body)
    assert status == 400
    assert answer["error"]["message"].startswith(message)
    assert adapters(server) == []


async def test_without_adapters_lora_has_no_effect_and_another_name_is_a_404(server: Server) -> None:
    server.rigs["base"].context.model = ModelCard(name="base", created_s=1)
    status, answer = await server.post("/completion", prompt="Hi", n_predict=2, model="sql")
    assert (status, answer["error"]["message"]) == (404, 'the model "sql" does not exist here; this server has "base"')
    status, _ = await server.post("/completion", prompt="Hi", n_predict=2, lora=[])
    assert (status, adapters(server)) == (200, [""])


async def test_tokens_count_for_the_model(server: Server) -> None:
    await server.post("/v1/completions", model="sql", prompt="Hi", max_tokens=2)
    lines = await server.metrics()
    assert 'lucevisor_generated_tokens_total{model="base"} 2.0' in lines
    assert not any('model="sql"' in line for line in lines)


async def test_embeddings_are_made_with_the_adapter(server: Server) -> None:
    for name, adapter in (("sql", "sql"), ("base", "")):
        status, answer = await server.post("/v1/embeddings", model=name, input="Hi")
        assert (status, answer["model"], adapters(server)) == (200, name, [adapter]), answer


async def test_labels_are_decided_and_ranked_with_the_adapter(server: Server) -> None:
    for name, adapter in (("sql", "sql"), ("base", "")):
        body = {"prompt": "Is it so?", "labels": ["yes", "no"]}
        status, answer = await server.post("/v1/decisions", model=name, **body)
        assert (status, {*adapters(server)}) == (200, {adapter}), answer
        status, answer = await server.post("/v1/rerank", model=name, query="Is it?", documents=["yes", "no"])
        assert (status, {*adapters(server)}) == (200, {adapter}), answer
