"""Requests to a supervisor over HTTP, each over a connection of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

RULES = "\n".join(f"import module_{i}  # rule {i}" for i in range(60))


def post(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def tokens_of(url: str, text: str) -> list[int]:
    found: list[int] = post(f"{url}/tokenize", {"content": text})[1]["tokens"]
    return found


def complete(url: str, prompt: list[int]) -> tuple[list[int], int]:
    """Ids of 16 more tokens, and how many of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    _, answer = post(f"{url}/v1/completions", body)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(url: str, system: str, turns: Sequence[str]) -> tuple[str, int, int]:
    """The next answer of a conversation, tokens of its prompt, and how many of them were cached."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "enable_thinking": False}
    code, answer = post(f"{url}/v1/chat/completions", body)
    assert code == 200, answer
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
