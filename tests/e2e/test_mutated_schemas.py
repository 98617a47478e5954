"""Schemas that are odd, huge or wrong: whatever a client sends ends its own request at most, below 500."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.schemas import WRITTEN
from tests.fuzz.steady import amounts

Request = tuple[str, str]
"""Path and JSON."""

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
    """A request with a schema, a pattern or a grammar of which some values or characters are changed."""
    if rng.random() < 0.1:
        path, body = "/v1/completions", {"prompt": "Hi", **SHORT, **plain_constraint(rng)}
    else:
        schema = copy.deepcopy(rng.choice(OBJECTS))
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            _change(rng, schema)
        path, body = rng.choice(requests_with(schema, strict=rng.random() < 0.5))
    text = json.dumps(body | {"stream": rng.random() < 0.3})
    return path, re.sub(r'"@(\d+)@"', lambda found: LITERALS[int(found[1])], text)


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


SHORT = {"max_tokens": 4, "temperature": 0}


def requests_with(schema: Any, *, strict: bool) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of a request of each kind that takes a schema."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], **SHORT}
    responses = {"input": "Hi", "max_output_tokens": 16, "temperature": 0}
    function = {"name": "f", "parameters": schema, "strict": strict}
    tools = [{"type": "function", "function": function}]
    named = {"name": "s", "schema": schema, "strict": strict}
    claude = {"name": "f", "description": "A tool", "input_schema": schema}
    return [
        *(("/v1/chat/completions", chat | {"tools": tools, "tool_choice": choice}) for choice in ("required", "auto")),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": named}}),
        ("/v1/chat/completions", chat | {"structured_outputs": {"json": schema}}),
        ("/v1/chat/completions", chat | {"guided_json": schema}),
        ("/v1/completions", {"prompt": "Hi", **SHORT, "json_schema": schema}),
        ("/v1/responses", responses | {"text": {"format": {"type": "json_schema", **named}}}),
        ("/v1/responses", responses | {"tools": [{"type": "function", **function}]}),
        ("/v1/messages", chat | {"tools": [claude], "tool_choice": {"type": "any" if strict else "auto"}}),
        ("/api/chat", chat | {"tools": tools}),
        ("/api/chat", chat | {"format": schema}),
    ]


def plain_constraint(rng: random.Random) -> dict[str, Any]:
    """A constraint of a completion that is no schema."""
    return rng.choice(
        [
            {rng.choice(("regex", "guided_regex")): _text(rng, rng.choice(PATTERNS))},
            {rng.choice(("grammar", "guided_grammar")): _text(rng, rng.choice(GRAMMARS))},
            {"guided_choice": [_text(rng, "yes") for _ in range(rng.randrange(4))]},
            {"structured_outputs": {"choice": ["a", f"@{rng.randrange(len(LITERALS))}@"]}},
            {"structured_outputs": {"regex": f"@{rng.randrange(len(LITERALS))}@"}},
        ]
    )


AT_ONCE = 4
WORKERS = 2


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


@pytest.mark.parametrize("n", amounts(30, 2400))
async def test_mutated_schemas(endpoint: str, demo_status: dict[str, object], n: int) -> None:
    url, pid = endpoint.removesuffix("/v1"), demo_status["pid"]
    assert isinstance(pid, int)
    seeds = [f"mutant {i}" for i in range(n)]
    statuses: Counter[int] = Counter()
    seen: set[int] = set()

    async def sender(session: aiohttp.ClientSession) -> None:
        while seeds:
            seed = seeds.pop()
            path, body = mutant(random.Random(seed))
            headers = {"Content-Type": "application/json"}
            async with session.post(url + path, data=body.encode("utf-8", "surrogatepass"), headers=headers) as answer:
                text = await answer.text()
            wrong = answer.status >= 500 or '"server_error"' in text or "Traceback" in text
            assert not wrong, f"seed {seed!r}: {answer.status} {text[:500]}\n{path} {body[:2000]}"
            statuses[answer.status] += 1
            seen.update(workers(pid))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(sender(session) for _ in range(AT_ONCE)))
    assert len(seen) <= WORKERS, "a worker was lost"
    assert statuses[200]
    assert statuses[400]
