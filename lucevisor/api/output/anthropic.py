"""The JSON of Anthropic's Messages API: one message, or the events of a stream.

Pure.  Invariant: a message that is not streamed equals what a client assembles from the events: both are made here,
from the same deltas.  Content blocks follow each other; only the last may be open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from lucevisor.api.errors import ApiError
from lucevisor.api.output.processor import ChoiceDelta, FinishReason
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.text.output_parser import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta

SIGNATURE: Final = "unsigned"
"""Signature of thinking blocks: clients require one and send it back; here it is not checked."""

_Event = dict[str, object]
_FIELDS: Final = {"text": "text", "thinking": "thinking", "tool_use": "input"}
"""What the deltas of a block add up to."""
_STOP_REASONS: Final[dict[FinishReason, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(slots=True, kw_only=True)
class MessageFormatter:
    """One response.  `n_prompt`: tokens of the prompt; `max_tokens`: as requested; `show_reasoning`: send its text."""

    response_id: str
    model: str
    n_prompt: int
    max_tokens: int
    show_reasoning: bool
    _open: str | None = None  # type of the open block
    _n_blocks: int = 0
    _finish_reason: FinishReason | None = None
    _stop: str | None = None

    style: ClassVar[StreamStyle] = "named"

    def start(self, index: int) -> Sequence[_Event]:
        """Return the events before the first block."""
        usage = _usage(UsageTotals(prompt=self.n_prompt))
        return [{"type": "message_start", "message": self._message([], None, usage)}, {"type": "ping"}]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[_Event]:
        """Return the events of a delta."""
        if delta.finish_reason is not None:
            self._finish_reason, self._stop = delta.finish_reason, delta.stop
        return [] if delta.event is None else self._block_events(delta.event)

    def end(self, totals: UsageTotals) -> Sequence[_Event]:
        """Return the events after the last delta."""
        reason = {"stop_reason": self._stop_reason(totals), "stop_sequence": self._stop}
        return [
            *self._close(),
            {"type": "message_delta", "delta": reason, "usage": _usage(totals)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> Sequence[_Event]:
        """Return the error event."""
        return [error.anthropic_body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole message."""
        events = [event for delta in choices[0] for event in self.delta(0, delta)]
        blocks = _collected([*events, *self._close()])
        return self._message(blocks, self._stop_reason(totals), _usage(totals))

    def _message(self, content: Sequence[object], stop_reason: str | None, usage: object) -> _Event:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop,
            "usage": usage,
        }

    def _stop_reason(self, totals: UsageTotals) -> str:
        if self._stop is not None:
            return "stop_sequence"
        if self._finish_reason == "length" and totals.generated < self.max_tokens:
            return "model_context_window_exceeded"
        return _STOP_REASONS[self._finish_reason or "stop"]

    def _block_events(self, event: OutputEvent) -> list[_Event]:
        match event:
            case ContentDelta(text):
                events = self._continue("text", {"type": "text", "text": ""})
                return [*events, self._block_delta({"type": "text_delta", "text": text})]
            case ReasoningDelta(text):
                events = self._continue("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                if self.show_reasoning:
                    events.append(self._block_delta({"type": "thinking_delta", "thinking": text}))
                return events
            case ToolCallDelta():
                return self._tool_use(event)

    def _tool_use(self, call: ToolCallDelta) -> list[_Event]:
        # Globally unique, as the response id is; clients send it back with the tool's result.
        call_id = f"toolu_{self.response_id.rpartition('_')[2]}{call.index:02d}"
        return [
            *self._close(),
            *self._continue("tool_use", {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}),
            self._block_delta({"type": "input_json_delta", "partial_json": call.arguments}),
            *self._close(),
        ]

    def _continue(self, kind: str, block: _Event) -> list[_Event]:
        """Return the events that open a block, unless one of its type is open."""
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        self._n_blocks += 1
        return [*closed, {"type": "content_block_start", "index": self._n_blocks - 1, "content_block": block}]

    def _close(self) -> list[_Event]:
        """Return the events that close the open block, if one is."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        signed = [self._block_delta({"type": "signature_delta", "signature": SIGNATURE})] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": self._n_blocks - 1}]

    def _block_delta(self, delta: _Event) -> _Event:
        return {"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta}


def _collected(events: Iterable[_Event]) -> list[_Event]:
    """Return the content blocks that events add up to."""
    blocks: list[_Event] = []
    parts: list[str] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": dict(block)}:
                blocks.append(dict(block))
                parts = []
            case {"delta": {"type": "signature_delta", "signature": signature}}:
                blocks[-1]["signature"] = signature
            case {"delta": {"text": str(part)} | {"thinking": str(part)} | {"partial_json": str(part)}}:
                parts.append(part)
            case {"type": "content_block_stop"}:
                text = "".join(parts)
                kind = str(blocks[-1]["type"])
                blocks[-1][_FIELDS[kind]] = msgspec.Raw(text.encode()) if kind == "tool_use" else text
    return blocks


def _usage(totals: UsageTotals) -> _Event:
    """Return Anthropic's `usage`, where `input_tokens` leaves out what the prefix cache held."""
    return {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.generated,
        "output_tokens_details": {"thinking_tokens": totals.reasoning},
        **totals.extension(),
    }
