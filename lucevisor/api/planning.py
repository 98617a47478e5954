"""What chat and plain completions share on the way to the engine: checks, ids of the answer, one sequence a choice.

Knows no endpoint's shape.  Invariant: choice i of a prompt differs from choice 0 by its seed alone.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Final

import msgspec

from lucevisor.api.asked import ReadRequest
from lucevisor.api.bodies import MAX_CHOICES, GenerationBody
from lucevisor.api.choice import ChoiceReader, Reading
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.respond import Job
from lucevisor.api.sampling import seed_of_choice
from lucevisor.engine.request import GenerationRequest
from lucevisor.errors import show

_QUICK_CHARS: Final = 16 * 1024
"""Texts up to this length are tokenised, whatever the context, in a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What makes one answer this answer: its id and its Unix time."""

    response_id: str
    created_s: int

    @classmethod
    def now(cls, prefix: str) -> Stamp:
        """Return a fresh one; ids begin with `prefix`."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()))


def check_model(asked: str | None, ports: Ports) -> None:
    """Raise the 404 unless the model asked for is the one that is served; none asked is that one."""
    if asked is not None and asked != ports.model.name:
        raise ApiError(
            404,
            f"the model {show(asked)} does not exist here; this server has {show(ports.model.name)}",
            code="model_not_found",
            param="model",
        )


def check_common(body: GenerationBody, ports: Ports) -> None:
    """Check what no single field tells; ApiError naming the parameter."""
    check_model(body.model, ports)
    if body.stream_options is not None and not body.stream:
        raise bad_parameter("stream_options", "is given without stream; send stream: true or leave it out")


def check_length(text: str, param: str, ports: Ports) -> None:
    """Refuse by its bytes a text that cannot fit the context, before it is tokenised."""
    if ports.max_context <= 0 or len(text) < max(ports.max_context, _QUICK_CHARS):
        return
    least = ports.tokenizer.bound.least_tokens(text)
    if least >= ports.max_context:
        raise _overflow(f"has at least {least} tokens", param, ports.max_context)


def check_tokens(n_tokens: int, param: str, ports: Ports) -> None:
    """Refuse a prompt of more tokens than the context holds."""
    if 0 < ports.max_context <= n_tokens:
        raise _overflow(f"has {n_tokens} tokens", param, ports.max_context)


def _overflow(what: str, param: str, max_context: int) -> ApiError:
    return ApiError(
        400,
        f"{param}: the prompt {what} and one more must fit, but max_context is {max_context}; "
        f"shorten the prompt to at most {max_context - 1} tokens, or raise engine.max_context",
        code="context_length_exceeded",
        param=param,
    )


def check_choices(n: int | None, n_prompts: int) -> int:
    """Return the number of choices of each prompt; ApiError when there are too many in all."""
    n = n or 1
    if n * n_prompts > MAX_CHOICES:
        raise bad_parameter("n", f"{n} choices of {n_prompts} prompts are more than {MAX_CHOICES}; ask for fewer")
    return n


def make_jobs(read: ReadRequest, reading: Reading, ports: Ports, stamp: Stamp) -> list[Job]:
    """Return one job a choice, prompts first: choice n*p + i is the i-th of prompt p."""
    asked = read.asked
    jobs = []
    for p, prompt in enumerate(read.prompts):
        room = max(1, ports.max_context - len(prompt))
        for i in range(asked.n):
            request = GenerationRequest(
                request_id=f"{stamp.response_id}-{asked.n * p + i}",
                prompt=prompt,
                max_tokens=room if asked.max_tokens is None else asked.max_tokens,
                sampling=msgspec.structs.replace(asked.sampling, seed=seed_of_choice(asked.sampling.seed, i)),
                stop_ids=frozenset() if asked.ignore_eos else ports.tokenizer.eos_ids,
                turn_boundaries=tuple(asked.turn_ends[p]),
            )
            jobs.append(Job(request=request, reader=ChoiceReader(ports.tokenizer, reading), new_prompt=i == 0))
    return jobs
