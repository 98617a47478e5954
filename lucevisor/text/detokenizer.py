"""Incremental detokenizer: token ids to text as they arrive.

Knows neither templates nor requests. Invariant: the pieces joined, flush included, equal the bytes of all shown tokens
decoded at once with invalid bytes replaced by U+FFFD, and no piece ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from lucevisor.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream; `visible` are control tokens to show all the same (tags the output parser looks for)."""

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: "" for a control token or while a character is incomplete."""
        if token_id not in self._visible and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for bytes that wait for the rest of their character, at the end of the stream."""
        return self._decoder.decode(b"", final=True)
