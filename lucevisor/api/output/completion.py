"""The JSON of plain completions: one object, or chunks of a stream, which have the same shape.

Pure.  Invariant: fields and order are OpenAI's; our additions are `token_ids` when asked, and `timings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.api.output.logprobs import completion_logprobs, encoded_each
from lucevisor.api.output.processor import Piece, TokenRecord
from lucevisor.api.output.usage import Totals
from lucevisor.text.output_parser import ContentDelta
from lucevisor.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """`n` choices a prompt; `echoes`: the text of each prompt when it is to be repeated, else empty."""

    response_id: str
    created_s: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    n: int
    echoes: tuple[str, ...]
    logprobs: bool
    token_ids: bool
    include_usage: bool

    def first(self, index: int) -> object | None:
        """Return the chunk that repeats the prompt, if that is wanted."""
        return self._chunk([self._choice(index, self._echo(index), Piece(None))]) if self.echoes else None

    def chunk(self, index: int, piece: Piece) -> object:
        """Return the chunk of a piece; the finish reason comes in one of its own, with an empty text."""
        return self._chunk([self._choice(index, _text(piece), piece)])

    def usage_chunk(self, totals: Totals) -> object | None:
        """Return the last chunk, which has usage and no choice."""
        if not self.include_usage:
            return None
        return {**self._chunk([]), "usage": totals.usage(), "timings": totals.told_timings()}

    def whole(self, choices: Sequence[Sequence[Piece]], totals: Totals) -> object:
        """Return the answer in one object."""
        told = []
        for index, pieces in enumerate(choices):
            joined = Piece(
                None,
                tuple(token for piece in pieces for token in piece.tokens),
                tuple(token_id for piece in pieces for token_id in piece.token_ids),
                pieces[-1].finish_reason,
            )
            told.append(self._choice(index, self._echo(index) + "".join(map(_text, pieces)), joined, whole=True))
        return {**self._head(), "choices": told, "usage": totals.usage(), "timings": totals.told_timings()}

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _head(self) -> dict[str, object]:
        head: dict[str, object] = {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
        }
        if self.fingerprint:
            head["system_fingerprint"] = self.fingerprint
        return head

    def _chunk(self, choices: list[object]) -> dict[str, object]:
        chunk = {**self._head(), "choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, text: str, piece: Piece, *, whole: bool = False) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(piece.tokens, whole=whole),
            "finish_reason": piece.finish_reason,
        }
        if self.token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _logprobs(self, tokens: Sequence[TokenRecord], *, whole: bool) -> object:
        if not self.logprobs or not (tokens or whole):
            return None
        told = completion_logprobs(self.tokenizer, tokens)
        return {**told, "top_logprobs": encoded_each(told["top_logprobs"])} if whole else told


def _text(piece: Piece) -> str:
    return piece.event.text if isinstance(piece.event, ContentDelta) else ""
