"""Lower bound for the number of tokens of a text, from its bytes: reject what cannot fit before it is tokenised.

A token holds at most M bytes from a set of byte values (all, those that are not blank, letters), so a text with c such
bytes has at least c / M tokens.  The bound is 0 where unknown characters are fused into one token, or dropped.

NFC shortens a text to 2/7 at most (U+1FBE U+0308 U+0301 is U+0390; a test checks every character) and combines letters
with what follows them: with NFC, only ASCII text is counted by sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from lucevisor.text.pre_tokenizers import Normalization, PreTokenizerSpec
from lucevisor.text.vocabulary import TokenType, Vocabulary

NFC_SHRINKS: Final = 4
"""Bytes of a text for one byte of its NFC, rounded up."""

SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""JSON may carry half of a surrogate pair; no UTF-8 holds it, and it is tokenised as U+FFFD."""

_LETTERS: Final = bytes([*range(0x41, 0x5B), *range(0x61, 0x7B)])
_NOT_COUNTED: Final = (b"", b" \t\r\n", bytes(i for i in range(256) if i not in _LETTERS))
"""Bytes that each set leaves out: none, blanks, all but letters."""


class TokenBound:
    """The bound for one vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_bytes: Iterable[bytes],
        scheme: PreTokenizerSpec,
        alphabet: Mapping[int, str],
    ) -> None:
        """`alphabet` translates the letters that byte-level tokens are written in (code points) to bytes."""
        self._nfc = scheme.normal is Normalization.NFC
        forms = set(_forms(vocabulary, token_bytes, scheme, alphabet))
        self._most = [max(1, *(len(raw.translate(None, rest)) for raw in forms)) for rest in _NOT_COUNTED]
        self.max_token_bytes = self._most[0]
        """Bytes that one token stands for at most."""
        self._known = _stands_for_every_byte(vocabulary, scheme)
        tokens = set(vocabulary.tokens)
        lost = [ord(byte) for letter, byte in alphabet.items() if chr(letter) not in tokens]
        self._lost = bytes(lost) if scheme.byte_level else b""  # such bytes are dropped

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that the text certainly has, whichever of its characters are trusted."""
        if not self._known:
            return 0
        if text.isascii():
            data = text.encode()
        else:
            data = SURROGATES.sub("\ufffd", text).encode()
            if self._nfc and self._lost:
                return 0
            if self._nfc:
                return -(-len(data) // (NFC_SHRINKS * self.max_token_bytes))
        counts = (len(data.translate(None, rest + self._lost)) for rest in _NOT_COUNTED)
        return max(-(-count // most) for count, most in zip(counts, self._most, strict=True))


def _forms(
    vocabulary: Vocabulary, token_bytes: Iterable[bytes], scheme: PreTokenizerSpec, alphabet: Mapping[int, str]
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


def _stands_for_every_byte(vocabulary: Vocabulary, scheme: PreTokenizerSpec) -> bool:
    """Return whether no text is dropped or fused into one unknown token."""
    if scheme.byte_level:
        return True  # but for bytes without a letter, which are known
    usable = {
        text
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind not in (TokenType.CONTROL, TokenType.UNUSED)
    }
    return all(f"<0x{byte:02X}>" in usable for byte in range(256))
