"""A request for generation, read and checked, in plain values that can cross from one process to another.

Types only.  Invariant: all that depends on the length of the input (JSON, checks, chat template, tokens) is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lucevisor.protocol.steps import Sampling

BodyKind = Literal["chat", "completion", "tokenize", "detokenize"]
"""Which reader a body is for."""


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions have in common, then what only one of them has.

    ``max_tokens`` None: all the room that the context leaves.  ``turn_ends``: of each prompt.  ``echoes``: the text of
    each prompt when it is to be repeated, else empty.
    """

    sampling: Sampling
    turn_ends: list[list[int]]
    max_tokens: int | None = None
    n: int = 1
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    logprobs: bool = False
    tools: list[dict[str, Any]] = []
    reasoning_open: bool = False
    one_tool_call: bool = False
    echoes: tuple[str, ...] = ()


EncodedResponse = list[bytes]
"""The body of an answer that needs no model, in parts."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with the token ids of its prompts."""

    options: GenerationOptions
    prompts: list[Sequence[int]]
