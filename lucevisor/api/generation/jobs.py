"""A request as jobs for the engine: one sequence per choice, and how its output is processed.

Knows no endpoint.  Invariant: choice i of a prompt differs from choice 0 in its seed only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from lucevisor.api.output.envelope import Envelope
from lucevisor.api.output.processor import ChoiceDelta, OutputOptions, OutputProcessor
from lucevisor.api.output.sse import EventFormat
from lucevisor.api.output.usage import UsageTotals
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.sampling import seed_of_choice
from lucevisor.compression.compressor import CompressedPrompt
from lucevisor.engine.constraint import Constraint, MinTokens
from lucevisor.engine.request import GenerationRequest
from lucevisor.text.reasoning_budget import ReasoningBudget

_ANSWER_TOKENS: Final = 1024
"""Tokens that a thinking budget leaves for the answer, or a quarter of those allowed if they are few."""


@dataclass(frozen=True, slots=True)
class ResponseId:
    """Id and Unix time of one response."""

    response_id: str
    created_s: int

    @classmethod
    def now(cls, prefix: str) -> ResponseId:
        """Return a new id that starts with `prefix`."""
        return cls(prefix + secrets.token_hex(12), int(time.time()))


def make_jobs(prepared: PreparedRequest, output: OutputOptions, ports: Ports, response: ResponseId) -> list[Job]:
    """Return one job per choice: choice i of prompt p is number n*p + i."""
    options = prepared.options
    jobs = []
    ends = frozenset[int]() if options.ignore_eos else ports.tokenizer.eos_ids | ports.stop_ids
    for p, prompt in enumerate(prepared.prompts):
        room = max(1, ports.max_context - len(prompt))
        for i in range(options.n):
            request = GenerationRequest(
                request_id=f"{response.response_id}-{options.n * p + i}",
                prompt=prompt,
                max_tokens=room if options.max_tokens is None else options.max_tokens,
                sampling=msgspec.structs.replace(options.sampling, seed=seed_of_choice(options.sampling.seed, i)),
                stop_ids=frozenset(options.stop_ids) | ends,
                turn_boundaries=tuple(options.turn_ends[p]),
                constraint=_constraint(prepared, output, ports, room, frozenset(options.stop_ids) | ends),
                score_prompt=options.score_prompt,
            )
            jobs.append(Job(request=request, processor=OutputProcessor(ports.tokenizer, output), new_prompt=i == 0))
    return jobs


def _constraint(
    prepared: PreparedRequest, output: OutputOptions, ports: Ports, room: int, ends: frozenset[int]
) -> Constraint | None:
    """Return what one choice must be: its grammar, its thinking budget and its least length, where it has them."""
    inner, least = _form(prepared, output, ports, room), prepared.options.min_tokens
    return inner if least == 0 else MinTokens(least, ends, ports.tokenizer.n_vocab, inner)


def _form(prepared: PreparedRequest, output: OutputOptions, ports: Ports, room: int) -> Constraint | None:
    """Return the grammar of one choice, its thinking budget with room for an answer, both or neither."""
    options = prepared.options
    matcher = None if prepared.grammar is None else prepared.grammar.matcher()
    tags = None if ports.template is None else ports.template.output_format.reasoning
    if options.max_thinking_tokens is None or tags is None:
        return matcher
    limit = min(options.max_tokens or room, room)
    n_tokens = min(options.max_thinking_tokens, limit - min(_ANSWER_TOKENS, limit // 4))
    return ReasoningBudget(n_tokens, tags, ports.tokenizer, inside=output.reasoning_open, inner=matcher)


def make_envelope(prepared: PreparedRequest, ports: Ports, response: ResponseId) -> Envelope:
    """Return what all objects of the response have in common."""
    return Envelope(
        response_id=response.response_id,
        created_s=response.created_s,
        model=ports.model.name,
        fingerprint=ports.model.fingerprint,
        include_usage=prepared.options.include_usage,
        prompt_tokens=tuple(len(ids) for ids in prepared.prompts for _ in range(prepared.options.n))
        if prepared.options.continuous_usage
        else (),
    )


class ResponseFormatter(EventFormat, Protocol):
    """Formats the JSON of one response of one endpoint.  `index` is the index of a choice.

    A response is either streamed (start, delta, end, or failure) or full.
    """

    def start(self, index: int) -> Sequence[object]:
        """Return the events that open a choice in a stream."""

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the events of one delta."""

    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the last events, after those of all choices."""

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the body of a response that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice: what to generate and how to process it.  `new_prompt`: no earlier choice has the same prompt."""

    request: GenerationRequest
    processor: OutputProcessor
    new_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """A request ready for the engine.  `prompt_param` is the parameter that held the prompt; `ignored` names those
    without effect; `compressed`: what PFlash made of the prompts."""

    jobs: Sequence[Job]
    formatter: ResponseFormatter
    stream: bool
    prompt_param: str
    ignored: tuple[str, ...]
    compressed: tuple[CompressedPrompt, ...] = ()
