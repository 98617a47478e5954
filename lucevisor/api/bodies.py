"""Reads and prepares request bodies: short ones on the event loop, long ones in the preprocessing workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
from aiohttp import web

from lucevisor.api.access import check_content_type
from lucevisor.api.app_state import BUFFERED_BODIES, MODELS, SERVER, BufferedBodies, context_of, yield_to_loop
from lucevisor.api.constraint import compiled, constrains
from lucevisor.api.contexts import ApiSettings, BodyParser, ModelContext, ParsedBody, ServedModels
from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.images import has_images
from lucevisor.api.parameters import check_generates, searches_vocabulary
from lucevisor.api.prepared import ModelLoadRequest, PreparedRequest
from lucevisor.api.schemas import decode_object
from lucevisor.compression.compressor import Compressor
from lucevisor.engine.request import PromptImage
from lucevisor.errors import LucevisorError
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.protocol.steps import ImageSpan

INLINE_BYTES: Final = 4 * 1024
"""Bodies up to this size are processed on the event loop: at most 2 ms of template and tokens."""

AddToBody = Callable[[list[bytes]], Awaitable[int]]
"""Adds to the parts of a body; returns how many bytes."""


async def prepare_request(
    request: web.Request, parser: BodyParser, add_to_body: AddToBody | None = None
) -> PreparedRequest | ModelLoadRequest | bytes:
    """Return the request prepared from the body, or the response to it; raises ApiError. Afterwards the model of the
    request's context is the one that the body names. `add_to_body` may add to the parts of the body before they are
    decoded."""
    models, bodies = request.app[MODELS], request.app[BUFFERED_BODIES]
    body: list[bytes] = []
    try:
        check_content_type(request)
        await read_body(request, body)
        if add_to_body is not None:
            bodies.n_bytes += await add_to_body(body)
        prepared, name = await _parse(parser, body, models, bodies)
    finally:
        bodies.n_bytes -= sum(map(len, body))
    ctx = models[name]
    context_of(request).model = name
    if not isinstance(prepared, PreparedRequest):
        return prepared
    if prepared.options.pooled:
        return await _with_image_rows(prepared, ctx) if prepared.images else prepared
    check_generates(ctx)
    if prepared.options.grammar is not None:
        # Off the loop: the worker has found that it compiles within its bounds.
        prepared = replace(prepared, grammar=await asyncio.to_thread(compiled, prepared.options.grammar, ctx))
    if prepared.images:
        return await _with_image_rows(prepared, ctx)
    if ctx.compressor is None or prepared.options.prompt_logprobs:  # which are of all tokens of the prompt
        return prepared
    if max(map(len, prepared.prompts), default=0) >= ctx.compressor.settings.threshold:
        await _load(ctx)  # its scoring model comes with it
    return await _compressed(prepared, ctx.compressor)


async def _load(ctx: ModelContext) -> None:
    """Wait until the model is loaded; raises ApiError."""
    try:
        if ctx.control is not None:
            await ctx.control.load()
    except LucevisorError as error:
        raise unavailable(str(error), ctx.retry_after_s(), "model_not_loaded") from None


async def _with_image_rows(prepared: PreparedRequest, ctx: ModelContext) -> PreparedRequest:
    """Return the request with the embedding rows of its images, all of which stay in the prompt."""
    found = []
    await _load(ctx)  # its encoder comes with it
    try:
        for start, image in prepared.images:
            rows = await ctx.encode_image(image)
            found.append(PromptImage(ImageSpan(start, *image.grid), rows, len(rows) // len(image.ids)))
    except LucevisorError as error:
        raise unavailable(str(error), ctx.retry_after_s()) from None
    return replace(prepared, images=(), embedded=tuple(found))


async def _compressed(prepared: PreparedRequest, compressor: Compressor) -> PreparedRequest:
    """Return the request with its prompts shortened by PFlash, where they are long enough."""
    options = prepared.options
    roles = options.roles or [[] for _ in prepared.prompts]
    found = [
        await compressor.compress(*prompt) for prompt in zip(prepared.prompts, options.turn_ends, roles, strict=True)
    ]
    options = msgspec.structs.replace(options, turn_ends=[prompt.turn_ends for prompt in found])
    prompts: list[Sequence[int]] = [
        TokenBuffer(prompt.ids) if prompt.outcome == "compressed" else prompt.ids for prompt in found
    ]
    return replace(prepared, options=options, prompts=prompts, compressed=tuple(found))


async def _parse(parser: BodyParser, body: list[bytes], models: ServedModels, bodies: BufferedBodies) -> ParsedBody:
    """Parse a whole body, in a worker if it is long or has a grammar or images, which could block the process."""
    preprocessor = models.server.preprocessor
    if sum(map(len, body)) <= INLINE_BYTES:
        await yield_to_loop(bodies.parse_limit)
        fields = decode_object(b"".join(body))
        in_worker = constrains(fields) or searches_vocabulary(fields) or has_images(fields)
        if preprocessor is None or not in_worker:
            ctx = models.of_body(fields)
            return parser(fields, ctx), ctx.model.name
    if preprocessor is None:
        raise too_large(INLINE_BYTES)
    return await preprocessor.parse(parser, body, models)


async def read_body(request: web.Request, body: list[bytes]) -> None:
    """Append the parts of the body as they arrive, and count them in the bodies in memory; raises ApiError."""
    settings, bodies = request.app[SERVER].settings, request.app[BUFFERED_BODIES]
    limit_bytes = settings.max_body_bytes
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large(limit_bytes)
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit_bytes:
                    raise too_large(limit_bytes)
                if bodies.n_bytes + len(part) > settings.max_bodies_bytes:
                    raise _too_many(settings)
                bodies.n_bytes += len(part)
                body.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_timeout_s:g} s", code="request_timeout"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit_bytes) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes} bytes; send less", code="request_too_large")


def _too_many(settings: ApiSettings) -> ApiError:
    return ApiError(
        429,
        f"requests of {settings.max_bodies_bytes >> 20} MiB are being received; try again in a second",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def json_response(body: object, status: int = 200) -> web.Response:
    """Return a response with a JSON body; numbers that are not finite become null."""
    try:
        return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
    except UnicodeEncodeError:  # a path that is not UTF-8
        return web.json_response(body, status=status)
