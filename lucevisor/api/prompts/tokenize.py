"""The bodies of /tokenize and /detokenize, and their responses.

Knows the tokenizer only; the model does not run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lucevisor.api.errors import bad_parameter
from lucevisor.api.output.logprobs import token_text
from lucevisor.api.ports import Ports
from lucevisor.api.prompts.checks import check_ids, check_model
from lucevisor.api.prompts.decoding import to_record
from lucevisor.api.prompts.schemas import (
    MAX_ANSWER_BYTES,
    MAX_TEXT_CHARS,
    MAX_TEXT_TOKENS,
    DetokenizeBody,
    TokenizeBody,
)


def read_tokenize(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the response to a decoded body; raises ApiError naming the parameter at fault."""
    body = to_record(TokenizeBody, fields)
    check_model(body.model, ports)
    if body.content is not None and body.prompt is not None:
        raise bad_parameter("prompt", "is an alias of content; send one of them")
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
    """Return the response to a decoded body; raises ApiError naming the parameter at fault."""
    body = to_record(DetokenizeBody, fields)
    check_model(body.model, ports)
    if len(body.tokens) > MAX_TEXT_TOKENS:
        raise bad_parameter("tokens", f"has {len(body.tokens)} ids, more than {MAX_TEXT_TOKENS}; send it in parts")
    check_ids(body.tokens, "tokens", ports)
    return _bounded({"content": ports.tokenizer.decode(body.tokens, skip_special=False)}, "tokens")


def _bounded(answer: object, param: str) -> bytes:
    body = msgspec.json.encode(answer)
    if len(body) > MAX_ANSWER_BYTES:
        raise bad_parameter(
            param, f"the response has {len(body)} bytes, more than {MAX_ANSWER_BYTES}; send it in parts"
        )
    return body
