"""OpenAI's Responses API: all that is below /v1/responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from lucevisor.api.context import PORTS, RESPONSE_STORE, context_of
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.responses import ResponsesFormatter
from lucevisor.api.output.stored_responses import Page, input_items, replay
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.prepare import Amend, prepare
from lucevisor.api.prompts.responses import previous_not_stored, read_input_tokens, read_response
from lucevisor.api.response_store import StoredResponse, with_stored
from lucevisor.api.routes.chat import chat_output
from lucevisor.errors import show


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handle one request for a response."""
    ports, store, key = request.app[PORTS], request.app[RESPONSE_STORE], context_of(request).caller.id
    named: dict[str, StoredResponse] = {}
    prepared = await prepare(request, read_response, _adding_stored(request, named))
    assert isinstance(prepared, PreparedRequest)
    options = prepared.options
    assert options.response is not None
    response, wanted = ResponseId.now("resp_"), options.response
    earlier: tuple[bytes, ...] = ()
    if (previous := wanted.previous_id) is not None:
        if previous not in named:  # the client made up what the server adds
            raise previous_not_stored(previous)
        earlier = named[previous].turns

    def keep(body: dict[str, object], output: Sequence[object]) -> None:
        if wanted.store:
            turns = (*earlier, wanted.items, msgspec.json.encode(output))
            store.put(response.response_id, StoredResponse(msgspec.json.encode(body), turns, key))

    formatter = ResponsesFormatter(
        response_id=response.response_id,
        created_s=response.created_s,
        model=ports.model.name,
        tokenizer=ports.tokenizer,
        logprobs=options.logprobs,
        options=wanted,
        keep=keep,
        clock=time.time,
    )
    plan = GenerationPlan(
        jobs=make_jobs(prepared, chat_output(options, ports), ports, response),
        formatter=formatter,
        stream=options.stream,
        prompt_param="input",
        ignored=options.ignored,
        compressed=prepared.compressed,
    )
    return await respond(request, plan)


def _adding_stored(request: web.Request, named: dict[str, StoredResponse]) -> Amend:
    """Return what adds the stored conversations that a body names, and notes them in `named`."""
    store, key = request.app[RESPONSE_STORE], context_of(request).caller.id

    async def amend(body: list[bytes]) -> int:
        named.update(await store.named_in(body, key))
        return with_stored(body, named)

    return amend


async def count_input_tokens(request: web.Request) -> web.Response:
    """Return how many tokens the prompt of a request has."""
    parts = await prepare(request, read_input_tokens, _adding_stored(request, {}))
    assert isinstance(parts, list)
    return web.Response(body=b"".join(parts), content_type="application/json")


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response, or its events behind `starting_after` with `stream=true`."""
    stored, query = _stored(request), request.query
    if not _choice(query, "stream", {"false": False, "true": True}):
        return web.Response(body=stored.body, content_type="application/json")
    first = _integer(query, "starting_after", -1, 0, 2**31 - 1) + 1
    events = await asyncio.to_thread(lambda: replay(msgspec.json.decode(stored.body))[first:])
    body = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), msgspec.json.encode(e)) for e in events)
    return web.Response(body=body, content_type="text/event-stream", charset="utf-8")


async def list_input_items(request: web.Request) -> web.Response:
    """Return a page of the items that a stored response answers."""
    stored, query = _stored(request), request.query
    page = Page(
        limit=_integer(query, "limit", 20, 1, 100),
        after=query.get("after"),
        ascending=_choice(query, "order", {"desc": False, "asc": True}),
    )
    turns = [msgspec.json.decode(turn) for turn in stored.turns[:-1]]
    body = input_items(request.match_info["id"], turns, page)
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _integer(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    sent = query.get(name)
    if sent is None:
        return default
    if not (sent.isascii() and sent.isdigit() and len(sent) <= 10 and least <= int(sent) <= most):
        raise bad_parameter(name, f"{show(sent)} is not an integer from {least} to {most}")
    return int(sent)


def _choice(query: Mapping[str, str], name: str, values: Mapping[str, bool]) -> bool:
    """Return what a parameter of two values means; the first is its default."""
    sent = query.get(name, next(iter(values)))
    if sent not in values:
        raise bad_parameter(name, f"{show(sent)} is not one of its values; use {' or '.join(values)}")
    return values[sent]


def _stored(request: web.Request) -> StoredResponse:
    name = request.match_info["id"]
    stored = request.app[RESPONSE_STORE].get(name, context_of(request).caller.id)
    if stored is None:
        raise _not_stored(name)
    return stored


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response."""
    name = request.match_info["id"]
    if not request.app[RESPONSE_STORE].delete(name, context_of(request).caller.id):
        raise _not_stored(name)
    body = {"id": name, "object": "response", "deleted": True}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _not_stored(name: str) -> ApiError:
    return ApiError(
        404,
        f"the response {show(name)} is not stored here (never, no longer, or for another key)",
        code="response_not_found",
    )
