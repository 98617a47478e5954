"""Embeddings by the unmodified `openai` and `ollama` clients, and by llama.cpp's endpoint; what is refused, and how."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import openai
import pytest

from lucevisor.api.pooling import text_ids
from lucevisor.model.spec import Pooling, PoolingType
from tests.api.conftest import Live
from tests.api.scripted_model import MODEL, Rig, ids_of, pooled_of, tokenizer

EMBEDDER = Pooling(PoolingType.LAST, generates=False)


def normed(numbers: list[float]) -> list[float]:
    length = math.hypot(*numbers)
    return [x / length for x in numbers]


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, abs=1e-6)


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as one:
        yield one


def post(server: Live, path: str, body: Any) -> tuple[int, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=120)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openai_client(server, client, encoding):
    texts = ["Hello", "world", "Hello"]
    found = client.embeddings.create(model=MODEL, input=texts, **encoding)
    assert (found.model, [one.index for one in found.data]) == (MODEL, [0, 1, 2])
    for text, one in zip(texts, found.data, strict=True):
        numbers: Any = one.embedding
        if isinstance(numbers, str):
            numbers = array("f", base64.b64decode(numbers)).tolist()
        assert numbers == near(normed(pooled_of(ids_of(text))))
    n_tokens = sum(len(ids_of(text)) for text in texts)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (n_tokens, n_tokens)


def test_token_ids_and_dimensions(client):
    for given, expected in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])):
        found = client.embeddings.create(model=MODEL, input=given, dimensions=3)
        assert [one.embedding for one in found.data] == [near(normed(pooled_of(ids)[:3])) for ids in expected]


def test_truncated(server):
    for most, expected in ((-1, 512), (7, 7), (600, 512)):
        body = {"input": "word " * 900, "truncate_prompt_tokens": most}
        status, found = post(server, "/v1/embeddings", body)
        assert (status, found["usage"]["prompt_tokens"]) == (200, expected)


def test_truncated_before_the_model_is_loaded():
    ctx: Any = SimpleNamespace(max_context=0, tokenizer=tokenizer())
    assert text_ids("word " * 900, "input", ctx, max_tokens=-1) == ids_of("word " * 900)
    assert len(text_ids("word " * 900, "input", ctx, max_tokens=7)) == 7


def test_more_texts_than_the_queue_holds(client):
    texts = [f"text {i}" for i in range(200)]
    found = client.embeddings.create(model=MODEL, input=texts)
    assert [one.embedding for one in found.data] == [near(normed(pooled_of(ids_of(text)))) for text in texts]


def test_ollama_client(server):
    with ollama.Client(host=server.url, timeout=120) as client:
        found = client.embed(MODEL, ["Hello", "world"])
        assert [*found.embeddings] == [near(normed(pooled_of(ids_of(text)))) for text in ("Hello", "world")]
        assert found.prompt_eval_count == len(ids_of("Hello")) + len(ids_of("world"))
        assert client.embed(MODEL, "Hello", dimensions=4).embeddings[0] == near(normed(pooled_of(ids_of("Hello"))[:4]))
        assert client.embeddings(MODEL, "Hello").embedding == near(pooled_of(ids_of("Hello")))
        long = "word " * 2000
        assert client.embed(MODEL, long).embeddings[0] == near(normed(pooled_of(ids_of(long)[:512])))
        with pytest.raises(ollama.ResponseError, match=r"^input: the text has .* tokens, and 512 fit"):
            client.embed(MODEL, long[:4000], truncate=False)
        assert [*client.embed(MODEL, "").embeddings] == []


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_cpp(server, path):
    _, found = post(server, path, {"content": "Hello"})
    assert found == [{"index": 0, "embedding": [near(normed(pooled_of(ids_of("Hello"))))]}]
    _, found = post(server, path, {"input": ["Hello", [5, 6]], "embd_normalize": -1})
    assert [one["embedding"][0] for one in found] == [near(pooled_of(ids_of("Hello"))), near(pooled_of([5, 6]))]


REFUSED = [
    ({}, "input", "input: is missing; it is required"),
    ({"input": ""}, "input", "input: is empty; send at least one token"),
    ({"input": []}, "input", "input: has 0 texts; send 1 to 2048"),
    ({"input": ["a"] * 2049}, "input", "input: has 2049 texts; send 1 to 2048"),
    ({"input": ["a", ""]}, "input[1]", "input[1]: is empty; send at least one token"),
    ({"input": [[1], 5]}, "input[1]", "input[1]: is a token id beside texts"),
    ({"input": [1, "a"]}, "input[1]", "input[1]: is not a token id"),
    ({"input": [1, 99999999]}, "input[1]", "input[1]: 99999999 is not a token id"),
    ({"input": list(range(1, 514))}, "input", "input: the text has 513 tokens, and 512 fit"),
    ({"input": "a", "dimensions": 9}, "dimensions", "dimensions: 9 is more than the 8 of an embedding"),
    ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: 0: expected"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format: "),
    ({"input": "a", "dimension": 3}, "dimension", "dimension: is not a parameter"),
    ({"input": "a", "model": "other"}, "model", "the model "),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens: 0 leaves nothing"),
]


@pytest.mark.parametrize(("body", "param", "why"), REFUSED, ids=range(len(REFUSED)))
def test_refused(server, body, param, why):
    status, answer = post(server, "/v1/embeddings", body)
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(why)


@pytest.mark.parametrize("rig", [{}, {"template": None}], ids=["with a chat template", "without one"])
def test_a_model_made_for_embeddings_generates_nothing(live, rig):
    server = live(lambda: Rig(pooling=EMBEDDER, **rig))
    assert post(server, "/v1/embeddings", {"input": "Hello"})[0] == 200
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    for path, body in bodies.items():
        status, answer = post(server, path, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "model", "unsupported_model")
        assert "only makes embeddings; use /v1/embeddings" in answer["error"]["message"]
    able = httpx.get(server.url + "/v1/models").json()["data"][0]["capabilities"]
    assert (able["embeddings"]["supported"], able["completions"]["supported"]) == (True, False)
    assert post(server, "/api/show", {"model": MODEL})[1]["capabilities"] == ["embedding"]


def test_metrics(live):
    server = live(lambda: Rig())
    post(server, "/v1/embeddings", {"input": ["a", "b c d"]})
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    assert f'lucevisor_pooled_texts_total{{model="{MODEL}"}} 2.0' in lines
    n_tokens = len(ids_of("a")) + len(ids_of("b c d"))
    assert f'lucevisor_prompt_tokens_total{{model="{MODEL}"}} {n_tokens:.1f}' in lines
