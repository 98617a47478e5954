"""The record of a finished request for tracing: its times, its sizes and how it ended.

Types only; `lucevisor.app.traces` makes OpenTelemetry spans of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request that is over.  Times in seconds: `started_s` and `ended_s` on the monotonic clock, `queue_s` and
    `first_token_s` from the start; `first_token_s` is None if it generated nothing.

    `headers` carry the caller's trace context (traceparent, tracestate).
    """

    method: str
    path: str
    status: int
    headers: Mapping[str, str]
    request_id: str
    key: str
    model: str
    started_s: float
    ended_s: float
    generates: bool
    queue_s: float
    first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    accepted_tokens: int
    error: str


Trace = Callable[[RequestTrace], str]
"""Takes a request; returns its trace id in hexadecimal digits, empty if it is not traced."""


def no_trace(_: RequestTrace) -> str:
    """Trace nothing."""
    return ""
