"""OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from lucevisor.api.context import PORTS, RESPONSE_STORE, context_of
from lucevisor.api.errors import ApiError
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.responses import ResponsesFormatter
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.prepare import prepare
from lucevisor.api.prompts.responses import previous_not_stored, read_response
from lucevisor.api.response_store import StoredResponse, with_stored
from lucevisor.api.routes.chat import chat_output
from lucevisor.errors import show


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handle one request for a response."""
    ports, store, key = request.app[PORTS], request.app[RESPONSE_STORE], context_of(request).caller.id
    named: dict[str, StoredResponse] = {}

    async def amend(body: list[bytes]) -> int:
        named.update(await store.named_in(body, key))
        return with_stored(body, named)

    prepared = await prepare(request, "responses", read_response, amend)
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


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response."""
    name = request.match_info["id"]
    stored = request.app[RESPONSE_STORE].get(name, context_of(request).caller.id)
    if stored is None:
        raise _not_stored(name)
    return web.Response(body=stored.body, content_type="application/json")


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
