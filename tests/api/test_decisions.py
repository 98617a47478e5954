"""Decisions over HTTP: the tokens that are asked about, the answers of both APIs, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from lucevisor.api.dialects.decisions import shares
from tests.api.conftest import Live
from tests.api.scripted_model import MODEL, ids_of, named_logprob, tokenizer


def post(server: Live, path: str, body: Any) -> tuple[int, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=120)
    return answer.status_code, answer.json()


def logprob(prompt: list[int], label: str) -> float:
    ids = tokenizer().encode(label)
    return sum(named_logprob([*prompt, *ids[:n]], ids[n]) for n in range(len(ids)))


def test_labels_of_several_tokens_behind_a_prompt(server):
    labels = ["yes", "no", "a label of many tokens", "a label of other tokens", " no"]
    status, found = post(server, "/v1/decisions", {"model": MODEL, "prompt": "Is it so?", "labels": labels})
    assert status == 200
    expected = [logprob(ids_of("Is it so?"), label) for label in labels]
    assert [one["label"] for one in found["labels"]] == labels
    assert [one["logprob"] for one in found["labels"]] == pytest.approx(expected)
    total = sum(map(math.exp, expected))
    assert [one["probability"] for one in found["labels"]] == pytest.approx([math.exp(x) / total for x in expected])
    assert found["label"] == labels[expected.index(max(expected))]
    assert "number" not in found
    assert found["usage"]["prompt_tokens"] == len(ids_of("Is it so?"))


def test_a_number(server):
    _, found = post(server, "/v1/decisions", {"prompt": [5, 6, 7], "labels": [1, 2.5, -3]})
    assert found["number"] == pytest.approx(sum(one["label"] * one["probability"] for one in found["labels"]))
    assert [one["label"] for one in found["labels"]] == [1, 2.5, -3]


def test_one_that_begins_others_has_the_rest():
    logprobs = [math.log(p) for p in (0.5, 0.3, 0.1, 0.2)]
    found = shares([[1], [1, 0], [1, 0, 4], [2]], logprobs)
    assert found == pytest.approx([0.2 / 0.7, 0.2 / 0.7, 0.1 / 0.7, 0.2 / 0.7])


def test_a_chat(server):
    chat = [{"role": "user", "content": "Is it so?"}]
    text = post(server, "/apply-template", {"messages": chat, "enable_thinking": False})[1]["prompt"]
    _, found = post(server, "/v1/decisions", {"messages": chat, "labels": ["yes", "no"]})
    expected = [logprob(ids_of(text), label) for label in ("yes", "no")]
    assert [one["logprob"] for one in found["labels"]] == pytest.approx(expected)


QUESTIONS = {
    "department": {
        "type": "choice", "instructions": "Which team?",
        "criteria": {"billing": "Payments", "technical": None, "sales": {"what": "new"}},
    },
    "anger": {"type": "score", "instructions": {"ask": "How angry?"}, "criteria": ["Calm", "Cross", "Furious"]},
    "refund": {"type": "noul", "instructions": "A refund?", "criteria": {"true": "asks for it"}},
    "any": {"type": "choice", "instructions": "Which?", "criteria": {f"o{i}": None for i in range(40)}},
}  # fmt: skip


def test_typed_questions(server):
    body = {"model": MODEL, "state": {"ticket": "I was charged twice"}, "questions": QUESTIONS}
    status, found = post(server, "/v1/systemone", body)
    assert (status, found["model"], [*found["answers"]]) == (200, MODEL, [*QUESTIONS])
    assert found["usage"]["output_tokens"] == 0
    choice, score, noul = (found["answers"][name] for name in ("department", "anger", "refund"))
    p = choice["probabilities"]
    assert (choice["type"], [*p], choice["choice"]) == (
        "choice",
        [*QUESTIONS["department"]["criteria"]],
        max(p, key=p.get),
    )
    assert choice["confidence"] == pytest.approx((3 * max(p.values()) - 1) / 2)
    assert score["legend"] == {"0": "Calm", "1": "Cross", "2": "Furious"}
    assert score["score"] == pytest.approx(sum(int(level) * p for level, p in score["probabilities"].items()))
    assert set(noul) == {"type", "noul"}
    assert 0 < noul["noul"] < 1
    for one in (choice, score, found["answers"]["any"]):
        assert sum(one["probabilities"].values()) == pytest.approx(1)
    assert len(found["answers"]["any"]["probabilities"]) == 40


QUESTION, CRITERIA = {"type": "noul", "instructions": "A?"}, "questions.a.criteria"


def asked(**changes: Any) -> dict[str, Any]:
    return {"state": "a", "questions": {"a": {**QUESTION, **changes}}}


REFUSED = [
    ("decisions", {"labels": ["a"]}, "prompt", "prompt: send either prompt or messages"),
    ("decisions", {"prompt": "a", "messages": [], "labels": ["a"]}, "prompt", "prompt: send either"),
    ("decisions", {"prompt": "a"}, "labels", "labels: is missing; it is required"),
    ("decisions", {"prompt": "a", "labels": []}, "labels", "labels: has 0 labels; send 1 to 1024"),
    ("decisions", {"prompt": "a", "labels": ["b", ""]}, "labels[1]", "labels[1]: is empty"),
    ("decisions", {"prompt": "a", "labels": ["b", "c", "b"]}, "labels[2]", "labels[2]: is the same as labels[0]"),
    ("decisions", {"prompt": "a", "labels": ["b"], "tools": []}, "tools", "tools: is a parameter of chats"),
    ("decisions", {"prompt": "a", "label": ["b"]}, "label", "label: is not a parameter of this endpoint"),
    ("decisions", {"prompt": "word " * 600, "labels": ["b"]}, "prompt", "prompt: the prompt has "),
    ("systemone", {"state": "a"}, "questions", "questions: is missing"),
    ("systemone", {"state": "a", "questions": {}}, "questions", "questions: expected"),
    ("systemone", {"questions": {"a": QUESTION}}, "state", "state: is missing"),
    ("systemone", asked(type="text"), "questions.a.type", 'questions.a.type: "text" is not one of its values; use'),
    ("systemone", {"state": "a", "questions": {"a": QUESTION, "b": 5}}, "questions.b", "questions.b: 5: expected"),
    ("systemone", {"state": "a", "questions": {"a": {"type": "noul"}}}, "questions.a.instructions",
     "questions.a.instructions: is missing; it is required"),
    ("systemone", asked(question="B?"), "questions.a.question", "questions.a.question: is unknown here; leave it out"),
    ("systemone", asked(type="choice"), CRITERIA, f"{CRITERIA}: of a choice"),
    ("systemone", asked(type="score", criteria=["x"]), CRITERIA, f"{CRITERIA}: of a score"),
    ("systemone", asked(criteria={"maybe": "x"}), CRITERIA, f"{CRITERIA}: of a noul"),
    ("systemone", asked() | {"state": "word " * 600}, "questions.a", "questions.a: the prompt has "),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "why"), REFUSED, ids=range(len(REFUSED)))
def test_refused(server, path, body, param, why):
    status, answer = post(server, f"/v1/{path}", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith(why)
