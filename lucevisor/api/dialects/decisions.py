"""Decisions: the probabilities of given answers without decoding. ``/v1/systemone`` takes a state and typed questions,
as TypeSafe's API does; each is a chat in which the options have letters."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from string import ascii_uppercase
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor.api.app_state import METRICS, context_of, model_of
from lucevisor.api.bodies import prepare_request
from lucevisor.api.contexts import ModelContext
from lucevisor.api.decisions import Decider, Decision, Ids
from lucevisor.api.dialects.openai_chat import parse_chat
from lucevisor.api.dialects.openai_completions import read_prompts
from lucevisor.api.dialects.openai_embeddings import answer
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.parameters import check_generates, check_model
from lucevisor.api.prepared import DecisionOptions, GenerationOptions, PreparedRequest
from lucevisor.api.schemas import Flag, ParameterRules, convert, ignored, to_record
from lucevisor.protocol.steps import SamplingParams

MAX_LABELS: Final = 1024
MAX_QUESTIONS: Final = 256
MAX_OPTIONS: Final = 255
MAX_LEVELS: Final = 10
Label = str | int | float


class DecisionsBody(msgspec.Struct, kw_only=True):
    """POST /v1/decisions.  Either ``prompt`` or ``messages``, with the parameters of chats that make their prompt."""

    model: str | None = None
    labels: list[Label]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    enable_thinking: Flag = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None


RULES: Final = ParameterRules()
_OF_CHATS: Final = (
    *("tools", "enable_thinking", "reasoning_effort", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


def parse_decision(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Return the probabilities of labels as the answer to a prompt or a chat, without decoding."""
    body = to_record(DecisionsBody, fields, RULES)
    check_model(body.model, ctx)
    check_generates(ctx)
    if (body.prompt is None) == (body.messages is None):
        raise bad_parameter("prompt", "send either prompt or messages")
    chat = {name: value for name in _OF_CHATS if (value := getattr(body, name)) is not None}
    if body.messages is not None:
        found = _read_chat(body.messages, chat, ctx)
        prompt, images = found.prompts[0], found.images
    elif chat:
        raise bad_parameter(min(chat), "is a parameter of chats; send messages, or leave it out")
    else:
        [read] = read_prompts(body.prompt if isinstance(body.prompt, str) else [*(body.prompt or ())], ctx)
        prompt, images = read.ids, ()
    decision = DecisionOptions(answers=[_label_ids(body.labels, ctx)], labels=body.labels)
    return replace(_prepared([prompt], decision, ignored(DecisionsBody, fields, RULES)), images=images)


