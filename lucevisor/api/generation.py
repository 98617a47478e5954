"""Runs a request: submits one sequence per choice, merges their events and writes the response.

Nothing is sent before the engine has accepted every sequence, and no sequence outlives its response.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgspec
from aiohttp import web

from lucevisor.api.app_state import METRICS, context_of, model_of
from lucevisor.api.bodies import AddToBody, prepare_request
from lucevisor.api.contexts import BodyParser, ModelContext, RequestContext, ServingEngine
from lucevisor.api.errors import ApiError, from_request_error, from_submit_error, unavailable
from lucevisor.api.metrics import Metrics
from lucevisor.api.output import ChoiceDelta, GenerationFailed, OutputProcessor, UsageTotals
from lucevisor.api.parameters import seed_of_choice
from lucevisor.api.prepared import ModelLoadRequest, PreparedRequest
from lucevisor.api.sse import EventFormat, EventStream
from lucevisor.engine.constraint import Constraint, MinTokens
from lucevisor.engine.request import Event, FinishedEvent, GenerationRequest, RequestHandle, SubmitError, TokenEvent
from lucevisor.errors import LucevisorError
from lucevisor.text.reasoning import ReasoningBudget


def make_choice_runs(prepared: PreparedRequest, ctx: ModelContext, response_id: str) -> list[ChoiceRun]:
    options = prepared.options
    runs = []
    ends = frozenset(options.stop_ids) | (frozenset() if options.ignore_eos else ctx.tokenizer.eos_ids | ctx.stop_ids)
    output_format = None if ctx.template is None else ctx.template.output_format
    for p, prompt in enumerate(prepared.prompts):
        room = max(1, ctx.max_context - len(prompt))
        for i in range(options.n):
            request = GenerationRequest(
                request_id=f"{response_id}-{options.n * p + i}",
                prompt=prompt,
                max_tokens=room if options.max_tokens is None else options.max_tokens,
                sampling=msgspec.structs.replace(options.sampling, seed=seed_of_choice(options.sampling.seed, i)),
                stop_ids=ends,
                turn_boundaries=tuple(options.turn_ends[p]),
                constraint=_constraint(prepared, ctx, room, ends),
                prompt_logprobs=options.prompt_logprobs,
                images=prepared.embedded,
            )
            processor = OutputProcessor(ctx.tokenizer, options, output_format)
            runs.append(ChoiceRun(request=request, processor=processor, new_prompt=i == 0))
    return runs


def _constraint(prepared: PreparedRequest, ctx: ModelContext, room: int, ends: frozenset[int]) -> Constraint | None:
    """Return the constraint of one choice: its grammar, its thinking budget, and its minimum length."""
    options = prepared.options
    matcher = None if prepared.grammar is None else prepared.grammar.matcher()
    inner: Constraint | None = matcher
    tags = None if ctx.template is None else ctx.template.output_format.reasoning
    if options.max_thinking_tokens is not None and tags is not None:
        limit = min(options.max_tokens or room, room)
        # At least 1024 tokens are left for the answer, or a quarter of those allowed if they are few.
        n_tokens = min(options.max_thinking_tokens, limit - min(1024, limit // 4))
        inner = ReasoningBudget(n_tokens, tags, ctx.tokenizer, inside=options.reasoning_open, inner=matcher)
    least = options.min_tokens
    return inner if least == 0 else MinTokens(least, ends, ctx.tokenizer.n_vocab, inner)


class ResponseFormatter(EventFormat, ABC):
    """Formats the JSON of one response, streamed (start, delta, end, or failure) or full.  `index`: of a choice."""

    id_prefix: ClassVar[str] = ""
    prompt_param: ClassVar[str] = "messages"

    def __init__(self, prepared: PreparedRequest, ctx: ModelContext) -> None:
        self.prepared, self.options = prepared, prepared.options
        self.card, self.tokenizer = ctx.model, ctx.tokenizer
        self.unique_id = secrets.token_hex(12)
        self.response_id = self.id_prefix + self.unique_id
        self.created_s = int(time.time())

    def start(self, index: int) -> Sequence[object]:
        """Return the events that open a choice in a stream: none where the first delta does."""
        return ()

    @abstractmethod
    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the events of one delta."""

    @abstractmethod
    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the last events, after those of all choices."""

    @abstractmethod
    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the body of a response that is not streamed."""


