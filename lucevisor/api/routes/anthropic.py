"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API."""

from __future__ import annotations

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.anthropic import MessageFormatter
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.anthropic import read_count_tokens, read_messages
from lucevisor.api.prompts.prepare import prepare
from lucevisor.api.routes.chat import chat_output


async def messages(request: web.Request) -> web.StreamResponse:
    """Handle one request for a message."""
    prepared = await prepare(request, read_messages)
    assert isinstance(prepared, PreparedRequest)
    ports, options = request.app[PORTS], prepared.options
    response = ResponseId.now("msg_")
    assert options.max_tokens is not None
    formatter = MessageFormatter(
        response_id=response.response_id,
        model=ports.model.name,
        n_prompt=len(prepared.prompts[0]),
        max_tokens=options.max_tokens,
        show_reasoning=options.show_reasoning,
    )
    plan = GenerationPlan(
        jobs=make_jobs(prepared, chat_output(options, ports), ports, response),
        formatter=formatter,
        stream=options.stream,
        prompt_param="messages",
        ignored=options.ignored,
        compressed=prepared.compressed,
    )
    return await respond(request, plan)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Return how many tokens the prompt of a request has."""
    parts = await prepare(request, read_count_tokens)
    assert isinstance(parts, list)
    return web.Response(body=b"".join(parts), content_type="application/json")
