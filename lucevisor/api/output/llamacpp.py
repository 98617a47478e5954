"""The JSON of llama.cpp's /completion and /infill: one object for each choice, or its parts as events.

Pure.  Invariant: the last event of a choice, with `stop` true, has what the object has that is not streamed, but for
the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from lucevisor.api.errors import ApiError
from lucevisor.api.output.logprobs import LEAST, token_text
from lucevisor.api.output.processor import ChoiceDelta, FinishReason, TokenRecord
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.text.output_parser import ContentDelta
from lucevisor.text.tokenizer import Tokenizer

_STOP_TYPES: Final[dict[FinishReason, str]] = {"length": "limit", "stop": "eos", "tool_calls": "eos"}


@dataclass(slots=True)
class _Choice:
    """What a choice was so far."""

    n_prompt: int
    prompt: str
    n_tokens: int = 0
    reason: FinishReason = "stop"
    stop: str | None = None
    has_new_line: bool = False


@dataclass(slots=True, kw_only=True)
class LlamaCppFormatter:
    """One response.  `prompts`: of each choice; `settings`: of the sampler; `token_ids`: they were requested."""

    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    settings: dict[str, object]
    logprobs: bool
    token_ids: bool
    _choices: list[_Choice] = field(default_factory=list)

    style: ClassVar[StreamStyle] = "unended"

    def __post_init__(self) -> None:
        """Begin with the prompts."""
        decode = self.tokenizer.decode
        self._choices = [_Choice(len(prompt), decode(prompt, skip_special=False)) for prompt in self.prompts]

    def start(self, index: int) -> Sequence[object]:
        """Return nothing: the first delta opens the answer."""
        return ()

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the event of a delta."""
        told = self._part(index, [delta])
        return [told] if delta.event is not None or delta.tokens else ()

    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the last event of each choice."""
        return [self._whole(index, {"content": "", "tokens": []}, totals) for index in range(len(self._choices))]

    def failure(self, error: ApiError) -> Sequence[object]:
        """Return the error's body."""
        return [error.body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the object of the only choice, or a list of them."""
        told = [self._whole(index, self._part(index, deltas), totals) for index, deltas in enumerate(choices)]
        return told[0] if len(told) == 1 else told

    def _part(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, object]:
        choice = self._choices[index]
        content = "".join(delta.event.text for delta in deltas if isinstance(delta.event, ContentDelta))
        tokens = [token for delta in deltas for token in delta.tokens]
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        choice.n_tokens += len(ids)
        choice.has_new_line |= "\n" in content
        if deltas[-1].finish_reason is not None:
            choice.reason, choice.stop = deltas[-1].finish_reason, deltas[-1].stop
        part: dict[str, object] = {
            "index": index,
            "content": content,
            "tokens": ids if self.token_ids else [],
            "stop": False,
            "id_slot": -1,  # sequences are not bound to slots
            "tokens_predicted": choice.n_tokens,
            "tokens_evaluated": choice.n_prompt,
        }
        return part | ({"completion_probabilities": list(map(self._scored, tokens))} if self.logprobs else {})

    def _whole(self, index: int, part: dict[str, object], totals: UsageTotals) -> dict[str, object]:
        choice = self._choices[index]
        return {
            "index": index,
            "id_slot": -1,
            **part,
            "stop": True,
            "model": self.model,
            "tokens_predicted": choice.n_tokens,
            "tokens_evaluated": choice.n_prompt,
            "generation_settings": self.settings,
            "prompt": choice.prompt,
            "has_new_line": choice.has_new_line,
            "truncated": False,
            "stop_type": "word" if choice.stop is not None else _STOP_TYPES[choice.reason],
            "stopping_word": choice.stop or "",
            "tokens_cached": choice.n_prompt + choice.n_tokens,
            "timings": totals.llama_timings(),
        }

    def _scored(self, record: TokenRecord) -> dict[str, object]:
        def entry(token: int, logprob: float | None) -> dict[str, object]:
            text, raw = token_text(self.tokenizer, token), list(self.tokenizer.token_bytes(token))
            return {
                "id": token,
                "token": text,
                "bytes": raw,
                "logprob": LEAST if logprob is None else max(LEAST, logprob),
            }

        event = record.event
        return {**entry(event.token, event.logprob), "top_logprobs": [entry(*one) for one in event.top]}
