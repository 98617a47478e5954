"""POST /v1/chat/completions: messages and tools to one sequence a choice.

Knows the parameters of the endpoint and how they meet the model's chat template.  Invariant: a wish that the template
cannot carry out is refused by name, never dropped.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import Plan, Stamp, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.chat import ChatShape
from lucevisor.api.output.processor import Reading
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import ReadRequest
from lucevisor.api.prompts.chat import read_chat
from lucevisor.api.prompts.prepare import receive
from lucevisor.text.output_parser import OutputParser


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat request."""
    read = await receive(request, "chat", read_chat)
    assert isinstance(read, ReadRequest)
    return await respond(request, plan_chat(read, request.app[PORTS], Stamp.now("chatcmpl")))


def plan_chat(read: ReadRequest, ports: Ports, stamp: Stamp) -> Plan:
    """Return the sequences of a request and the shape of its answer."""
    asked = read.asked
    assert ports.template is not None
    output_format = ports.template.output_format
    reading = Reading(
        stops=asked.stops,
        make_parser=partial(OutputParser, asked.reasoning_open, asked.tools, output_format),
        visible=output_format.visible_ids(ports.tokenizer),
        reasoning_open=asked.reasoning_open,
        one_tool_call=asked.one_tool_call,
    )
    shape = ChatShape(
        response_id=stamp.response_id,
        created_s=stamp.created_s,
        model=ports.model.name,
        fingerprint=ports.model.fingerprint,
        tokenizer=ports.tokenizer,
        logprobs=asked.logprobs,
        token_ids=asked.token_ids,
        include_usage=asked.include_usage,
    )
    jobs = make_jobs(read, reading, ports, stamp)
    return Plan(jobs=jobs, shape=shape, stream=asked.stream, prompt_param="messages")
