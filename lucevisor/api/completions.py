"""POST /v1/completions: prompts as text or as token ids, one sequence a choice.

Knows the parameters of the endpoint.  Invariant: token ids reach the engine as they came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lucevisor.api.bodies import CompletionBody
from lucevisor.api.choice import Reading
from lucevisor.api.completion_shape import CompletionShape
from lucevisor.api.context import PORTS
from lucevisor.api.decoding import offload, read_object, to_record
from lucevisor.api.errors import bad_parameter
from lucevisor.api.planning import Outline, Stamp, check_common, make_jobs
from lucevisor.api.ports import Ports
from lucevisor.api.respond import Plan, respond
from lucevisor.text.template import EncodedPrompt
from lucevisor.text.tokenizer import Tokenizer


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer one completion request."""
    ports = request.app[PORTS]
    fields, size = await read_object(request, ports.settings.max_body_bytes, ports.settings.body_timeout_s)
    plan = await offload(size, plan_completion, fields, ports, Stamp.now("cmpl"))
    return await respond(request, plan)


def plan_completion(fields: dict[str, Any], ports: Ports, stamp: Stamp) -> Plan:
    """Return what a decoded body asks for; ApiError naming the parameter that cannot be met."""
    body = to_record(CompletionBody, fields)
    check_common(body, ports)
    if body.echo and body.logprobs is not None:
        raise bad_parameter(
            "logprobs", "cannot be told for an echoed prompt; send echo or logprobs, not both", "unsupported_value"
        )
    prompts = prompts_of(body.prompt, ports.tokenizer)
    shape = CompletionShape(
        response_id=stamp.response_id,
        created_s=stamp.created_s,
        model=ports.model.name,
        fingerprint=ports.model.fingerprint,
        tokenizer=ports.tokenizer,
        n=body.n or 1,
        echoes=tuple(_echo(prompt, ports.tokenizer) for prompt in prompts) if body.echo else (),
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    outline = Outline(
        prompts=[EncodedPrompt(prompt.ids, []) for prompt in prompts],
        reading=Reading(stops=body.stops),
        max_tokens=body.max_tokens,
        n_top_logprobs=-1 if body.logprobs is None else body.logprobs,
    )
    jobs = make_jobs(body, ports, stamp, outline)
    return Plan(jobs=jobs, shape=shape, stream=bool(body.stream), prompt_param="prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None when it came as token ids."""

    ids: list[int]
    text: str | None = None


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text


def prompts_of(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts: a text, several, a list of ids, or several of those."""
    if isinstance(prompt, str):
        return [_from_text(prompt, "prompt", tokenizer)]
    if not prompt:
        raise bad_parameter("prompt", "is an empty array; send text or token ids")
    if isinstance(prompt[0], int):
        return [_from_ids(prompt, "prompt", tokenizer)]
    prompts = []
    for index, item in enumerate(prompt):
        where = f"prompt[{index}]"
        if type(item) is not type(prompt[0]):
            raise bad_parameter(where, "is of another kind than prompt[0]; send only texts or only arrays of token ids")
        prompts.append(
            _from_text(item, where, tokenizer) if isinstance(item, str) else _from_ids(item, where, tokenizer)
        )
    return prompts


def _from_text(text: str, where: str, tokenizer: Tokenizer) -> Prompt:
    ids = tokenizer.encode_prompt(text)
    if not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to go on from")
    return Prompt(ids, text)


def _from_ids(ids: object, where: str, tokenizer: Tokenizer) -> Prompt:
    if not isinstance(ids, list) or not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to go on from")
    checked: list[int] = []
    for index, token_id in enumerate(ids):
        if not isinstance(token_id, int):
            raise bad_parameter(f"{where}[{index}]", "is not a token id; send only texts or only arrays of token ids")
        if not 0 <= token_id < tokenizer.n_vocab:
            raise bad_parameter(f"{where}[{index}]", f"{token_id} is not a token id; use 0 to {tokenizer.n_vocab - 1}")
        checked.append(token_id)
    return Prompt(checked)
