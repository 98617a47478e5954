"""Lower bound for the number of tokens of a text, from its bytes: reject what cannot fit before it is tokenised.

Knows token bytes, no merges.  A token holds at most M bytes from a set of byte values (all, letters, the letter a,
...), where M is the maximum over the vocabulary, so a text with c such bytes has at least c / M tokens; the largest of
these bounds counts.
Invariant: the bound never exceeds the true number of tokens.  Where that is unknown (unknown characters are fused into
one token, or dropped) it is 0.

NFC shortens a text to 2/7 at most (U+1FBE U+0308 U+0301 is U+0390; a test checks every character) and combines letters
with what follows them: with NFC, only ASCII text is counted by sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from lucevisor.text.schemes import Normal, Scheme
from lucevisor.text.vocabulary import TokenType, Vocabulary

NFC_SHRINKS: Final = 4
"""Bytes of a text for one byte of its NFC, rounded up."""

SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""JSON may carry half of a surrogate pair; no UTF-8 holds it, and it is tokenised as U+FFFD."""

_CHUNK_BYTES: Final = 1 << 20
_BLANKS: Final = b" \t\r\n"
_LETTERS: Final = bytes([*range(0x41, 0x5B), *range(0x61, 0x7B)])


class TokenBound:
    """The bound for one vocabulary; takes a second to build for 262,144 tokens."""

    def __init__(
        self, vocabulary: Vocabulary, token_bytes: Iterable[bytes], scheme: Scheme, alphabet: Mapping[int, str]
    ) -> None:
        """`alphabet` translates the letters that byte-level tokens are written in (code points) to bytes."""
        self._nfc = scheme.normal is Normal.NFC
        self._sets = _byte_sets()
        max_counts = [0] * len(self._sets)
        masks = [frozenset(np.flatnonzero(row).tolist()) for row in self._sets[256:]]
        for raw in set(_forms(vocabulary, token_bytes, scheme, alphabet)):
            values = set(raw)
            for value in values:
                if not max_counts[value] or (len(values) < len(raw) and raw.count(value) > max_counts[value]):
                    max_counts[value] = raw.count(value)
            for index, mask in enumerate(masks, 256):
                if len(raw) > max_counts[index]:
                    max_counts[index] = max(max_counts[index], sum(map(mask.__contains__, raw)))
        self._most = np.maximum(np.array(max_counts, np.int64), 1)
        self.max_token_bytes = int(max_counts[-1])
        """Bytes that one token stands for at most."""
        self._known = _stands_for_every_byte(vocabulary, scheme)

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that the text certainly has, whichever of its characters are trusted."""
        if not self._known:
            return 0
        plain = text.isascii()
        data = text.encode() if plain else SURROGATES.sub("\ufffd", text).encode()
        if self._nfc and not plain:
            return -(-len(data) // (NFC_SHRINKS * self.max_token_bytes))
        counts = np.zeros(256, np.int64)
        for start in range(0, len(data), _CHUNK_BYTES):
            counts += np.bincount(np.frombuffer(data[start : start + _CHUNK_BYTES], np.uint8), minlength=256)
        return int((-(-(self._sets @ counts) // self._most)).max())


def _byte_sets() -> npt.NDArray[np.int64]:
    """Return the sets as rows of ones: every byte value alone, letters, what is not blank, all bytes."""
    letters = np.isin(np.arange(256), list(_LETTERS))
    solid = ~np.isin(np.arange(256), list(_BLANKS))
    rows = np.vstack([np.eye(256, dtype=bool), letters, solid, np.ones(256, bool)])
    return rows.astype(np.int64)


def _forms(
    vocabulary: Vocabulary, token_bytes: Iterable[bytes], scheme: Scheme, alphabet: Mapping[int, str]
) -> Iterator[bytes]:
    """Yield all bytes that a token can stand for: what it decodes to, and for a token that is found in text as it is
    written or may be, its text; a run of U+2581 is found as such and stands for spaces too.
    """
    for text, kind, raw in zip(vocabulary.tokens, vocabulary.types, token_bytes, strict=True):
        yield raw
        if kind != TokenType.NORMAL or not scheme.byte_level:
            yield text.encode("utf-8", errors="replace")
            if "▁" in text:
                yield text.replace("▁", " ").encode("utf-8", errors="replace")
        if kind != TokenType.NORMAL and scheme.byte_level and all(ord(letter) in alphabet for letter in text):
            yield text.translate(alphabet).encode("latin-1")


def _stands_for_every_byte(vocabulary: Vocabulary, scheme: Scheme) -> bool:
    """Say whether no text is dropped or fused into one unknown token."""
    if scheme.byte_level:
        return True  # a vocabulary that lacks a byte letter is refused when it is loaded
    usable = {
        text
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind not in (TokenType.CONTROL, TokenType.UNUSED)
    }
    return all(f"<0x{byte:02X}>" in usable for byte in range(256))
