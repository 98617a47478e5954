"""Log-probabilities in the two formats of OpenAI's API.

Pure.  Invariant: every number is finite JSON (an impossible token is -9999), and a token whose bytes are not valid
UTF-8 is written as `bytes:\\xe2\\x80`, so that no two tokens look the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from lucevisor.api.output.processor import TokenRecord
from lucevisor.text.tokenizer import Tokenizer

LEAST = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token, or its escaped bytes if they are not UTF-8."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenRecord]) -> dict[str, object]:
    """Return a chat choice's `logprobs`."""

    def entry(token_id: int, logprob: float | None) -> dict[str, object]:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": raw}

    content = [
        {**entry(t.event.token, t.event.logprob), "top_logprobs": [entry(i, value) for i, value in t.event.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenRecord]) -> dict[str, object]:
    """Return a plain completion's `logprobs`; offsets count from the start of the generated text."""
    tops = []
    for t in tokens:
        top = {token_text(tokenizer, i): _finite(value) for i, value in t.event.top}
        top.setdefault(
            token_text(tokenizer, t.event.token), _finite(t.event.logprob)
        )  # like OpenAI, include the chosen token
        tops.append(top)
    return {
        "tokens": [token_text(tokenizer, t.event.token) for t in tokens],
        "token_logprobs": [_finite(t.event.logprob) for t in tokens],
        "top_logprobs": tops,
        "text_offset": [t.offset for t in tokens],
    }


def encode_items(items: object) -> list[msgspec.Raw]:
    """Return a list with each item encoded by itself, so that the encoder holds the GIL for short times only."""
    assert isinstance(items, list)
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None or not LEAST < logprob < math.inf else logprob
