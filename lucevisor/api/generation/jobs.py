"""A request as jobs for the engine: one sequence per choice, and how its output is processed.

Knows no endpoint.  Invariant: choice i of a prompt differs from choice 0 in its seed only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lucevisor.api.output.processor import ChoiceReader, Piece, Reading
from lucevisor.api.output.usage import Totals
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import ReadRequest
from lucevisor.api.prompts.sampling import seed_of_choice
from lucevisor.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Stamp:
    """What makes one answer this answer: its id and its Unix time."""

    response_id: str
    created_s: int

    @classmethod
    def now(cls, prefix: str) -> Stamp:
        """Return a fresh one; ids begin with `prefix`."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()))


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


class Shape(Protocol):
    """The JSON of one endpoint.  `index` is the index of a choice."""

    def first(self, index: int) -> object | None:
        """Return the event that opens a choice in a stream, or None."""

    def chunk(self, index: int, piece: Piece) -> object:
        """Return the event of one piece."""

    def usage_chunk(self, totals: Totals) -> object | None:
        """Return the last event, with the usage, or None when it is not wanted."""

    def whole(self, choices: Sequence[Sequence[Piece]], totals: Totals) -> object:
        """Return the body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice: what to generate and how to read it.  `new_prompt`: no earlier choice has the same prompt."""

    request: GenerationRequest
    reader: ChoiceReader
    new_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request made ready for the engine.  `prompt_param` is the parameter that the prompt came in."""

    jobs: Sequence[Job]
    shape: Shape
    stream: bool
    prompt_param: str
