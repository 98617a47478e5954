"""Submits the sequences of a request, processes their events and writes the response, streamed or in one piece.

Knows no JSON (a `ResponseFormatter` does) and no tokenizer.  Invariant: nothing is sent before the engine has accepted
every sequence, and however a response ends, none of its sequences keeps running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import structlog
from aiohttp import web

from lucevisor.api.context import IGNORED_BEFORE, METRICS, PORTS, RequestContext, context_of
from lucevisor.api.errors import from_refusal, from_request_error, unavailable
from lucevisor.api.generation.jobs import GenerationPlan
from lucevisor.api.generation.merge import MergedEvents, merged
from lucevisor.api.metrics import Metrics
from lucevisor.api.output.processor import ChoiceDelta, GenerationFailed
from lucevisor.api.output.sse import EventStream
from lucevisor.api.output.usage import UsageTotals
from lucevisor.api.ports import HandlePort, Ports
from lucevisor.engine.request import FinishedEvent, SubmitError, TokenEvent

log = structlog.get_logger("lucevisor.api")

IGNORED_HEADER: Final = "X-Lucevisor-Ignored"
"""Header with the names of the request's parameters that have no effect."""
_MAX_NAMES: Final = 1024  # of such parameters, after which no new ones are logged
_HELD_S: Final = 1.0  # seconds between the comments of a stream while its request is held
_LONG_PROMPT: Final = 4096  # ids; the loop gets a turn after each prompt as long as this
_QUICK_RECORDS: Final = 2000  # tokens and log-probabilities that are encoded in a millisecond or two


async def respond(request: web.Request, plan: GenerationPlan) -> web.StreamResponse:
    """Run a plan and respond.  Raises ApiError when it is rejected or a sequence fails, ClientGone on a disconnect."""
    ports, context = request.app[PORTS], context_of(request)
    headers = {IGNORED_HEADER: ", ".join(plan.ignored)} if plan.ignored else {}
    _log_once(plan.ignored, request.app[IGNORED_BEFORE])
    await _submit(ports, plan, context)
    run = _Response(plan, context, request.app[METRICS])
    try:
        async with merged(context.handles) as events:
            if plan.stream:
                stream = context.stream = EventStream(request, ports.settings.write_timeout_s, headers, plan.formatter)
                await run.stream(events, stream, ports)
                return stream.response
            body = await run.full(events, ports.settings.keepalive_s)
    except GenerationFailed as failure:
        raise from_request_error(failure.error, ports.retry_after_s()) from None
    return web.Response(body=body, content_type="application/json", headers=headers)


def _log_once(names: Sequence[str], before: set[str]) -> None:
    """Log the parameters that no request gave before."""
    if len(before) < _MAX_NAMES and (new := set(names) - before):
        before |= new
        log.info("parameters without effect were sent", parameters=sorted(new))


async def _submit(ports: Ports, plan: GenerationPlan, context: RequestContext) -> None:
    """Submit every sequence or none; `context` has each immediately, as a drain may happen in between."""
    if ports.engine is None:
        waiting = ", ".join(f"{part.name} is {part.state}" for part in ports.not_ready()) or "it is starting"
        raise unavailable(f"the model is not ready: {waiting}; try again later", ports.retry_after_s())
    context.handles = handles = list[HandlePort]()
    try:
        for job in plan.jobs:
            handles.append(ports.engine.submit(replace(job.request, client_id=context.caller.share)))
            if len(job.request.prompt) >= _LONG_PROMPT:
                await asyncio.sleep(0)
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if isinstance(error, SubmitError):
            raise from_refusal(error, plan.prompt_param, ports.retry_after_s()) from None
        raise


class _Response:
    """One running plan."""

    def __init__(self, plan: GenerationPlan, context: RequestContext, metrics: Metrics) -> None:
        self._plan = plan
        self._context = context
        self._metrics = metrics
        self._totals = UsageTotals(compressed=plan.compressed, sampling=plan.jobs[0].request.sampling)
        self._n_open = len(plan.jobs)
        self._last_token_s: list[float | None] = [None] * len(plan.jobs)
        self._n_tokens = [0] * len(plan.jobs)
        self._cut: set[int] = set()  # choices ended by a stop string or tool call; ignore their further tokens

    async def stream(self, events: MergedEvents, stream: EventStream, ports: Ports) -> None:
        """Send each delta as it comes, and comments when there is none for a while.

        A request that is held before its first event gets none sooner than others: its status can still be an error's.
        """
        formatter = self._plan.formatter
        opened = [False] * len(self._plan.jobs)
        keepalive_s = ports.settings.keepalive_s
        silent_s, look_s = 0.0, min(keepalive_s, _HELD_S)
        while self._n_open:
            item = await events.next(look_s)
            if item is None:
                silent_s += look_s
                held = stream.started and ports.engine is not None and ports.engine.holding
                if held or silent_s >= keepalive_s:
                    silent_s = 0.0
                    await stream.comment()
                continue
            silent_s = 0.0
            index, event = item
            deltas = self._read(index, event)
            wire = [] if opened[index] else [*formatter.start(index)]
            opened[index] = True
            for delta in deltas:
                wire += formatter.delta(index, delta)
            await stream.send(wire)
        await stream.send(formatter.end(self._totals))
        await stream.finish()

    async def full(self, events: MergedEvents, patience_s: float) -> bytes:
        """Gather all deltas; return the body."""
        choices: list[list[ChoiceDelta]] = [[] for _ in self._plan.jobs]
        while self._n_open:
            item = await events.next(patience_s)
            if item is not None:
                index, event = item
                choices[index] += self._read(index, event)
        n_scored = sum(len(job.request.prompt) for job in self._plan.jobs if job.request.score_prompt)
        if (sum(map(len, choices)) + n_scored) * (1 + self._n_scores()) <= _QUICK_RECORDS:
            return self._encoded(choices)
        return await asyncio.to_thread(self._encoded, choices)

    def _n_scores(self) -> int:
        """Return how many log-probabilities come with each token."""
        return 1 + max(job.request.sampling.n_top_logprobs for job in self._plan.jobs)

    def _encoded(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        return msgspec.json.encode(self._plan.formatter.full(choices, self._totals))

    def _read(self, index: int, event: TokenEvent | FinishedEvent) -> list[ChoiceDelta]:
        job, context = self._plan.jobs[index], self._context
        if isinstance(event, TokenEvent):
            if index in self._cut:
                return []
            self._note_token(index, drafted=event.drafted)
            deltas = job.processor.token(event)
            if job.processor.ended:
                self._cut.add(index)
                context.handles[index].cancel()
            return deltas
        context.queue_s = event.timings.queue_s
        self._metrics.queue.observe(event.timings.queue_s)
        if self._last_token_s[index] is None and job.new_prompt:
            context.prompt_tokens += event.usage.prompt_tokens
        deltas, usage = job.processor.finish(event)
        self._totals.add(usage, event.timings, new_prompt=job.new_prompt)
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
            if self._plan.jobs[index].new_prompt:
                self._context.prompt_tokens += len(self._plan.jobs[index].request.prompt)
            if self._context.first_token_s is None:
                self._context.first_token_s = now - self._context.started_s
                self._metrics.time_to_first_token.observe(self._context.first_token_s)
        self._last_token_s[index] = now
        self._n_tokens[index] += 1
        self._context.generated_tokens += 1
        self._context.accepted_tokens += drafted
