"""Schemas that are odd, huge or wrong: whatever a client sends ends its own request at most, below 500."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.schemas import WRITTEN
from tests.fuzz.steady import amounts

Request = tuple[str, str]
"""Path and body."""

DEEP, TOO_DEEP = 60, 20_000

OBJECTS = [schema for schema in WRITTEN if schema.keys() & {"properties", "$defs", "items", "anyOf", "allOf"}]

PATTERNS = [
    r"[a-z]+@[a-z]+\.(com|org)",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no)( maybe)?",
    r"^\w{3,12}$",
    r"[\u4e00-\u9fff]{2,}|é+",
]

GRAMMARS = [
    'root ::= "yes" | "no"',
    'root ::= item+\nitem ::= "- " [a-z]+ "\\n"',
    'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]{1,5} | "(" expr ")"',
    'start: "a" (NUMBER | name)*\nNUMBER: /[0-9]+/\nname: /[a-z]/ "b"?',
]

KEYWORDS = (
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "patternProperties", "enum"),
    *("const", "anyOf", "oneOf", "allOf", "not", "if", "then", "$ref", "$defs", "$anchor", "$id", "$dynamicRef"),
    *("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "pattern", "format", "default"),
    *("minItems", "maxItems", "uniqueItems", "contains", "minProperties", "maxProperties", "propertyNames"),
    *("dependentSchemas", "dependentRequired", "unevaluatedProperties", "title", "description", "nullable", "x-order"),
    *("", " ", "a b", "a:b", "a=b", ">", '"', "\\", "\n", "\u0000", "é🎉", "__proto__", "function", "k" * 300),
)

LITERALS = (
    *("null", "true", "false", "0", "-1", "5.0", "1.5", "-0", "1e999", "-1e999", "NaN", "Infinity", "1e308", "5e-324"),
    *("9223372036854775808", "-9223372036854775809", "1" + "0" * 30, "-1" + "0" * 400, "9" * 5000),
    *('""', '"x"', '"string"', '"object"', '"null"', '"any"', '"NaN"', '"\\ud800"', '"\\u0000"', '"🎉"', '"\u202e"'),
    *('"<|im_end|>"', '"{{ 1 }}"', '"#"', '"#/"', '"#/$defs/Missing"', '"#/%zz~2"', '"http://127.0.0.1:1/x"'),
    *('"(?=x)"', '"["', '"a{2,1}"', '"\\\\1"', '"^(a|a)*$"', '"\\\\p{Zzzz}"', '"' + "y" * 4000 + '"'),
    *("[]", "{}", "[[]]", "[null]", "[{}]", '["string", "null"]', '["string", "string"]', '{"a": 1, "a": {}}'),
    *('{"$ref": "#"}', '{"type": "string"}', '{"type": []}', '{"type": "integer", "minimum": 1e400}'),
    *("[1e999]", '["x", 1, null, true, {}]', '{"": {"": {"": null}}}'),
    *('{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP + "]" * DEEP, '{"items":' * DEEP + "{}" + "}" * DEEP),
    '{"items":' * TOO_DEEP + "{}" + "}" * TOO_DEEP,
)


def mutant(rng: random.Random) -> Request:
    """A request of one of the nine kinds whose schema, pattern or grammar has some values or characters changed."""
    kind = rng.choice(KINDS)
    if kind is _completion and rng.random() < 0.7:
        return _plain_completion(rng)
    schema = copy.deepcopy(rng.choice(OBJECTS))
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        _change(rng, schema)
    return _request(kind, schema, rng)


def _change(rng: random.Random, schema: dict[str, Any]) -> None:
    """Change one place: put a value or a keyword in, take one out, give it another name, or nest it."""
    places: list[Any] = [schema]
    for place in places:
        inner = place.values() if isinstance(place, dict) else place
        places.extend(value for value in inner if isinstance(value, dict | list))
    place = rng.choice(places)
    odd = f"@{rng.randrange(len(LITERALS))}@"
    if isinstance(place, list):
        match rng.randrange(3):
            case 0 if place:
                place[rng.randrange(len(place))] = odd
            case 1 if place:
                place.append(copy.deepcopy(rng.choice(place)))
            case _:
                place.append(odd)
        return
    key = rng.choice(list(place)) if place else "type"
    match rng.randrange(6):
        case 0 | 1:
            place[key] = odd
        case 2:
            place[rng.choice(KEYWORDS)] = odd
        case 3:
            place[rng.choice(KEYWORDS)] = place.pop(key, odd)
        case 4:
            place.pop(key, None)
        case _:
            place[rng.choice(KEYWORDS)] = copy.deepcopy(rng.choice(places)) if places else odd


def _text(rng: random.Random, text: str) -> str:
    """The text with some characters changed."""
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(
            ("(", ")", "[", "]", "{", "}", "*", "+", "?", "|", "\\", '"', "é", "\u0000", "\n", "{0}", "")
        )
        piece = rng.choice((piece, piece, "{99999}", "(?i)", "::=", "~", text[: at + 1], "x" * 2000))
        text = text[:at] + piece + text[at + rng.randrange(3) :]
    return text


def _request(kind: Callable[[Any, bool], Request], schema: Any, rng: random.Random) -> Request:
    path, body = kind(schema, rng.random() < 0.3)
    return path, re.sub(r'"@(\d+)@"', lambda found: LITERALS[int(found[1])], body)


MESSAGES = [{"role": "user", "content": "Hi"}]
_SHORT = {"max_tokens": 4, "temperature": 0}


def _dumped(path: str, body: dict[str, Any], stream: bool) -> Request:
    return path, json.dumps({**body, "stream": stream})


def _chat(more: dict[str, Any], stream: bool) -> Request:
    return _dumped("/v1/chat/completions", {"messages": MESSAGES, **_SHORT, **more}, stream)


def _function(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def _chat_tools(schema: Any, stream: bool) -> Request:
    return _chat({"tools": [_function(schema)], "tool_choice": "required" if stream else "auto"}, stream)


def _chat_tools_strict(schema: Any, stream: bool) -> Request:
    return _chat({"tools": [_function(schema, strict=True)], "tool_choice": "required"}, stream)


def _chat_format(schema: Any, stream: bool) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": stream}}
    return _chat({"response_format": form}, stream)


def _chat_guided(schema: Any, stream: bool) -> Request:
    return _chat({"structured_outputs": {"json": schema}} if stream else {"guided_json": schema}, stream)


def _completion(schema: Any, stream: bool) -> Request:
    return _dumped("/v1/completions", {"prompt": "Hi", **_SHORT, "json_schema": schema}, stream)


def _plain_completion(rng: random.Random) -> Request:
    form: dict[str, Any] = rng.choice(
        [
            {"regex": _text(rng, rng.choice(PATTERNS))},
            {"guided_regex": _text(rng, rng.choice(PATTERNS))},
            {"grammar": _text(rng, rng.choice(GRAMMARS))},
            {"guided_grammar": _text(rng, rng.choice(GRAMMARS))},
            {"guided_choice": [_text(rng, "yes") for _ in range(rng.randrange(4))]},
            {"structured_outputs": {"choice": ["a", f"@{rng.randrange(len(LITERALS))}@"]}},
            {"structured_outputs": {"regex": f"@{rng.randrange(len(LITERALS))}@"}},
        ]
    )
    return _request(
        lambda form, stream: _dumped("/v1/completions", {"prompt": "Hi", **_SHORT, **form}, stream), form, rng
    )


def _responses(more: dict[str, Any], stream: bool) -> Request:
    return _dumped("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "temperature": 0, **more}, stream)


def _responses_format(schema: Any, stream: bool) -> Request:
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": stream}
    return _responses({"text": {"format": form}}, stream)


def _responses_tools(schema: Any, stream: bool) -> Request:
    return _responses({"tools": [{"type": "function", "name": "f", "parameters": schema, "strict": stream}]}, stream)


def _messages_tools(schema: Any, stream: bool) -> Request:
    tool = {"name": "f", "description": "A tool", "input_schema": schema}
    choice = {"type": "any" if stream else "auto"}
    return _dumped("/v1/messages", {"messages": MESSAGES, **_SHORT, "tools": [tool], "tool_choice": choice}, stream)


def _ollama(schema: Any, stream: bool) -> Request:
    more = {"tools": [_function(schema)]} if stream else {"format": schema}
    options = {"num_predict": 4, "temperature": 0}
    return _dumped("/api/chat", {"messages": MESSAGES, "options": options, **more}, stream)


KINDS = (
    *(_chat_tools, _chat_tools_strict, _chat_format, _chat_guided, _completion),
    *(_responses_format, _responses_tools, _messages_tools, _ollama),
)

AT_ONCE = 4
WORKERS = 2
MANY = 200


def workers(supervisor: int) -> set[int]:
    """The preprocessing workers of a supervisor."""
    found = set()
    for child in psutil.Process(supervisor).children():
        try:
            if "--multiprocessing-fork" in child.cmdline():
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


class Outcome:
    """Statuses of all requests, and the workers that were seen."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.workers: set[int] = set()
        self.faults: list[str] = []
        self.slowest: list[tuple[float, str, Request]] = []


