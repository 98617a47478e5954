"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_envelope, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.completion import CompletionFormatter
from lucevisor.api.output.processor import OutputOptions
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.prompts.completions import read_completion
from lucevisor.api.prompts.prepare import prepare


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle one completion request."""
    prepared = await prepare(request, read_completion)
    assert isinstance(prepared, PreparedRequest)
    return await respond(request, plan_completion(prepared, request.app[PORTS], ResponseId.now("cmpl-")))


def plain_output(options: GenerationOptions) -> OutputOptions:
    """Return how the output of a plain completion is read: it is text without reasoning or calls."""
    return OutputOptions(
        stops=options.stops,
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
        prompt_only=options.prompt_only,
    )


def plan_completion(prepared: PreparedRequest, ports: Ports, response: ResponseId) -> GenerationPlan:
    """Return the jobs of a request and the formatter of its response."""
    options = prepared.options
    formatter = CompletionFormatter(
        envelope=make_envelope(prepared, ports, response),
        tokenizer=ports.tokenizer,
        n=options.n,
        echoes=options.echoes,
        logprobs=options.logprobs,
        token_ids=options.token_ids,
        prompts=prepared.prompts,
        scored=options.score_prompt,
    )
    jobs = make_jobs(prepared, plain_output(options), ports, response)
    return GenerationPlan(
        jobs=jobs,
        formatter=formatter,
        stream=options.stream,
        prompt_param="prompt",
        ignored=options.ignored,
        compressed=prepared.compressed,
    )
