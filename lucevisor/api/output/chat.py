"""The JSON of chat completions: one object, or chunks of a stream.

Pure.  Invariant: fields and order are OpenAI's; the additions are `reasoning_content` (as in other open servers),
`token_ids` on request, and `timings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lucevisor.api.errors import ApiError
from lucevisor.api.output.envelope import Envelope
from lucevisor.api.output.logprobs import chat_logprobs, encode_items
from lucevisor.api.output.processor import ChoiceDelta, TokenRecord
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.api.prepared import custom_input
from lucevisor.text.output_parser import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.tokenizer import Tokenizer

_CHUNK = "chat.completion.chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter:
    """One response.  `token_ids`: they were requested, and those of the `prompt`; `custom`: names of tools whose input
    is text; `reasoning`: it is shown."""

    envelope: Envelope
    tokenizer: Tokenizer
    logprobs: bool
    token_ids: bool
    prompt: Sequence[int] = ()
    custom: Sequence[str] = ()
    reasoning: bool = True

    style: ClassVar[StreamStyle] = "data"

    def start(self, index: int) -> Sequence[object]:
        """Return the chunk that names the role."""
        chunks = self._chunk(index, {"role": "assistant", "content": ""}, ChoiceDelta(None))
        return [{**chunk, **self._prompt()} for chunk in chunks]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the chunk of a delta; the finish reason has a chunk of its own, with an empty delta."""
        fields: dict[str, object] = {}
        match delta.event:
            case ContentDelta(text):
                fields["content"] = text
            case ReasoningDelta(text):
                if self.reasoning:
                    fields["reasoning_content"] = text
            case ToolCallDelta() as call:
                fields["tool_calls"] = [{"index": call.index, **self._tool_call(index, call)}]
            case None:
                pass
        return self._chunk(index, fields, delta)

    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the chunk with the usage and no choice, if it was requested."""
        return self.envelope.usage_chunk(_CHUNK, totals)

    def failure(self, error: ApiError) -> Sequence[object]:
        """Return the error's body."""
        return [error.body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole response as one object."""
        return {
            **self.envelope.head("chat.completion"),
            "choices": [self._full_choice(index, deltas) for index, deltas in enumerate(choices)],
            "usage": totals.usage(),
            "timings": totals.timings_json(),
            **self._prompt(),
        }

    def _prompt(self) -> dict[str, object]:
        return {"prompt_token_ids": list(self.prompt)} if self.token_ids else {}

    def _chunk(self, index: int, fields: dict[str, object], delta: ChoiceDelta) -> Sequence[dict[str, object]]:
        return [self.envelope.chunk(_CHUNK, index, self._choice(index, fields, delta), delta.n_tokens)]

    def _choice(self, index: int, fields: dict[str, object], delta: ChoiceDelta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "delta": fields,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }
        if self.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _full_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, object]:
        events = [delta.event for delta in deltas]
        content = "".join(e.text for e in events if isinstance(e, ContentDelta))
        reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
        calls = [self._tool_call(index, e) for e in events if isinstance(e, ToolCallDelta)]
        message: dict[str, object] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning and self.reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs([token for delta in deltas for token in delta.tokens], full=True),
            "finish_reason": deltas[-1].finish_reason,
        }
        if self.token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _logprobs(self, tokens: Sequence[TokenRecord], *, full: bool = False) -> object:
        if not self.logprobs or not (full or any(token.content for token in tokens)):
            return None
        told = chat_logprobs(self.tokenizer, tokens)
        return {**told, "content": encode_items(told["content"])} if full else told

    def _tool_call(self, index: int, call: ToolCallDelta) -> dict[str, object]:
        # Globally unique, as the response id is; clients send it back with the tool's result.
        call_id = f"call_{self.envelope.response_id.rpartition('-')[2]}{index:02d}{call.index:02d}"
        if call.name in self.custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
