"""llama.cpp's own completions: POST /completion, /completions and /infill."""

from __future__ import annotations

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.llamacpp import LlamaCppFormatter
from lucevisor.api.ports import Reader
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.prompts.llamacpp import read_infill, read_llama_completion
from lucevisor.api.prompts.prepare import prepare
from lucevisor.api.routes.completions import plain_output


async def completion(request: web.Request) -> web.StreamResponse:
    """Continue a prompt."""
    return await _generated(request, read_llama_completion)


async def infill(request: web.Request) -> web.StreamResponse:
    """Fill a gap in a text."""
    return await _generated(request, read_infill)


async def _generated(request: web.Request, reader: Reader) -> web.StreamResponse:
    prepared = await prepare(request, reader)
    assert isinstance(prepared, PreparedRequest)
    ports, options = request.app[PORTS], prepared.options
    formatter = LlamaCppFormatter(
        model=ports.model.name,
        tokenizer=ports.tokenizer,
        prompts=[prompt for prompt in prepared.prompts for _ in range(options.n)],
        settings=_settings(options),
        logprobs=options.logprobs,
        token_ids=options.token_ids,
    )
    plan = GenerationPlan(
        jobs=make_jobs(prepared, plain_output(options), ports, ResponseId.now("cmpl-")),
        formatter=formatter,
        stream=options.stream,
        prompt_param="prompt" if reader is read_llama_completion else "input_suffix",
        ignored=options.ignored,
        compressed=prepared.compressed,
    )
    return await respond(request, plan)


def _settings(options: GenerationOptions) -> dict[str, object]:
    """Return what was sampled with, by llama.cpp's names."""
    sampling = options.sampling
    names = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")
    n_predict = 0 if options.prompt_only else -1 if options.max_tokens is None else options.max_tokens
    return {
        **{name: getattr(sampling, name) for name in names},
        "repeat_penalty": sampling.repetition_penalty,
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "stop": list(options.stops),
        "ignore_eos": options.ignore_eos,
        "stream": options.stream,
        "n_probs": max(0, sampling.n_top_logprobs),
    }
