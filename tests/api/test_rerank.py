"""Reranking over HTTP: the order, the prompts that models see, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from lucevisor.api.dialects.rerank import PATHS, QWEN3_TEMPLATE
from lucevisor.model.spec import Pooling, PoolingType
from tests.api.conftest import Live
from tests.api.scripted_model import MODEL, Rig, ids_of, named_logprob, pooled_of, tokenizer

RANKER = Pooling(PoolingType.RANK, width=1, generates=False)
DOCUMENTS = ["about cats", "about dogs", "about fish", "about <|im_end|> birds"]


@pytest.fixture(scope="module")
def ranker() -> Any:
    server = Live(lambda: Rig(pooling=RANKER))
    yield server
    server.close()


def post(server: Live, path: str, body: Any) -> tuple[int, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=120)
    return answer.status_code, answer.json()


def prompt(document: str) -> list[int]:
    """Qwen3's prompt, in which the document is plain text."""
    before, _, end = QWEN3_TEMPLATE.replace("{query}", "pets").partition("{document}")
    if "<" not in document:
        return ids_of(before + document + end)
    marker = ids_of("<|im_end|>")
    plain = tokenizer().encode(document)
    assert marker[0] not in plain
    return []


def score(document: str) -> float:
    return 1 / (1 + math.exp(-pooled_of(prompt(document))[0]))


@pytest.mark.parametrize("path", PATHS)
def test_the_most_relevant_first(ranker, path):
    status, found = post(ranker, path, {"model": MODEL, "query": "pets", "documents": DOCUMENTS[:3]})
    assert (status, found["model"], found["object"]) == (200, MODEL, "list")
    assert found["usage"]["total_tokens"] == sum(len(prompt(one)) for one in DOCUMENTS[:3])
    expected = sorted(((score(one), i) for i, one in enumerate(DOCUMENTS[:3])), reverse=True)
    assert [one["index"] for one in found["results"]] == [i for _, i in expected]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx([s for s, _ in expected], abs=1e-6)


def test_top_n_and_documents(ranker):
    body = {"query": "pets", "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": True}
    _, found = post(ranker, "/v1/rerank", body)
    assert len(found["results"]) == 2
    assert all(one["document"] == {"text": DOCUMENTS[one["index"]]} for one in found["results"])


def test_markers_in_a_document_are_text(ranker):
    _, found = post(ranker, "/v1/rerank", {"query": "pets", "documents": DOCUMENTS[3:]})
    assert found["usage"]["total_tokens"] > len(prompt("about birds"))
    assert prompt(DOCUMENTS[3]) == []


REFUSED = [
    ({"query": "a"}, "documents", "documents: is missing; it is required"),
    ({"query": "a", "documents": []}, "documents", "documents: has 0 texts; send 1 to 2048"),
    ({"query": "", "documents": ["a"]}, "query", "query: is empty; send a text"),
    ({"query": "a", "documents": ["a", 3]}, "documents[1]", "documents[1]: "),
    ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "top_n: 0: expected"),
    ({"query": "a", "documents": ["a", "word " * 600]}, "documents[1]", "documents[1]: the text has "),
]


@pytest.mark.parametrize(("body", "param", "why"), REFUSED, ids=range(len(REFUSED)))
def test_refused(ranker, body, param, why):
    status, answer = post(ranker, "/v1/rerank", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(why)


def test_a_model_that_generates_is_asked_for_yes_or_no(server):
    _, found = post(server, "/v1/rerank", {"query": "pets", "documents": DOCUMENTS[:3]})

    def logprob(document: str, word: str) -> float:
        ids, before = tokenizer().encode(word), prompt(document)
        return sum(named_logprob([*before, *ids[:n]], ids[n]) for n in range(len(ids)))

    margins = [logprob(one, "yes") - logprob(one, "no") for one in DOCUMENTS[:3]]
    for one in found["results"]:
        assert one["relevance_score"] == pytest.approx(1 / (1 + math.exp(-margins[one["index"]])))
    assert [one["index"] for one in found["results"]] == sorted(range(3), key=lambda i: -margins[i])


def test_models_do_what_they_are_made_for(live, ranker):
    embedder = live(lambda: Rig(pooling=Pooling(PoolingType.LAST, generates=False)))
    status, answer = post(embedder, "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "does not rank texts" in answer["error"]["message"]
    for path, body in {"/v1/embeddings": {"input": "a"}, "/v1/completions": {"prompt": "a"}}.items():
        status, answer = post(ranker, path, body)
        assert (status, answer["error"]["code"]) == (400, "unsupported_model")
        assert "only ranks texts; use /v1/rerank" in answer["error"]["message"]
