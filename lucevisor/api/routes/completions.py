"""POST /v1/completions: prompts as text or as token ids, one sequence a choice.

Knows the parameters of the endpoint.  Invariant: token ids reach the engine as they came.
"""

from __future__ import annotations

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import Plan, Stamp, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.completion import CompletionShape
from lucevisor.api.output.processor import Reading
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import ReadRequest
from lucevisor.api.prompts.completions import read_completion
from lucevisor.api.prompts.prepare import receive


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer one completion request."""
    read = await receive(request, "completion", read_completion)
    assert isinstance(read, ReadRequest)
    return await respond(request, plan_completion(read, request.app[PORTS], Stamp.now("cmpl")))


def plan_completion(read: ReadRequest, ports: Ports, stamp: Stamp) -> Plan:
    """Return the sequences of a request and the shape of its answer."""
    asked = read.asked
    shape = CompletionShape(
        response_id=stamp.response_id,
        created_s=stamp.created_s,
        model=ports.model.name,
        fingerprint=ports.model.fingerprint,
        tokenizer=ports.tokenizer,
        n=asked.n,
        echoes=asked.echoes,
        logprobs=asked.logprobs,
        token_ids=asked.token_ids,
        include_usage=asked.include_usage,
    )
    jobs = make_jobs(read, Reading(stops=asked.stops), ports, stamp)
    return Plan(jobs=jobs, shape=shape, stream=asked.stream, prompt_param="prompt")
