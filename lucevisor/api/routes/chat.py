"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_envelope, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.chat import ChatFormatter
from lucevisor.api.output.processor import OutputOptions
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.prompts.chat import read_chat
from lucevisor.api.prompts.prepare import prepare
from lucevisor.text.output_parser import OutputParser


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handle one chat request."""
    prepared = await prepare(request, read_chat)
    assert isinstance(prepared, PreparedRequest)
    return await respond(request, plan_chat(prepared, request.app[PORTS], ResponseId.now("chatcmpl-")))


def plan_chat(prepared: PreparedRequest, ports: Ports, response: ResponseId) -> GenerationPlan:
    """Return the jobs of a request and the formatter of its response."""
    options = prepared.options
    formatter = ChatFormatter(
        envelope=make_envelope(prepared, ports, response),
        tokenizer=ports.tokenizer,
        logprobs=options.logprobs,
        token_ids=options.token_ids,
        prompt=prepared.prompts[0],
        custom=options.custom,
        reasoning=options.show_reasoning,
    )
    jobs = make_jobs(prepared, chat_output(options, ports), ports, response)
    return GenerationPlan(
        jobs=jobs,
        formatter=formatter,
        stream=options.stream,
        prompt_param="messages",
        ignored=options.ignored,
        compressed=prepared.compressed,
    )


def chat_output(options: GenerationOptions, ports: Ports) -> OutputOptions:
    """Return how the tokens of a chat request are read, in all APIs that have messages."""
    assert ports.template is not None
    output_format = ports.template.output_format
    return OutputOptions(
        stops=options.stops,
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
        make_parser=partial(OutputParser, options.reasoning_open, options.tools, output_format),
        visible=output_format.visible_ids(ports.tokenizer),
        reasoning_open=options.reasoning_open,
        one_tool_call=options.one_tool_call,
    )
