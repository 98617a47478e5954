"""Text that tracks which of its characters a chat template wrote, by one origin byte each (1: a template literal).

Operations that cannot be tracked return a plain `str`, which counts as foreign, so errors are on the safe side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index as index_of
from typing import Final, SupportsIndex

MAX_PIECES: Final = 1 << 18
"""Most pieces of a text that is split, replaced in or iterated over; each is an object."""
MAX_CHARS: Final = 1 << 24
"""Longest text; a prompt of a million tokens has about a quarter of it."""

_FOREIGN = b"\x00"
_OWN = b"\x01"


class TracedText(str):
    """A string with the origin of each character: `origin[i]` is 1 where the template wrote character i."""

    __slots__ = ("origin",)
    origin: bytes

    def __new__(cls, text: str = "", origin: bytes | None = None) -> TracedText:
        """Wrap a text; without `origin` all of it is foreign. Raises ValueError when the lengths differ."""
        traced = super().__new__(cls, text)
        traced.origin = bytes(len(text)) if origin is None else origin
        if len(traced.origin) != len(text):
            raise ValueError(f"origin has {len(traced.origin)} entries for {len(text)} characters")
        return traced

    @classmethod
    def own(cls, text: str) -> TracedText:
        return cls(text, _OWN * len(text))

    @classmethod
    def of(cls, text: str) -> TracedText:
        """Return a traced text unchanged, and any other as foreign."""
        return text if isinstance(text, TracedText) else cls(text)

    def __str__(self) -> str:  # Jinja calls str() on output; a copy would lose the origin
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return concatenate([self, other])

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return concatenate([other, self])

    def __mul__(self, times: SupportsIndex) -> TracedText:
        _check_length(len(self) * index_of(times))
        return TracedText(str.__mul__(self, times), self.origin * times)

    __rmul__ = __mul__

    def __getitem__(self, index: SupportsIndex | slice) -> TracedText:
        if not isinstance(index, slice):
            position = range(len(self))[index]  # raises IndexError as str does
            index = slice(position, position + 1)
        return TracedText(str.__getitem__(self, index), self.origin[index])

    def __iter__(self) -> Iterator[str]:
        _check_pieces(len(self))
        return (self[index] for index in range(len(self)))

    def __getnewargs__(self) -> tuple[str, bytes]:  # type: ignore[override]  # copy and pickle keep the origin
        return str.__str__(self), self.origin

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> TracedText:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> TracedText:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        _check_pieces(str.count(self, "\n"))
        lines, start = [], 0
        for full, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(self[start : start + len(line)])
            start += len(full)
        return list[str](lines)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # inserts between all characters
            _check_length(len(self) + (len(self) + 1) * len(new))
            return str.replace(self, old, new, count)
        n_found = str.count(self, old)
        n_replaced = n_found if index_of(count) < 0 else min(n_found, index_of(count))
        _check_length(len(self) + n_replaced * (len(new) - len(old)))
        return concatenate(_between(new, self.split(old, count)))

    def join(self, parts: Iterable[str], /) -> str:
        return concatenate(_between(self, list(parts)))

    def upper(self) -> str:
        return self._same_places(str.upper(self))

    def lower(self) -> str:
        return self._same_places(str.lower(self))

    def title(self) -> str:
        return self._same_places(str.title(self))

    def capitalize(self) -> str:
        return self._same_places(str.capitalize(self))

    def _locate(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        _check_pieces(len(pieces))
        located: list[str] = []
        start = 0
        for piece in pieces:
            start = self.find(piece, start) if sep is None else start
            located.append(self[start : start + len(piece)])
            start += len(piece) + (len(sep) if sep is not None else 0)
        return located

    def _cut(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, middle = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:middle], self[middle:]

    def _same_places(self, changed: str) -> str:
        # A change of case may lengthen a text ("ß"), and then the origins no longer match.
        return TracedText(changed, self.origin) if len(changed) == len(self) else changed


def concatenate(pieces: Iterable[str]) -> TracedText:
    """Join the pieces into one text; plain strings are foreign."""
    parts, n_chars = [], 0
    for part in pieces:
        if part:
            parts.append(part)
            n_chars += len(part)
            _check_length(n_chars)
    origin = [part.origin if isinstance(part, TracedText) else _FOREIGN * len(part) for part in parts]
    return TracedText("".join(parts), b"".join(origin))


def _check_length(n_chars: int) -> None:
    if n_chars > MAX_CHARS:
        raise OverflowError(f"a text of more than {MAX_CHARS} characters")


def _check_pieces(n_pieces: int) -> None:
    if n_pieces > MAX_PIECES:
        raise OverflowError(f"a text split into more than {MAX_PIECES} pieces")


def _between(separator: str, parts: Sequence[str]) -> list[str]:
    spread = [separator] * max(2 * len(parts) - 1, 0)
    spread[::2] = parts
    return spread
