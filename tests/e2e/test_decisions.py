"""Decisions of the demo beside its log-probabilities of the same texts, and what many labels cost."""

from __future__ import annotations

import math

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "The supervisor starts one shard daemon per backend group. A daemon that dies is "
LABELS = ["restarted", "restarted with backoff", "restarted at once", "forgotten", "replaced by another", "kept"]


def n_step_tokens(endpoint: str) -> float:
    text = httpx.get(endpoint.removesuffix("/v1") + "/metrics", timeout=120).text
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == "lucevisor_step_tokens_total")


def test_64_labels_share_the_prompt(endpoint):
    """They cost less than a fifth more than one, in tokens that are computed."""
    costs = []
    for n in (1, 64):
        prompt = f"Case {n}. " + "The supervisor starts one shard daemon per backend group. " * 60
        labels = [f"{word}{ending}" for word in (" a", " the", " no", " some") for ending in "bcdfghjklmnpqrst"][:n]
        before = n_step_tokens(endpoint)
        answer = httpx.post(f"{endpoint}/decisions", json={"prompt": prompt, "labels": labels}, timeout=120).json()
        assert len(answer["labels"]) == n
        costs.append(n_step_tokens(endpoint) - before)
        assert costs[-1] >= answer["usage"]["prompt_tokens"] > 500
    assert costs[1] < 1.2 * costs[0]


def test_labels_of_several_tokens_share_a_short_prompt(endpoint):
    """One that is shorter than what the prefix cache keeps otherwise."""
    before = n_step_tokens(endpoint)
    labels = [f"{label} ({i})" for i in range(8) for label in LABELS]
    answer = httpx.post(f"{endpoint}/decisions", json={"prompt": PROMPT, "labels": labels}, timeout=120).json()
    own = [httpx.post(endpoint.removesuffix("/v1") + "/tokenize", json={"content": label}).json() for label in labels]
    n_own = sum(len(one["tokens"]) for one in own)
    n_prompt = answer["usage"]["prompt_tokens"]
    assert n_step_tokens(endpoint) - before < n_prompt + n_own
    assert n_prompt < 64


def test_they_are_the_log_probabilities_of_an_echo(endpoint):
    def post(path, body):
        return httpx.post(endpoint + path, json=body, timeout=120).json()

    def ids(text, special):
        body = {"content": text, "add_special": special}
        return httpx.post(endpoint.removesuffix("/v1") + "/tokenize", json=body).json()["tokens"]

    prompt, found = ids(PROMPT, True), post("/decisions", {"prompt": PROMPT, "labels": LABELS})["labels"]
    for label, one in zip(LABELS, found, strict=True):
        own = ids(label, False)
        body = {"prompt": [*prompt, *own], "max_tokens": 0, "echo": True, "logprobs": 0}
        echoed = post("/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        assert one["logprob"] == pytest.approx(sum(echoed[len(prompt) :]), abs=1e-3)
    total = sum(math.exp(one["logprob"]) for one in found if one["label"] not in LABELS[1:3])
    assert found[3]["probability"] == pytest.approx(math.exp(found[3]["logprob"]) / total, rel=1e-3)
    assert sum(one["probability"] for one in found) == pytest.approx(1)
