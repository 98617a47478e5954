"""Requests as the API sees them: states, events, errors, and the handle that iterates over the events up to the
FinishedEvent, which always comes."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, Literal

import msgspec

from lucevisor.engine.constraint import Constraint
from lucevisor.errors import LucevisorError
from lucevisor.protocol.steps import ImageSpan, SamplingParams

Reason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal[
    "shard_lost", "protocol_error", "shutting_down", "constraint_failed", "host_memory_full", "invalid_logits"
]


class RequestState(Enum):
    """State of a request."""

    QUEUED = "queued"  # holds nothing in the shards
    PREFILL = "prefill"  # has pages; its prompt is not computed yet
    DECODE = "decode"  # has its first token
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS: Final = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED})

TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    # QUEUED -> FINISHED: preempted while its last token was in flight
    RequestState.QUEUED: frozenset({RequestState.PREFILL}) | _ENDS,
    # -> QUEUED: preempted, or its daemon was lost; -> FINISHED: its pooled hidden state is there
    RequestState.PREFILL: frozenset({RequestState.DECODE, RequestState.QUEUED}) | _ENDS,
    RequestState.DECODE: frozenset({RequestState.QUEUED}) | _ENDS,
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: its place, and its embedding rows, ``row_bytes`` each."""

    span: ImageSpan
    rows: memoryview
    row_bytes: int

    def rows_between(self, start: int, stop: int) -> memoryview:
        """Return the rows of its tokens among positions ``[start, stop)``."""
        first, last = (min(max(at, self.span.start), self.span.stop) - self.span.start for at in (start, stop))
        return self.rows[first * self.row_bytes : last * self.row_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Continue ``prompt`` by at most ``max_tokens`` tokens, until one of ``stop_ids``.

    Give long prompts as a :class:`TokenBuffer`: anything else is packed on the event loop.  It has the LoRA adapter,
    too.  ``request_id`` is unique among unfinished requests.  The engine lowers ``max_tokens`` to what context and
    pages allow.  ``turn_boundaries``: positions of the prompt where a chat turn ends, ascending; prefix slots end
    there.  ``client_id``: an opaque id of its API key or address; clients get fair shares.  ``constraint``: what the
    output must be; of this request alone.  ``prompt_logprobs``: the FinishedEvent has the log-probabilities of the
    prompt's tokens; ``prompt_logprobs_from``: those behind that position alone, so a prefix up to there may be cached.
    ``pooled``: nothing is generated; the FinishedEvent has the prompt's pooled hidden state.  ``images``: ascending.
    ``publishes``: others may begin with what it computed; ``branches``: some will soon, however short it is.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    turn_boundaries: tuple[int, ...] = ()
    client_id: str = ""
    constraint: Constraint | None = None
    prompt_logprobs: bool = False
    pooled: bool = False
    images: tuple[PromptImage, ...] = ()
    publishes: bool = True
    branches: bool = False
    prompt_logprobs_from: int = 0

    @property
    def image_spans(self) -> tuple[ImageSpan, ...]:
        return tuple([image.span for image in self.images])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token of the prompt, and the best (id, log-probability) pairs at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: of the prompt, of it cached, and generated (the stop id included); ``accepted_tokens``: of
    the generated ones, drafts; ``draft_tokens``: drafts that were verified."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from submit to the first step, from there to the first token, from there to the end."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class RequestError:
    """Reason for a request's failure.  ``message``: the fault, its place and a remedy."""

    code: ErrorCode
    message: str


def invalid_logits(stage: str) -> RequestError:
    """Return the error of a request for which ``stage`` computed no numbers."""
    remedy = "check its device and the model's file; restart its group if it happens with other prompts, too"
    return RequestError("invalid_logits", f"{stage} computed numbers that are NaN or infinite; {remedy}")


def no_host_memory(what: str) -> RequestError:
    """Return the error of a request whose pages find no room in host memory."""
    remedy = "send it again when fewer long requests run, or raise kvflash.host"
    return RequestError("host_memory_full", f"host memory for pages of KV Flash is full: {what}; {remedy}")


class TokenEvent(msgspec.Struct, frozen=True):  # quicker to make than a dataclass: there is one for each token
    """A generated token; its log-probability and the best (id, log-probability) pairs if requested.

    ``drafted``: it was an accepted draft.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The end of a request. ``error`` is set if and only if ``reason`` is "error". A stop id ends a request without a
    TokenEvent; it is named here and counted in the usage."""

    reason: Reason
    usage: Usage
    timings: Timings
    error: RequestError | None = None
    stop_id: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of all tokens of the prompt but the first
    pooled: array[float] | None = None  # float32


Event = TokenEvent | FinishedEvent


class SubmitError(LucevisorError):
    """A request was refused at submit.  ``code`` is stable, for programs."""

    code = "refused"

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class InvalidRequest(SubmitError):
    """A value of the request is invalid."""

    code = "invalid_request"

    def __init__(self, parameter: str, message: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: {message}")


class ContextOverflow(SubmitError):
    """The prompt leaves no room for an answer.  ``limit_tokens``: the longest sequence that fits."""

    code = "context_length_exceeded"

    def __init__(
        self,
        prompt_tokens: int,
        max_context: int,
        max_paged_tokens: int,
        key: str = "engine.pages",
        *,
        pooled: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context
        self.limit_tokens = min(max_context, max_paged_tokens)
        if max_paged_tokens < max_context:
            cause = f"the page pool holds {max_paged_tokens} tokens (max_context is {max_context})"
            remedy = f"or give the pool more memory ({key})"
        else:
            cause = f"max_context is {max_context}"
            remedy = "or raise engine.max_context"
        kind, more, n_most = "prompt", " and one more must fit", self.limit_tokens - 1
        if pooled:
            kind, more, n_most = "text", "", self.limit_tokens
        super().__init__(
            f"the {kind} has {prompt_tokens} tokens{more}, but {cause}; "
            f"shorten the {kind} to at most {n_most} tokens, {remedy}"
        )


class QueueFull(SubmitError):
    """A client's share of the waiting queue is full (HTTP 429). ``retry_after_s``: when its requests are likely to have
    started."""

    code = "queue_full"

    def __init__(self, n_waiting: int, n_clients: int, max_queue: int, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        among = f", shared by {n_clients} clients" if n_clients > 1 else ""
        super().__init__(
            f"{n_waiting} of your requests are waiting, the most that may (server.max_queue is {max_queue}{among}); "
            f"try again in {retry_after_s} s"
        )


class NotReady(SubmitError):
    """No request is accepted: there is no pipeline, or the engine drains or was closed."""

    code = "not_ready"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the model does not accept requests now: {reason}")


class RequestHandle:
    """Events of one request, for one reader. As a context manager it cancels what still runs when the block is left."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.finished: FinishedEvent | None = None  # set by the engine before the reader gets there
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for an event
        self._read_all = False

    def push(self, event: Event) -> None:
        """Add an event; for the engine."""
        if type(event) is FinishedEvent:
            self.finished = event
        self._events.append(event)
        if (reader := self._reader) is not None and not reader.done():
            reader.set_result(None)

    def move_to(self, cancel: Callable[[str], None]) -> None:
        """Let ``cancel`` cancel it from now on: another engine has its request."""
        self._cancel = cancel

    def cancel(self) -> None:
        """Cancel (abort) the request and free its pages; a FinishedEvent follows the events already queued."""
        if self.finished is None:
            self._cancel(self.request_id)

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Event:
        if self._read_all:
            raise StopAsyncIteration
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        event = self._events.popleft()
        self._read_all = event is self.finished
        return event

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
