"""Runs requests for the pooled hidden states of texts: submits one sequence per text, and gathers their results.

Texts wait here, and not in the engine's queue, until those before them are done: a request may have thousands.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import Final

from lucevisor.api.contexts import ModelContext, RequestContext
from lucevisor.api.errors import bad_parameter, from_request_error, from_submit_error, unavailable
from lucevisor.api.generation import engine_of
from lucevisor.api.metrics import ModelMetrics
from lucevisor.api.parameters import check_length, check_token_ids
from lucevisor.api.prepared import EmbeddingOptions
from lucevisor.engine.request import FinishedEvent, GenerationRequest, RequestHandle, SubmitError
from lucevisor.protocol.steps import SamplingParams

MAX_TEXTS: Final = 2048
"""Texts of one request, as in OpenAI's API."""


def check_count(n_texts: int, param: str) -> None:
    if not 1 <= n_texts <= MAX_TEXTS:
        raise bad_parameter(param, f"has {n_texts} texts; send 1 to {MAX_TEXTS}")


def text_ids(text: str, param: str, ctx: ModelContext, *, max_tokens: int | None = None) -> list[int]:
    """Return the ids of a text to pool, cut to `max_tokens` (-1: those of the context; None: not at all); raises
    ApiError."""
    if max_tokens is None:
        check_length(text, param, ctx)
    elif max_tokens < 0 or 0 < ctx.max_context < max_tokens:
        max_tokens = ctx.max_context or None  # not known before the model is loaded
    return check_text(ctx.tokenizer.encode_text(text, max_tokens), param, ctx)


def check_text(ids: list[int], param: str, ctx: ModelContext) -> list[int]:
    """Check the ids of a text to pool; raises ApiError naming `param`."""
    if not ids:
        raise bad_parameter(param, "is empty; send at least one token")
    if 0 < ctx.max_context < len(ids):
        raise bad_parameter(
            param,
            f"the text has {len(ids)} tokens, and {ctx.max_context} fit; shorten it, or raise engine.max_context if "
            "the model has a longer context",
            "context_length_exceeded",
        )
    check_token_ids(ids, param, ctx)
    return ids


async def pool_texts(
    ctx: ModelContext, context: RequestContext, metrics: ModelMetrics, texts: Sequence[Sequence[int]], param: str
) -> list[array[float]]:
    """Return the pooled hidden state of each text.  Raises ApiError when one is refused or fails: then none is left."""
    engine, retry_s = engine_of(ctx), ctx.retry_after_s()
    handles: list[RequestHandle] = []
    context.handles = handles
    prefix, waiting = f"pool-{secrets.token_hex(12)}", iter(enumerate(texts))
    found: list[array[float]] = [array("f")] * len(texts)

    async def work() -> None:
        for index, ids in waiting:
            request = GenerationRequest(
                request_id=f"{prefix}-{index}",
                prompt=ids,
                max_tokens=1,
                sampling=SamplingParams(),
                client_id=context.caller.share,
                pooled=True,
            )
            with engine.submit(request) as handle:
                handles.append(handle)
                async for event in handle:
                    if isinstance(event, FinishedEvent):
                        found[index] = _result(event, context, metrics, retry_s)

    n_workers = min(len(texts), 2 * max(1, ctx.max_sequences))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(n_workers):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, SubmitError):
            raise from_submit_error(error, param, retry_s) from None
        raise error from None
    context.first_token_s = time.monotonic() - context.started_s
    return found


def _result(event: FinishedEvent, context: RequestContext, metrics: ModelMetrics, retry_s: int) -> array[float]:
    if event.error is not None:
        raise from_request_error(event.error, retry_s)
    if event.pooled is None:  # it was cancelled
        raise unavailable("the request was cancelled; try again later", retry_s, "shutting_down")
    metrics.pooled_texts.inc()
    context.prompt_tokens += event.usage.prompt_tokens
    context.queue_s = event.timings.queue_s
    metrics.queue.observe(event.timings.queue_s)
    return event.pooled


def embedding(pooled: array[float], options: EmbeddingOptions) -> array[float]:
    """Return an embedding: the first numbers of what a text was pooled to, at length 1."""
    part = pooled[: options.dimensions]
    if not options.normalize:
        return part
    length = math.hypot(*part) or 1.0
    return array("f", [x / length for x in part])
