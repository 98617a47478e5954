"""Log-probabilities in the two formats of OpenAI's API.

Pure.  Invariant: every number is finite JSON (an impossible token is -9999), and a token whose bytes are not valid
UTF-8 is written as `bytes:\\xe2\\x80`, so that no two tokens look the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lucevisor.api.output.processor import TokenRecord
from lucevisor.engine.request import TokenEvent, TokenScore
from lucevisor.text.detokenizer import Detokenizer
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
    """Return a chat choice's `logprobs`: those of its content."""

    def entry(token_id: int, logprob: float | None) -> dict[str, object]:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": raw}

    content = [
        {**entry(t.event.token, t.event.logprob), "top_logprobs": [entry(i, value) for i, value in t.event.top]}
        for t in tokens
        if t.content
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenRecord]) -> dict[str, list[Any]]:
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


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    scores: Sequence[TokenScore],
    tokens: Sequence[TokenRecord],
    n_echo: int,
) -> dict[str, list[Any]]:
    """Return `logprobs` of an echoed prompt and its completion; the first token has none, as nothing is before it.

    `n_echo`: characters of the echo; offsets count from its start.
    """
    records, text, at = list[TokenRecord](), Detokenizer(tokenizer), 0
    for token, score in zip(prompt, [TokenScore(0.0), *scores], strict=True):
        records.append(TokenRecord(TokenEvent(token, score.logprob, score.top), at))
        at += len(text.push(token))
    told = completion_logprobs(tokenizer, records)
    of_answer = completion_logprobs(tokenizer, tokens)
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    of_answer["text_offset"] = [n_echo + offset for offset in of_answer["text_offset"]]
    return {name: told[name] + of_answer[name] for name in told}


def encode_items(items: object) -> list[msgspec.Raw]:
    """Return a list with each item encoded by itself, so that the encoder holds the GIL for short times only."""
    assert isinstance(items, list)
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None or not LEAST < logprob < math.inf else logprob
