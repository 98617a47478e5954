"""POST /tokenize and /detokenize, in the shape llama.cpp's server gave them.

Knows the tokenizer only; the model does not run.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from lucevisor.api.bodies import MAX_ANSWER_BYTES, MAX_TEXT_CHARS, MAX_TEXT_TOKENS, DetokenizeBody, TokenizeBody
from lucevisor.api.context import PORTS
from lucevisor.api.decoding import to_record
from lucevisor.api.errors import bad_parameter
from lucevisor.api.logprobs import token_text
from lucevisor.api.planning import check_model
from lucevisor.api.ports import Ports
from lucevisor.api.receive import receive
from lucevisor.api.sse import ClientGone


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a text."""
    return await _send(request, await receive(request, "tokenize", read_tokenize))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids, control tokens included."""
    return await _send(request, await receive(request, "detokenize", read_detokenize))


def read_tokenize(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the answer to a decoded body; ApiError naming the parameter that cannot be met."""
    body = to_record(TokenizeBody, fields)
    check_model(body.model, ports)
    if body.content is not None and body.prompt is not None:
        raise bad_parameter("prompt", "is another name of content; send one of them")
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise bad_parameter("content", "is missing; it is required", "missing_required_parameter")
    param = "content" if body.prompt is None else "prompt"
    if len(text) > MAX_TEXT_CHARS:
        raise bad_parameter(param, f"has {len(text)} characters, more than {MAX_TEXT_CHARS}; send it in parts")
    tokenizer = ports.tokenizer
    ids = tokenizer.encode(text, parse_special=body.parse_special)
    if body.add_special and tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    tokens: list[object] = list(ids)
    if body.with_pieces:
        tokens = [{"id": i, "piece": token_text(tokenizer, i)} for i in ids]
    return _bounded({"tokens": tokens, "count": len(ids)}, param)


def read_detokenize(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the answer to a decoded body; ApiError naming the parameter that cannot be met."""
    body = to_record(DetokenizeBody, fields)
    check_model(body.model, ports)
    if len(body.tokens) > MAX_TEXT_TOKENS:
        raise bad_parameter("tokens", f"has {len(body.tokens)} ids, more than {MAX_TEXT_TOKENS}; send it in parts")
    n_vocab = ports.tokenizer.n_vocab
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"tokens[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
    return _bounded({"content": ports.tokenizer.decode(body.tokens, skip_special=False)}, "tokens")


def _bounded(answer: object, param: str) -> bytes:
    body = msgspec.json.encode(answer)
    if len(body) > MAX_ANSWER_BYTES:
        raise bad_parameter(param, f"the answer has {len(body)} bytes, more than {MAX_ANSWER_BYTES}; send it in parts")
    return body


async def _send(request: web.Request, parts: object) -> web.StreamResponse:
    """Send an answer part by part: a long one is no long write."""
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
        raise ClientGone(str(error) or "the client took too long") from None
    return response
