"""Incremental detokenizer: token ids to text as they arrive.

Knows no templates or requests. Invariant: the joined results, flush included, equal the bytes of all visible tokens
decoded at once with invalid bytes replaced by U+FFFD; no result ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from lucevisor.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream; `visible`: control tokens to keep, such as tags for the output parser."""

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" for a control token or an incomplete character."""
        if token_id not in self._visible and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for the bytes of an incomplete character at the end of the stream."""
        return self._decoder.decode(b"", final=True)
