"""Decisions: log-probabilities of given answers to a prompt, without decoding.

One token is sampled after the prompt, with the log-probabilities of the first tokens of all answers.  An answer of
several tokens is one more prompt, up to its last token, which starts from the cached first one.  These prompts share
steps; each returns the log-probabilities of its own tokens, and the log-probabilities of the tokens that may end it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from lucevisor.api.contexts import ModelContext, RequestContext, ServingEngine
from lucevisor.api.errors import from_request_error, from_submit_error, unavailable
from lucevisor.api.generation import engine_of
from lucevisor.api.metrics import ModelMetrics
from lucevisor.engine.request import (
    FinishedEvent,
    GenerationRequest,
    PromptImage,
    RequestHandle,
    SubmitError,
    TokenEvent,
)
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.protocol.steps import SamplingParams

Ids = tuple[int, ...]


@dataclass(slots=True)
class Decision:
    """Log-probabilities of the answers to one prompt, and tokens of it that were cached."""

    logprobs: list[float]
    cached_tokens: int


@dataclass(slots=True)
class Decider:
    """Runs the requests of one HTTP request.  ``publishes``: its prompts stay cached; ``images``: of all prompts."""

    ctx: ModelContext
    context: RequestContext
    metrics: ModelMetrics
    publishes: bool = True
    images: tuple[PromptImage, ...] = ()
    engine: ServingEngine = field(init=False)
    handles: list[RequestHandle] = field(default_factory=list)
    _ids: str = field(default_factory=lambda: f"decide-{secrets.token_hex(12)}")
    _limit: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.engine = engine_of(self.ctx)
        self.context.handles = self.handles
        self._limit = asyncio.Semaphore(2 * max(1, self.ctx.max_sequences))  # others wait here, not in the queue

    async def decide(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Ids]]) -> list[Decision]:
        """Return the decision of each prompt between its answers, each of at least one token.  Raises ApiError."""
        try:
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(self._decide(*pair)) for pair in zip(prompts, answers, strict=True)]
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, SubmitError):
                raise from_submit_error(error, "prompt", self.ctx.retry_after_s()) from None
            raise error from None
        return [job.result() for job in jobs]

    async def _decide(self, prompt: Sequence[int], answers: Sequence[Ids]) -> Decision:
        first, last = dict.fromkeys([ids[0] for ids in answers], 0.0), dict[Ids, dict[int, float]]()
        for ids in answers:
            if len(ids) > 1:
                last.setdefault(ids[:-1], {})[ids[-1]] = 0.0
        end = await self._follow(prompt, first, branches=bool(last))
        self.context.prompt_tokens += end.usage.prompt_tokens
        self.context.queue_s = end.timings.queue_s
        self.metrics.queue.observe(end.timings.queue_s)
        async with asyncio.TaskGroup() as group:
            jobs = {path: group.create_task(self._follow(prompt, last[path], path)) for path in last}
        logprobs = [first[ids[0]] for ids in answers]
        for i, ids in enumerate(answers):
            if len(ids) > 1:
                n_middle = len(ids) - 2
                found = jobs[ids[:-1]].result().prompt_logprobs
                logprobs[i] += last[ids[:-1]][ids[-1]] + sum(one.logprob for one in found[len(found) - n_middle :])
        return Decision(logprobs, end.usage.cached_tokens)

    async def _follow(
        self, prompt: Sequence[int], following: dict[int, float], path: Ids = (), *, branches: bool = False
    ) -> FinishedEvent:
        """Fill in the log-probabilities of tokens that may follow the prompt and ``path``, the beginning of an answer.
        The event has those of the tokens of ``path`` but the first.  ``branches``: paths will follow the prompt."""
        tokens, named = TokenBuffer(prompt), tuple(following)
        for token in path:
            tokens.append(token)
        async with self._limit:
            request = GenerationRequest(
                request_id=f"{self._ids}-{len(self.handles)}",
                prompt=tokens,
                max_tokens=1,
                sampling=SamplingParams(temperature=0.0, n_top_logprobs=0, logprob_token_ids=named),
                client_id=self.context.caller.share,
                publishes=self.publishes and not path,
                branches=branches,
                prompt_logprobs=len(path) > 1,
                prompt_logprobs_from=len(prompt) if path else 0,
                images=self.images,
            )
            with self.engine.submit(request) as handle:
                self.handles.append(handle)
                async for event in handle:
                    if isinstance(event, TokenEvent):
                        following.update(event.top)
                    elif event.error is not None:
                        raise from_request_error(event.error, self.ctx.retry_after_s())
                    elif event.reason == "cancelled":
                        reason = "the request was cancelled; try again later"
                        raise unavailable(reason, self.ctx.retry_after_s(), "shutting_down")
                    else:
                        return event
        raise AssertionError("the stream ended without a FinishedEvent")
