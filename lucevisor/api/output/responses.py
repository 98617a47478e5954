"""The JSON of OpenAI's Responses API: one response, or the events of a stream.

Pure.  Invariant: a response that is not streamed equals the one in the last event of a stream: both are made here, from
the same deltas.  Output items follow each other; only the last may be open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

import msgspec

from lucevisor.api.carried_reasoning import encode_reasoning
from lucevisor.api.errors import ApiError
from lucevisor.api.output.logprobs import chat_logprobs
from lucevisor.api.output.processor import ChoiceDelta, FinishReason, TokenRecord
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.api.prepared import ResponseOptions, custom_input
from lucevisor.text.output_parser import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta
from lucevisor.text.tokenizer import Tokenizer

_Event = dict[str, object]
_ItemStatus = Literal["in_progress", "completed", "incomplete"]
_PREFIXES: Final = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CALLS: Final = ("function_call", "custom_tool_call")


@dataclass(slots=True)
class _Item:
    """An output item; `text` adds up to its text, reasoning or arguments."""

    kind: str
    item_id: str
    text: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    call: ToolCallDelta | None = None


@dataclass(slots=True, kw_only=True)
class ResponsesFormatter:
    """One response.  `keep` gets the finished response and its output items before they are sent."""

    response_id: str
    created_s: int
    model: str
    tokenizer: Tokenizer
    logprobs: bool
    options: ResponseOptions
    keep: Callable[[_Event, Sequence[_Event]], None]
    clock: Callable[[], float]
    _n_events: int = 0
    _open: _Item | None = None
    _output: list[_Event] = field(default_factory=list)
    _finish_reason: FinishReason | None = None

    style: ClassVar[StreamStyle] = "named"

    def start(self, index: int) -> Sequence[_Event]:
        """Return the events before the first item."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[_Event]:
        """Return the events of a delta."""
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        return [] if delta.event is None else self._item_events(delta.event, delta.tokens)

    def end(self, totals: UsageTotals) -> Sequence[_Event]:
        """Return the events after the last delta."""
        cut = self._finish_reason == "length"
        closing = self._close("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        response = self._response(status, usage=_usage(totals))
        self.keep(response, self._output)
        return [*closing, self._event(f"response.{status}", response=response)]

    def failure(self, error: ApiError) -> Sequence[_Event]:
        """Return the event that ends a stream that fails."""
        told = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._response("failed", error=told))]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole response."""
        for delta in choices[0]:
            self.delta(0, delta)
        return self.end(totals)[-1]["response"]

    def _response(self, status: str, *, usage: object = None, error: object = None) -> _Event:
        echo = msgspec.json.decode(self.options.echo, type=dict[str, msgspec.Raw])
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": int(self.clock()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(self._output),
            "usage": usage,
            **echo,
        }

    def _event(self, kind: str, **fields: object) -> _Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _item_events(self, event: OutputEvent, tokens: Sequence[TokenRecord]) -> list[_Event]:
        match event:
            case ContentDelta(text):
                events = self._continue("message")
                logprobs = self._logprobs(tokens)
                return [*events, self._add_text(text, "response.output_text.delta", logprobs=logprobs)]
            case ReasoningDelta(text):
                events = self._continue("reasoning")
                part = "reasoning_summary_text" if self.options.summary else "reasoning_text"
                return [*events, self._add_text(text, f"response.{part}.delta")]
            case ToolCallDelta():
                custom = event.name in self.options.custom
                kind, part = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
                events = [*self._close("completed"), *self._continue(kind, event)]
                text = custom_input(event.arguments) if custom else event.arguments
                events.append(self._add_text(text, f"response.{kind}_{part}.delta"))
                return [*events, *self._close("completed")]

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[object]:
        content = chat_logprobs(self.tokenizer, tokens)["content"] if self.logprobs else []
        assert isinstance(content, list)
        return content

    def _continue(self, kind: str, call: ToolCallDelta | None = None) -> list[_Event]:
        """Return the events that open an item, unless one of its kind is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        closed = self._close("completed")
        unique = f"{self.response_id.rpartition('_')[2]}{len(self._output):02d}"
        item = self._open = _Item(kind, _PREFIXES[kind] + unique, call=call)
        index = len(self._output)
        events = [
            *closed,
            self._event("response.output_item.added", output_index=index, item=self._item_json(item, "in_progress")),
        ]
        if kind not in _CALLS:
            events.append(self._event(f"response.{self._part_name()}.added", **self._place(), part=self._part("")))
        return events

    def _add_text(self, text: str, event: str, logprobs: list[object] | None = None) -> _Event:
        assert self._open is not None
        self._open.text.append(text)
        more: _Event = {}
        if logprobs is not None:
            self._open.logprobs += logprobs
            more["logprobs"] = logprobs
        return self._event(event, **self._place(), delta=text, **more)

    def _close(self, status: _ItemStatus) -> list[_Event]:
        """Return the events that close the open item, if one is."""
        if (item := self._open) is None:
            return []
        text, place = "".join(item.text), self._place()
        if item.kind == "function_call":
            events = [self._event("response.function_call_arguments.done", **place, arguments=text)]
        elif item.kind == "custom_tool_call":
            events = [self._event("response.custom_tool_call_input.done", **place, input=text)]
        else:
            more = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = [
                self._event(f"response.{self._text_name()}.done", **place, text=text, **more),
                self._event(f"response.{self._part_name()}.done", **place, part=self._part(text)),
            ]
        done = self._item_json(item, status, text)
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=done))
        self._output.append(done)
        self._open = None
        return events

    def _place(self) -> _Event:
        assert self._open is not None
        place: _Event = {"item_id": self._open.item_id, "output_index": len(self._output)}
        if self._open.kind not in _CALLS:
            place["summary_index" if self._is_summary() else "content_index"] = 0
        return place

    def _is_summary(self) -> bool:
        return self._open is not None and self._open.kind == "reasoning" and self.options.summary

    def _part_name(self) -> str:
        return "reasoning_summary_part" if self._is_summary() else "content_part"

    def _text_name(self) -> str:
        if self._is_summary():
            return "reasoning_summary_text"
        return "reasoning_text" if self._open is not None and self._open.kind == "reasoning" else "output_text"

    def _part(self, text: str) -> _Event:
        """Return the only part of the open item."""
        assert self._open is not None
        if self._is_summary():
            return {"type": "summary_text", "text": text}
        if self._open.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._open.logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item_json(self, item: _Item, status: _ItemStatus, text: str | None = None) -> _Event:
        """Return the open item's JSON; `text`: None before its end."""
        head: _Event = {"id": item.item_id, "type": item.kind, "status": status}
        parts = [] if text is None else [self._part(text)]
        if item.kind == "message":
            return {**head, "role": "assistant", "content": parts}
        if item.kind == "reasoning":
            encrypted = encode_reasoning(text) if text is not None and self.options.encrypted else None
            summary, content = (parts, []) if self.options.summary else ([], parts)
            return {**head, "summary": summary, "content": content, "encrypted_content": encrypted}
        assert item.call is not None
        # Globally unique, as the response id is; clients send it back with the call's output.
        call_id = f"call_{item.item_id.removeprefix(_PREFIXES[item.kind])}"
        if item.kind == "custom_tool_call":
            return {**head, "call_id": call_id, "name": item.call.name, "input": text or ""}
        namespace = self.options.namespaces.get(item.call.name)
        named: _Event = {"name": item.call.name}
        if namespace is not None:
            named = {"name": item.call.name.removeprefix(f"{namespace}."), "namespace": namespace}
        return {**head, "call_id": call_id, **named, "arguments": text or ""}


def _usage(totals: UsageTotals) -> _Event:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
        "output_tokens": totals.generated,
        "output_tokens_details": {"reasoning_tokens": totals.reasoning},
        "total_tokens": totals.prompt + totals.generated,
        **totals.extension(),
    }
