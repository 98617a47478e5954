"""POST /tokenize and /detokenize, in the shape llama.cpp's server gave them.

Knows the tokenizer only; the model does not run.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from lucevisor.api.bodies import MAX_TEXT_CHARS, DetokenizeBody, TokenizeBody
from lucevisor.api.decoding import to_record
from lucevisor.api.errors import bad_parameter
from lucevisor.api.logprobs import token_text
from lucevisor.api.planning import check_model
from lucevisor.api.ports import Ports
from lucevisor.api.receive import receive


async def tokenize(request: web.Request) -> web.Response:
    """Return the token ids of a text."""
    return _json(await receive(request, "tokenize", read_tokenize))


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of token ids, control tokens included."""
    return _json(await receive(request, "detokenize", read_detokenize))


def read_tokenize(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the answer to a decoded body; ApiError naming the parameter that cannot be met."""
    body = to_record(TokenizeBody, fields)
    check_model(body.model, ports)
    if body.content is not None and body.prompt is not None:
        raise bad_parameter("prompt", "is another name of content; send one of them")
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise bad_parameter("content", "is missing; it is required", "missing_required_parameter")
    if len(text) > MAX_TEXT_CHARS:
        param = "content" if body.prompt is None else "prompt"
        raise bad_parameter(param, f"has {len(text)} characters, more than {MAX_TEXT_CHARS}; send it in parts")
    tokenizer = ports.tokenizer
    ids = tokenizer.encode(text, parse_special=body.parse_special)
    if body.add_special and tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    tokens: list[object] = list(ids)
    if body.with_pieces:
        tokens = [{"id": i, "piece": token_text(tokenizer, i)} for i in ids]
    return msgspec.json.encode({"tokens": tokens, "count": len(ids)})


def read_detokenize(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the answer to a decoded body; ApiError naming the parameter that cannot be met."""
    body = to_record(DetokenizeBody, fields)
    check_model(body.model, ports)
    n_vocab = ports.tokenizer.n_vocab
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"tokens[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
    return msgspec.json.encode({"content": ports.tokenizer.decode(body.tokens, skip_special=False)})


def _json(body: object) -> web.Response:
    assert isinstance(body, bytes)
    return web.Response(body=body, content_type="application/json")
