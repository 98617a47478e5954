"""The JSON of Ollama's API: one object, or an object a line.

Pure.  Invariant: the last object of an answer is the only one that is done, and has its counts and times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from lucevisor.api.errors import ApiError
from lucevisor.api.output.logprobs import chat_logprobs
from lucevisor.api.output.processor import ChoiceDelta, FinishReason
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.text.output_parser import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.tokenizer import Tokenizer

_DONE_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "tool_calls": "stop"}


def created_at(seconds: float) -> str:
    """Return a Unix time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True, kw_only=True)
class OllamaFormatter:
    """One response.  ``chat``: of /api/chat, else of /api/generate; ``context``: ids of the conversation so far, which
    the answer's are added to, None if they are not sent."""

    response_id: str
    model: str
    tokenizer: Tokenizer
    chat: bool
    logprobs: bool
    context: list[int] | None = None
    _reason: FinishReason = "stop"

    style: ClassVar[StreamStyle] = "lines"

    def start(self, index: int) -> Sequence[object]:
        """Return nothing: the first delta opens the answer."""
        return ()

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the object of a delta."""
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        self._remember(delta)
        if delta.event is None and not (self.logprobs and delta.tokens):
            return ()
        return [self._object([delta], done=False)]

    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the last object."""
        return [self._object([], done=True) | self._counts(totals)]

    def failure(self, error: ApiError) -> Sequence[object]:
        """Return the error."""
        return [error.ollama_body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole answer as one object."""
        self._reason = choices[0][-1].finish_reason or "stop"
        for delta in choices[0]:
            self._remember(delta)
        return self._object(choices[0], done=True) | self._counts(totals)

    def _remember(self, delta: ChoiceDelta) -> None:
        if self.context is not None:
            self.context += delta.token_ids

    def _object(self, deltas: Sequence[ChoiceDelta], *, done: bool) -> dict[str, object]:
        events = [delta.event for delta in deltas]
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = [self._call(event) for event in events if isinstance(event, ToolCallDelta)]
        told: dict[str, object] = {"model": self.model, "created_at": created_at(time.time())}
        part: dict[str, object] = {"role": "assistant", "content": content} if self.chat else {"response": content}
        if thinking:
            part["thinking"] = thinking
        if calls:
            part["tool_calls"] = calls
        told |= {"message": part} if self.chat else part
        tokens = [token for delta in deltas for token in delta.tokens]
        if self.logprobs and tokens:
            told["logprobs"] = chat_logprobs(self.tokenizer, tokens)["content"]
        return told | {"done": done}

    def _call(self, call: ToolCallDelta) -> dict[str, object]:
        function = {"index": call.index, "name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}
        return {"id": f"call_{self.response_id}{call.index:02d}", "function": function}

    def _counts(self, totals: UsageTotals) -> dict[str, object]:
        """Return counts, and times in nanoseconds."""
        times = totals.timings_json()
        queue, prefill, decode = (int(1e9 * times.get(f"{name}_s", 0.0)) for name in ("queue", "prefill", "decode"))
        return {
            "done_reason": _DONE_REASONS[self._reason],
            **({} if self.context is None else {"context": self.context}),
            "total_duration": queue + prefill + decode,
            "load_duration": queue,  # as in Ollama, all the time before the model runs
            "prompt_eval_count": totals.prompt,
            "prompt_eval_duration": prefill,
            "eval_count": totals.generated,
            "eval_duration": decode,
        }