class OpenAiFormatter(ResponseFormatter):
    """The common parts of OpenAI's chat and plain completions."""

    chunk_kind: ClassVar[str]

    def end(self, totals: UsageTotals) -> Sequence[object]:
        return [self.response(self.chunk_kind, [], totals)] if self.options.include_usage else []

    def prompt_of(self, index: int) -> Sequence[int]:
        return self.prepared.prompts[index // self.options.n]

    def prompt_ids(self, index: int) -> dict[str, object]:
        return {"prompt_token_ids": list(self.prompt_of(index))} if self.options.token_ids else {}

    def chunk(self, index: int, choice: dict[str, object], delta: ChoiceDelta) -> dict[str, object]:
        chunk: dict[str, object] = {**self._head(self.chunk_kind), "choices": [self.with_ids(choice, [delta])]}
        if self.options.continuous_usage:
            usage = UsageTotals(prompt=len(self.prompt_of(index)), generated=delta.n_tokens)
            chunk["usage"] = usage.counts()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def with_ids(self, choice: dict[str, object], deltas: Sequence[ChoiceDelta]) -> dict[str, object]:
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice | {"token_ids": ids} if self.options.token_ids else choice

    def response(self, kind: str, choices: list[dict[str, object]], totals: UsageTotals) -> dict[str, object]:
        """Return the body of a response that is not streamed, or the last chunk of a stream."""
        usage = {"usage": totals.usage(), "timings": totals.timings_json()}
        return {**self._head(kind), "choices": choices, **usage}

    def _head(self, kind: str) -> dict[str, object]:
        head = {"id": self.response_id, "object": kind, "created": self.created_s, "model": self.card.name}
        return head | ({"system_fingerprint": self.card.fingerprint} if self.card.fingerprint else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRun:
    """Engine request and output processor of one choice.  `new_prompt`: no earlier choice has the same prompt."""

    request: GenerationRequest
    processor: OutputProcessor
    new_prompt: bool = True


Events = asyncio.Queue[tuple[int, Event]]
"""Events of all sequences, with the index of the sequence."""


@asynccontextmanager
async def merged(handles: Sequence[RequestHandle]) -> AsyncIterator[Events]:
    """Read all handles concurrently while the block runs."""
    queue: Events = asyncio.Queue(64)
    try:
        async with asyncio.TaskGroup() as group:

            async def forward(index: int, handle: RequestHandle) -> None:
                async for event in handle:
                    await queue.put((index, event))

            tasks = [group.create_task(forward(*each)) for each in enumerate(handles)]
            yield queue
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        # A single cause ended the block: its own error, or a bug in a task.
        raise errors.exceptions[0] from None
    finally:
        for handle in handles:
            handle.cancel()


IGNORED_HEADER: Final = "X-Lucevisor-Ignored"
"""Header with the names of the request's parameters that have no effect."""
_INLINE_RECORDS: Final = 2000  # tokens and log-probabilities that are encoded in a millisecond or two


async def handle_generation(
    request: web.Request,
    parser: BodyParser,
    make_formatter: Callable[[PreparedRequest, ModelContext], ResponseFormatter] | None = None,
    add_to_body: AddToBody | None = None,
) -> web.StreamResponse:
    """Prepare a request, generate and respond; without a formatter the parser's result is the response. Raises
    ApiError, ClientGone."""
    prepared = await prepare_request(request, parser, add_to_body)
    ctx, context = model_of(request), context_of(request)
    if isinstance(prepared, ModelLoadRequest):
        await _load_or_unload(prepared, ctx)
        prepared = prepared.answer
    if not isinstance(prepared, PreparedRequest):
        return web.Response(body=prepared, content_type="application/json")
    assert make_formatter is not None
    options = prepared.options
    formatter = make_formatter(prepared, ctx)
    headers = {IGNORED_HEADER: ", ".join(options.ignored)} if options.ignored else {}
    runs = make_choice_runs(prepared, ctx, formatter.response_id)
    await _submit(ctx, runs, formatter.prompt_param, context)
    if ctx.control is not None and options.keep_alive_s is not None:
        ctx.control.keep_alive(options.keep_alive_s)
    writer = _ResponseWriter(runs, formatter, context, request.app[METRICS])
    try:
        async with merged(context.handles) as events:
            if options.stream:
                stream = context.stream = EventStream(request, headers, formatter)
                await writer.stream(events, stream, ctx.server.settings.keepalive_s)
                return stream.response
            body = await writer.full(events)
    except GenerationFailed as failure:
        raise from_request_error(failure.error, ctx.retry_after_s()) from None
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _load_or_unload(wanted: ModelLoadRequest, ctx: ModelContext) -> None:
    """Load or unload a model; raises ApiError."""
    if ctx.control is None:
        return
    if wanted.keep_alive_s == 0:
        try:
            await ctx.control.unload()
        except LucevisorError as error:
            raise ApiError(409, str(error), code="model_not_unloaded") from None
        return
    try:
        await ctx.control.load()
    except LucevisorError as error:
        raise unavailable(str(error), ctx.retry_after_s(), "model_not_loaded") from None
    if wanted.keep_alive_s is not None:
        ctx.control.keep_alive(wanted.keep_alive_s)


def engine_of(ctx: ModelContext) -> ServingEngine:
    """Return the engine; raises ApiError before there is one."""
    if ctx.engine is None and ctx.control is not None and ctx.control.problem:
        raise unavailable(f"the model cannot be loaded: {ctx.control.problem}", ctx.retry_after_s(), "model_not_loaded")
    if ctx.engine is None:
        waiting = ", ".join(f"{part.name} is {part.state}" for part in ctx.server.not_ready()) or "it is starting"
        raise unavailable(f"the model is not ready: {waiting}; try again later", ctx.retry_after_s())
    return ctx.engine


async def _submit(ctx: ModelContext, runs: Sequence[ChoiceRun], prompt_param: str, context: RequestContext) -> None:
    """Submit every sequence or none; `context` has each immediately, as a drain may happen in between."""
    engine = engine_of(ctx)
    context.handles = handles = list[RequestHandle]()
    try:
        for run in runs:
            handles.append(engine.submit(replace(run.request, client_id=context.caller.share)))
            if len(run.request.prompt) >= 4096:  # the loop gets a turn
                await asyncio.sleep(0)
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if isinstance(error, SubmitError):
            raise from_submit_error(error, prompt_param, ctx.retry_after_s()) from None
        raise


class _ResponseWriter:
    """Writes the response of all choices from their events, and counts their tokens."""

    def __init__(
        self,
        runs: Sequence[ChoiceRun],
        formatter: ResponseFormatter,
        context: RequestContext,
        metrics: Metrics,
    ) -> None:
        self._runs, self._formatter = runs, formatter
        self._context = context
        self._metrics = metrics.of_model(context.model)
        self._totals = UsageTotals(compressed=formatter.prepared.compressed, sampling=formatter.options.sampling)
        self._n_open = len(runs)
        self._last_token_s: list[float | None] = [None] * len(runs)
        self._n_tokens = [0] * len(runs)
        self._cut: set[int] = set()  # choices ended by a stop string or tool call; ignore their further tokens

    async def stream(self, events: Events, stream: EventStream, keepalive_s: float) -> None:
        """Send each delta as it comes, and a comment after each `keepalive_s` without one."""
        formatter = self._formatter
        opened = [False] * len(self._runs)
        while self._n_open:
            try:
                async with asyncio.timeout(keepalive_s):
                    index, event = await events.get()
            except TimeoutError:
                await stream.comment()
                continue
            deltas = self._deltas(index, event)
            wire = [] if opened[index] else [*formatter.start(index)]
            opened[index] = True
            for delta in deltas:
                wire += formatter.delta(index, delta)
            await stream.send(wire)
        await stream.send(formatter.end(self._totals))
        await stream.finish()

    async def full(self, events: Events) -> bytes:
        """Gather all deltas; return the body."""
        choices: list[list[ChoiceDelta]] = [[] for _ in self._runs]
        while self._n_open:
            index, event = await events.get()
            choices[index] += self._deltas(index, event)
        n_prompt_tokens = sum(len(run.request.prompt) for run in self._runs if run.request.prompt_logprobs)
        n_logprobs = 1 + self._formatter.options.sampling.n_top_logprobs
        if (sum(map(len, choices)) + n_prompt_tokens) * (1 + n_logprobs) <= _INLINE_RECORDS:
            return self._encoded(choices)
        return await asyncio.to_thread(self._encoded, choices)

    def _encoded(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        return msgspec.json.encode(self._formatter.full(choices, self._totals))

    def _deltas(self, index: int, event: TokenEvent | FinishedEvent) -> list[ChoiceDelta]:
        run, context = self._runs[index], self._context
        if isinstance(event, TokenEvent):
            if index in self._cut:
                return []
            self._note_token(index, drafted=event.drafted)
            deltas = run.processor.token(event)
            if run.processor.ended:
                self._cut.add(index)
                context.handles[index].cancel()
            return deltas
        context.queue_s = event.timings.queue_s
        self._metrics.queue.observe(event.timings.queue_s)
        if self._last_token_s[index] is None and run.new_prompt:
            context.prompt_tokens += event.usage.prompt_tokens
        deltas, usage = run.processor.finish(event)
        self._totals.add(usage, new_prompt=run.new_prompt)
        context.cached_tokens = self._totals.cached
        context.accepted_tokens, context.rejected_tokens = self._totals.accepted, self._totals.rejected
        context.generated_tokens += usage.generated - self._n_tokens[index]  # the id that ended it, if any
        self._n_open -= 1
        return deltas

    def _note_token(self, index: int, *, drafted: bool) -> None:
        now = time.monotonic()
        last = self._last_token_s[index]
        if last is not None:
            self._metrics.inter_token.observe(now - last)
        else:
            if self._runs[index].new_prompt:
                self._context.prompt_tokens += len(self._runs[index].request.prompt)
            if self._context.first_token_s is None:
                self._context.first_token_s = now - self._context.started_s
                self._metrics.time_to_first_token.observe(self._context.first_token_s)
        self._last_token_s[index] = now
        self._n_tokens[index] += 1
        self._context.generated_tokens += 1
        self._context.accepted_tokens += drafted
