"""What chat and plain completions share on the way to the engine: checks, ids of the answer, one sequence a choice.

Knows no endpoint's shape.  Invariant: choice i of a prompt differs from choice 0 by its seed alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lucevisor.api.bodies import MAX_CHOICES, GenerationBody
from lucevisor.api.choice import ChoiceReader, Reading
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.respond import Job
from lucevisor.api.sampling import sampling_of, seed_of_choice
from lucevisor.engine.request import GenerationRequest
from lucevisor.errors import show
from lucevisor.text.template import EncodedPrompt


@dataclass(frozen=True, slots=True)
class Stamp:
    """What makes one answer this answer: its id, its Unix time, and the seed used when the client gives none."""

    response_id: str
    created_s: int
    seed: int

    @classmethod
    def now(cls, prefix: str) -> Stamp:
        """Return a fresh one; ids begin with `prefix`."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), secrets.randbits(63))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What the sequences of a request have in common.  `max_tokens` None: all the room that the context leaves."""

    prompts: Sequence[EncodedPrompt]
    reading: Reading
    max_tokens: int | None
    n_top_logprobs: int  # -1: no log-probabilities


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


def make_jobs(body: GenerationBody, ports: Ports, stamp: Stamp, outline: Outline) -> list[Job]:
    """Return one job a choice, prompts first: choice n*p + i is the i-th of prompt p."""
    n, n_prompts = body.n or 1, len(outline.prompts)
    if n * n_prompts > MAX_CHOICES:
        raise bad_parameter("n", f"{n} choices of {n_prompts} prompts are more than {MAX_CHOICES}; ask for fewer")
    sampling = sampling_of(body, ports, stamp.seed, outline.n_top_logprobs)
    jobs = []
    for p, prompt in enumerate(outline.prompts):
        room = max(1, ports.max_context - len(prompt.ids))
        for i in range(n):
            request = GenerationRequest(
                request_id=f"{stamp.response_id}-{n * p + i}",
                prompt=tuple(prompt.ids),
                max_tokens=room if outline.max_tokens is None else outline.max_tokens,
                sampling=msgspec.structs.replace(sampling, seed=seed_of_choice(sampling.seed, i)),
                stop_ids=frozenset() if body.ignore_eos else ports.tokenizer.eos_ids,
                turn_boundaries=tuple(prompt.turn_ends),
            )
            reader = ChoiceReader(ports.tokenizer, outline.reading)
            jobs.append(Job(request=request, reader=reader, new_prompt=i == 0))
    return jobs