def _read_chat(messages: list[dict[str, Any]], fields: Mapping[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Return a chat whose answer begins at once."""
    template = ctx.template
    chat = {"messages": messages, **fields}
    if template is not None and "enable_thinking" in template.source:
        chat.setdefault("enable_thinking", False)
    prepared = parse_chat(chat, ctx)
    if prepared.options.reasoning_open:
        why = "the model's template begins every answer with reasoning; send a prompt"
        raise bad_parameter("messages", why, "unsupported_value")
    return prepared


def _label_ids(labels: Sequence[Label], ctx: ModelContext) -> list[list[int]]:
    if not 1 <= len(labels) <= MAX_LABELS:
        raise bad_parameter("labels", f"has {len(labels)} labels; send 1 to {MAX_LABELS}")
    found, known = list[list[int]](), dict[Ids, int]()
    for index, label in enumerate(labels):
        ids = ctx.tokenizer.encode(str(label))
        if not ids:
            raise bad_parameter(f"labels[{index}]", "is empty; send a text or a number")
        if (other := known.setdefault(tuple(ids), index)) != index:
            raise bad_parameter(f"labels[{index}]", f"is the same as labels[{other}]; send each label once")
        found.append(ids)
    return found


def _prepared(prompts: Sequence[Sequence[int]], decision: DecisionOptions, names: tuple[str, ...]) -> PreparedRequest:
    empty: list[list[int]] = [[] for _ in prompts]
    options = GenerationOptions(sampling=SamplingParams(), turn_ends=empty, decision=decision, ignored=names)
    return PreparedRequest(options, [*prompts])


def shares(answers: Sequence[Sequence[int]], logprobs: Sequence[float]) -> list[float]:
    """Return the probabilities of answers; one that begins others has what does not go on as one of these."""
    most = max(logprobs)
    by_ids = {tuple(ids): math.exp(one - most) for ids, one in zip(answers, logprobs, strict=True)}
    weights = dict(by_ids)
    for ids, weight in by_ids.items():
        if (begun := next((ids[:n] for n in range(len(ids) - 1, 0, -1) if ids[:n] in by_ids), None)) is not None:
            weights[begun] = max(0.0, weights[begun] - weight)
    total = sum(weights.values())
    return [weights[tuple(ids)] / total for ids in answers]


async def create_decision(request: web.Request) -> web.Response:
    """Return the probabilities of labels as the answer to a prompt or a chat, without decoding."""
    prepared = await prepare_request(request, parse_decision)
    assert isinstance(prepared, PreparedRequest)
    [decision] = await _decide(request, prepared)
    options = prepared.options.decision
    assert options is not None
    labels, probabilities = options.labels, shares(options.answers[0], decision.logprobs)
    rows = zip(labels, probabilities, decision.logprobs, strict=True)
    body: dict[str, object] = {
        "object": "decision",
        "created": int(time.time()),
        "model": model_of(request).model.name,
        "label": labels[max(range(len(labels)), key=lambda i: probabilities[i])],
        "labels": [{"label": label, "probability": p, "logprob": logprob} for label, p, logprob in rows],
        "usage": _usage(prepared, [decision]),
    }
    if not any(isinstance(label, str) for label in labels):
        body["number"] = sum(float(label) * p for label, p in zip(labels, probabilities, strict=True))
    return answer(msgspec.json.encode(body), prepared)


async def _decide(request: web.Request, prepared: PreparedRequest) -> list[Decision]:
    ctx, options = model_of(request), prepared.options.decision
    assert options is not None
    metrics = request.app[METRICS].of_model(ctx.model.name)
    decider = Decider(ctx, context_of(request), metrics, images=prepared.embedded)
    answers = [[tuple(ids) for ids in one] for one in options.answers]
    return await decider.decide(prepared.prompts, answers)


def _usage(prepared: PreparedRequest, decisions: Sequence[Decision]) -> dict[str, object]:
    n_tokens = sum(map(len, prepared.prompts))
    details = {"cached_tokens": sum(one.cached_tokens for one in decisions)}
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "prompt_tokens_details": details}


# ---- typed questions about a state

Text = str | list[Any] | dict[str, Any]


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A question: ``noul`` (yes or no), ``choice`` of named options, or ``score`` on levels from 0 on."""

    type: Literal["noul", "choice", "score"]
    instructions: Text
    criteria: dict[str, Text | None] | list[Text] | None = None


class SystemOneBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/systemone."""

    model: str | None = None
    state: Text
    questions: Annotated[dict[str, Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]


SYSTEM: Final = (
    "You judge a state. Answer each question with the letter of the option that fits best, and with nothing else."
)


def parse_system_one(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Answer typed questions about a state with probabilities, as TypeSafe's API does."""
    written = fields.get("questions")
    for name, one in islice(written.items(), MAX_QUESTIONS) if isinstance(written, dict) else ():
        convert(Question, one, f"questions.{name}")  # a fault in one is reported by its name
    body = to_record(SystemOneBody, fields, RULES)
    check_model(body.model, ctx)
    check_generates(ctx)
    prompts, answers = list[Sequence[int]](), list[list[list[int]]]()
    questions: list[tuple[str, str, list[str], list[str]]] = []
    for name, question in body.questions.items():
        where = f"questions.{name}"
        keys, texts = _options(question, f"{where}.criteria")
        n = len(keys)  # of more than 26 options each has two letters, so that none begins another
        letters = [*ascii_uppercase[:n]] if n <= 26 else [a + b for a in ascii_uppercase for b in ascii_uppercase][:n]
        listed = "\n".join(f"{letter}: {text}" for letter, text in zip(letters, texts, strict=True))
        content = f"State:\n{_text(body.state)}\n\nQuestion: {_text(question.instructions)}\n\nOptions:\n{listed}"
        try:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
            prompts.append(_read_chat(messages, {}, ctx).prompts[0])
        except ApiError as error:
            raise error.renamed(where if error.param == "messages" else error.param or "") from None
        answers.append(_label_ids(letters, ctx))
        questions.append((name, question.type, keys, texts))
    decision = DecisionOptions(answers=answers, questions=questions)
    return _prepared(prompts, decision, ignored(SystemOneBody, fields, RULES))


def _options(question: Question, where: str) -> tuple[list[str], list[str]]:
    """Return the keys of a question's options, and their texts; raises ApiError."""
    criteria = question.criteria
    match question.type:
        case "noul":
            criteria = {} if criteria is None else criteria
            if not isinstance(criteria, dict) or criteria.keys() - {"true", "false"}:
                raise bad_parameter(where, 'of a noul question is an object with "true" and "false", or absent')
            words = {"true": "Yes", "false": "No"}
            texts = {key: criteria.get(key) for key in words}
            return [*words], [
                word if (text := texts[key]) is None else f"{word}. {_text(text)}" for key, word in words.items()
            ]
        case "choice":
            if not isinstance(criteria, dict) or not 2 <= len(criteria) <= MAX_OPTIONS:
                raise bad_parameter(where, f"of a choice question is an object of 2 to {MAX_OPTIONS} options")
            return [*criteria], [key if text is None else f"{key}. {_text(text)}" for key, text in criteria.items()]
        case "score":
            if not isinstance(criteria, list) or not 2 <= len(criteria) <= MAX_LEVELS:
                why = f"of a score question is a list of 2 to {MAX_LEVELS} levels, the lowest first"
                raise bad_parameter(where, why)
            return [str(level) for level in range(len(criteria))], [_text(text) for text in criteria]


def _text(value: Text) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def system_one(request: web.Request) -> web.Response:
    """Answer typed questions about a state with probabilities, as TypeSafe's API does."""
    prepared = await prepare_request(request, parse_system_one)
    assert isinstance(prepared, PreparedRequest)
    options = prepared.options.decision
    assert options is not None
    decisions = await _decide(request, prepared)
    answers = {
        name: _typed(kind, keys, texts, shares(ids, decision.logprobs))
        for (name, kind, keys, texts), ids, decision in zip(options.questions, options.answers, decisions, strict=True)
    }
    usage = {"input_tokens": sum(map(len, prepared.prompts)), "output_tokens": 0}
    body = {"model": model_of(request).model.name, "answers": answers, "usage": usage}
    return answer(msgspec.json.encode(body), prepared)


def _typed(kind: str, keys: Sequence[str], texts: Sequence[str], probabilities: Sequence[float]) -> dict[str, object]:
    """Return an answer.  Its confidence is 1 if all probability is at one option, and 0 if all have the same."""
    if kind == "noul":
        return {"type": kind, "noul": probabilities[0]}
    n, by_key = len(keys), dict(zip(keys, probabilities, strict=True))
    confidence = max(0.0, (n * max(probabilities) - 1) / (n - 1))
    rest = {"probabilities": by_key, "confidence": confidence}
    if kind == "choice":
        return {"type": kind, "choice": max(by_key, key=lambda key: by_key[key]), **rest}
    score = sum(level * p for level, p in enumerate(probabilities))
    return {"type": kind, "score": score, "legend": dict(zip(keys, texts, strict=True)), **rest}