async def send(url: str, pid: int, requests: dict[str, Request], outcome: Outcome) -> None:
    """Send requests, some at once."""
    waiting = list(requests.items())[::-1]

    async def sender(session: aiohttp.ClientSession) -> None:
        while waiting:
            seed, (path, body) = waiting.pop()
            start = time.monotonic()
            headers = {"Content-Type": "application/json"}
            async with session.post(url + path, data=body.encode("utf-8", "surrogatepass"), headers=headers) as answer:
                text = await answer.text()
            outcome.slowest.append((time.monotonic() - start, seed, (path, body)))
            outcome.statuses[answer.status] += 1
            if answer.status >= 500 or '"server_error"' in text or "Traceback" in text:
                outcome.faults.append(f"seed {seed!r}: {answer.status} {text[:500]}\n{path} {body[:2000]}")
            outcome.workers |= workers(pid)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(sender(session) for _ in range(AT_ONCE)))


async def stream_beside(url: str, gaps: list[tuple[float, float]]) -> None:
    """Answer after answer until cancelled; what comes between two of its chunks is noted."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        while True:
            last = 0.0
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        now = time.monotonic()
                        if last:
                            gaps.append((now - last, now))
                        last = now


async def check(url: str, pid: int, requests: dict[str, Request]) -> str:
    """Send the requests, many of them beside a stream, and judge; returns what to print."""
    outcome, gaps = Outcome(), list[tuple[float, float]]()
    sent = asyncio.create_task(send(url, pid, requests, outcome))
    if len(requests) < MANY:
        await sent
    else:
        beside = asyncio.create_task(stream_beside(url, gaps))
        await asyncio.wait([beside, sent], return_when=asyncio.FIRST_COMPLETED)
        assert not beside.done(), beside.exception()
        beside.cancel()
        await sent
    assert not outcome.faults, "\n\n".join(outcome.faults)
    assert len(outcome.workers) <= WORKERS, f"{len(outcome.workers) - WORKERS} workers lost or more: {outcome.workers}"
    longest = ", ".join(f"{gap * 1000:.0f}" for gap, _ in sorted(gaps, reverse=True)[:5])
    slow = sorted(outcome.slowest, key=lambda one: -one[0])[:3]
    told = "; ".join(f"{seconds:.2f} s {seed!r} {path}" for seconds, seed, (path, _) in slow)
    return f"{dict(outcome.statuses)}; longest gaps of the stream beside: {longest} ms of {len(gaps)}; slowest: {told}"


def drawn(name: str, n: int, draw: Callable[[random.Random], Request]) -> dict[str, Request]:
    return {seed: draw(random.Random(seed)) for seed in (f"{name} {i}" for i in range(n))}


@pytest.mark.parametrize("n", amounts(30, 2400))
def test_mutated_schemas(endpoint: str, demo_status: dict[str, object], n: int) -> None:
    url, pid = endpoint.removesuffix("/v1"), demo_status["pid"]
    assert isinstance(pid, int)
    print(asyncio.run(check(url, pid, drawn("mutant", n, mutant))), file=sys.stderr)
