"""POST /tokenize, /detokenize and /apply-template, as in llama.cpp's server."""

from __future__ import annotations

import asyncio

from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.output.sse import ClientGone
from lucevisor.api.prompts.chat import read_apply_template
from lucevisor.api.prompts.prepare import prepare
from lucevisor.api.prompts.tokenize import read_detokenize, read_tokenize


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a text."""
    return await _send(request, await prepare(request, read_tokenize))


async def apply_template(request: web.Request) -> web.StreamResponse:
    """Return the prompt that a chat request would be answered for."""
    return await _send(request, await prepare(request, read_apply_template))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids, control tokens included."""
    return await _send(request, await prepare(request, read_detokenize))


async def _send(request: web.Request, parts: object) -> web.StreamResponse:
    """Send a response in parts, so that a long one does not block the loop."""
    assert isinstance(parts, list)
    if len(parts) == 1:
        return web.Response(body=parts[0], content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, parts))
    try:
        async with asyncio.timeout(request.app[PORTS].settings.write_timeout_s):
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            await response.write_eof()
    except (TimeoutError, ConnectionError) as error:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone(str(error) or "the client read too slowly") from None
    return response
