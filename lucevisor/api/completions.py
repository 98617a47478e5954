"""POST /v1/completions: prompts as text or as token ids, one sequence a choice.

Knows the parameters of the endpoint.  Invariant: token ids reach the engine as they came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lucevisor.api.asked import Asked, ReadRequest
from lucevisor.api.bodies import MAX_ECHO_CHARS, CompletionBody
from lucevisor.api.choice import Reading
from lucevisor.api.completion_shape import CompletionShape
from lucevisor.api.context import PORTS
from lucevisor.api.decoding import to_record
from lucevisor.api.errors import bad_parameter
from lucevisor.api.planning import Stamp, check_choices, check_common, check_length, check_tokens, make_jobs
from lucevisor.api.ports import Ports
from lucevisor.api.receive import receive
from lucevisor.api.respond import Plan, respond
from lucevisor.api.sampling import fresh_seed, sampling_of
from lucevisor.text.tokenizer import Tokenizer


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer one completion request."""
    read = await receive(request, "completion", read_completion)
    assert isinstance(read, ReadRequest)
    return await respond(request, plan_completion(read, request.app[PORTS], Stamp.now("cmpl")))


def read_completion(fields: dict[str, Any], ports: Ports) -> ReadRequest:
    """Return what a decoded body asks for; ApiError naming the parameter that cannot be met."""
    body = to_record(CompletionBody, fields)
    check_common(body, ports)
    if body.echo and body.logprobs is not None:
        raise bad_parameter(
            "logprobs", "cannot be told for an echoed prompt; send echo or logprobs, not both", "unsupported_value"
        )
    n = check_choices(body.n, n_prompts_of(body.prompt))
    prompts = prompts_of(body.prompt, ports)
    asked = Asked(
        sampling=sampling_of(body, ports, fresh_seed(), -1 if body.logprobs is None else body.logprobs),
        turn_ends=[[] for _ in prompts],
        max_tokens=body.max_tokens,
        n=n,
        ignore_eos=bool(body.ignore_eos),
        stops=body.stops,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        token_ids=bool(body.return_token_ids),
        logprobs=body.logprobs is not None,
        echoes=_echoes(prompts, n, ports.tokenizer) if body.echo else (),
    )
    return ReadRequest(asked, [tuple(prompt.ids) for prompt in prompts])


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None when it came as token ids."""

    ids: list[int]
    text: str | None = None


def _echoes(prompts: list[Prompt], n: int, tokenizer: Tokenizer) -> tuple[str, ...]:
    echoes = tuple(tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text for prompt in prompts)
    n_chars = n * sum(map(len, echoes))
    if n_chars > MAX_ECHO_CHARS:
        raise bad_parameter(
            "echo", f"would repeat {n_chars} characters, more than {MAX_ECHO_CHARS}; leave it out or ask for less"
        )
    return echoes


def n_prompts_of(prompt: str | list[str | int | list[int]]) -> int:
    """Return how many prompts there are."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def prompts_of(prompt: str | list[str | int | list[int]], ports: Ports) -> list[Prompt]:
    """Return the prompts: a text, several, a list of ids, or several of those."""
    if isinstance(prompt, str):
        return [_from_text(prompt, "prompt", ports)]
    if not prompt:
        raise bad_parameter("prompt", "is an empty array; send text or token ids")
    if isinstance(prompt[0], int):
        return [_from_ids(prompt, "prompt", ports)]
    prompts = []
    for index, item in enumerate(prompt):
        where = f"prompt[{index}]"
        if type(item) is not type(prompt[0]):
            raise bad_parameter(where, "is of another kind than prompt[0]; send only texts or only arrays of token ids")
        prompts.append(_from_text(item, where, ports) if isinstance(item, str) else _from_ids(item, where, ports))
    return prompts


def _from_text(text: str, where: str, ports: Ports) -> Prompt:
    check_length(text, where, ports)
    ids = ports.tokenizer.encode_prompt(text)
    if not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to go on from")
    check_tokens(len(ids), where, ports)
    return Prompt(ids, text)


def _from_ids(ids: object, where: str, ports: Ports) -> Prompt:
    if not isinstance(ids, list) or not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to go on from")
    checked: list[int] = []
    n_vocab = ports.tokenizer.n_vocab
    for index, token_id in enumerate(ids):
        if not isinstance(token_id, int):
            raise bad_parameter(f"{where}[{index}]", "is not a token id; send only texts or only arrays of token ids")
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"{where}[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
        checked.append(token_id)
    check_tokens(len(checked), where, ports)
    return Prompt(checked)
