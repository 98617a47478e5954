"""The JSON of plain completions: one object, or chunks of a stream, which have the same fields.

Pure.  Invariant: fields and order are OpenAI's; the additions are `token_ids` on request, and `timings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lucevisor.api.errors import ApiError
from lucevisor.api.output.envelope import Envelope
from lucevisor.api.output.logprobs import completion_logprobs, echoed_logprobs, encode_items
from lucevisor.api.output.processor import ChoiceDelta
from lucevisor.api.output.sse import StreamStyle
from lucevisor.api.output.usage import UsageTotals
from lucevisor.text.output_parser import ContentDelta
from lucevisor.text.tokenizer import Tokenizer

_KIND = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormatter:
    """`n`: choices per prompt; `echoes`: the text of each prompt if it is to be repeated, else empty.

    `prompts`: their ids; `scored`: log-probabilities of them are wanted.
    """

    envelope: Envelope
    tokenizer: Tokenizer
    n: int
    echoes: tuple[str, ...]
    logprobs: bool
    token_ids: bool
    prompts: Sequence[Sequence[int]]
    scored: bool = False

    style: ClassVar[StreamStyle] = "data"

    def start(self, index: int) -> Sequence[object]:
        """Return the chunk with the prompt, as text or ids, if that was requested."""
        if not (self.echoes or self.token_ids):
            return ()
        choice = self._choice(index, self._echo(index), ChoiceDelta(None)) | self._prompt(index)
        return self._chunk(index, choice, ChoiceDelta(None))

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        """Return the chunk of a delta; the finish reason comes in one of its own, with an empty text."""
        return self._chunk(index, self._choice(index, _text(delta), delta), delta)

    def end(self, totals: UsageTotals) -> Sequence[object]:
        """Return the chunk with the usage and no choice, if it was requested."""
        return self.envelope.usage_chunk(_KIND, totals)

    def failure(self, error: ApiError) -> Sequence[object]:
        """Return the error's body."""
        return [error.body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole response as one object."""
        told = []
        for index, deltas in enumerate(choices):
            joined = ChoiceDelta(
                None,
                tuple(token for delta in deltas for token in delta.tokens),
                tuple(token_id for delta in deltas for token_id in delta.token_ids),
                deltas[-1].finish_reason,
                prompt_scores=deltas[-1].prompt_scores,
            )
            text = self._echo(index) + "".join(map(_text, deltas))
            told.append(self._choice(index, text, joined, full=True) | self._prompt(index))
        return {**self.envelope.head(_KIND), "choices": told, "usage": totals.usage(), "timings": totals.timings_json()}

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _prompt(self, index: int) -> dict[str, object]:
        return {"prompt_token_ids": list(self.prompts[index // self.n])} if self.token_ids else {}

    def _chunk(self, index: int, choice: object, delta: ChoiceDelta) -> Sequence[object]:
        return [self.envelope.chunk(_KIND, index, choice, delta.n_tokens)]

    def _choice(self, index: int, text: str, delta: ChoiceDelta, *, full: bool = False) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, delta, full=full),
            "finish_reason": delta.finish_reason,
        }
        if self.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _logprobs(self, index: int, delta: ChoiceDelta, *, full: bool) -> object:
        if not self.logprobs or not (delta.tokens or full):
            return None
        if self.scored:
            prompt, n_echo = self.prompts[index // self.n], len(self._echo(index))
            told = echoed_logprobs(self.tokenizer, prompt, delta.prompt_scores, delta.tokens, n_echo)
        else:
            told = completion_logprobs(self.tokenizer, delta.tokens)
        return told | {"top_logprobs": encode_items(told["top_logprobs"])} if full else told


def _text(delta: ChoiceDelta) -> str:
    return delta.event.text if isinstance(delta.event, ContentDelta) else ""
