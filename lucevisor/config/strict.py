"""Strict parsing of single values, from TOML and from text such as `--set`.

Knows nothing about files, sections or the use of a value. Invariant: a value type returns a value in its documented
range, or raises `Refused` with the reason and what to write instead, never another exception. Text is as strict as
TOML, and stricter with numbers: no surrounding spaces, `+5`, `0x10`, `1_000`, `007`, `nan`, `inf`, `1e400`.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

T = TypeVar("T")

AUTO: Final = "auto"
MAX_INTEGER: Final = 2**63 - 1
SIZE_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_SIZE = re.compile(r"(0|[1-9][0-9]*)(KiB|MiB|GiB)?", re.ASCII)
MAX_ITEMS: Final = 1024
"""Longest list; no key needs more items than there are devices, layers or origins."""

_LONGEST_NUMBER = 40  # characters; longer ones are out of every range here, and int() is quadratic


class Refused(ValueError):
    """A rejected value: why, what to write instead, and where inside the value (`[1]`, `.NAME`)."""

    def __init__(self, why: str, hint: str = "", *, value: object = None, inside: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.value = value
        self.inside = inside


class Text(str):
    """A value given as text (`--set KEY=TEXT`), not yet parsed as the key's type."""

    __slots__ = ()


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice most similar to `word`, or an empty string if none is close."""
    folded = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower()[:100], folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else ""


def choose(word: str, choices: Sequence[str], noun: str = "choices") -> str:
    """Return the hint for an invalid word: the nearest choice, then all of them if they are few."""
    near = nearest(word, choices)
    parts = [f"nearest: {near}"] if near else []
    if len(choices) <= 16:
        parts.append(f"{noun}: {', '.join(choices)}")
    return "; ".join(parts)


def integer_of(text: str) -> int:
    """Parse decimal digits with an optional minus; raises Refused."""
    if not _INTEGER.fullmatch(text) or len(text) > _LONGEST_NUMBER:
        raise Refused("is not an integer", "write decimal digits only, such as 8", value=text)
    return int(text)


def decimal_of(text: str) -> float:
    """Parse a finite decimal number; raises Refused."""
    if not _DECIMAL.fullmatch(text) or len(text) > _LONGEST_NUMBER:
        raise Refused("is not a number", "write decimal digits, such as 0.5", value=text)
    number = float(text)
    if not math.isfinite(number):
        raise Refused("is not finite", "write a number in the range of a float", value=text)
    return number


def plain(markdown: str) -> str:
    """Return Markdown text without backticks."""
    return markdown.replace("`", "")


def kind_of(value: object) -> str:
    """Return the type of a TOML value, in words."""
    if isinstance(value, str):
        return "text"
    names = {bool: "true or false", int: "an integer", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


class ValueType(ABC, Generic[T]):
    """The type of one key: parses and writes its values, and describes itself for the documentation."""

    wants: ClassVar[str]

    def read(self, value: object) -> T:
        """Return the typed value of a TOML value or of `Text`, or raise Refused."""
        return self.from_text(str(value)) if isinstance(value, Text) else self.from_toml(value)

    @abstractmethod
    def from_toml(self, value: object) -> T:
        """Return the typed value of what tomllib returned, or raise Refused."""

    @abstractmethod
    def from_text(self, text: str) -> T:
        """Return the typed value of text, or raise Refused."""

    def write(self, value: T) -> object:
        """Return the value for TOML and JSON; reading that gives the value back."""
        return value

    @abstractmethod
    def allowed(self) -> str:
        """Return a description of the accepted values."""

    def mistyped(self, value: object) -> Refused:
        """Return the error for a value of another type."""
        return Refused(f"is {kind_of(value)}, not {self.wants}", f"write {plain(self.allowed())}", value=value)


class TextType(ValueType[T]):
    """The type of a key whose value is text in TOML, too."""

    wants: ClassVar[str] = "text"

    def from_toml(self, value: object) -> T:
        if isinstance(value, str):
            return self.from_text(value)
        raise self.mistyped(value)


@dataclass(frozen=True, slots=True)
class Flag(ValueType[bool]):
    """true or false."""

    wants: ClassVar[str] = "true or false"

    def from_toml(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise self.mistyped(value)

    def from_text(self, text: str) -> bool:
        if text in ("true", "false"):
            return text == "true"
        raise Refused("is not true or false", choose(text, ["true", "false"]), value=text)

    def allowed(self) -> str:
        return "`true` or `false`"


@dataclass(frozen=True, slots=True)
class Whole(ValueType[int]):
    """An integer in `[low, high]`."""

    low: int
    high: int = MAX_INTEGER
    wants: ClassVar[str] = "an integer"

    def from_toml(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.mistyped(value)
        return self._inside(value)

    def from_text(self, text: str) -> int:
        return self._inside(integer_of(text))

    def _inside(self, value: int) -> int:
        if not self.low <= value <= self.high:
            near = min(max(value, self.low), self.high)
            raise Refused(f"is not in {self.low}..{self.high}", f"nearest: {near}", value=value)
        return value

    def allowed(self) -> str:
        return f"integer >= {self.low}" if self.high == MAX_INTEGER else f"integer {self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Real(ValueType[float]):
    """A finite number in `[low, high]`, or in `(low, high]` with `open_low`. TOML integers are accepted."""

    low: float
    high: float = math.inf
    open_low: bool = False
    wants: ClassVar[str] = "a number"

    def from_toml(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.mistyped(value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise Refused(
                "is not finite", self.allowed(), value=str(value) if isinstance(value, float) else "an integer"
            )
        return self._inside(number)

    def from_text(self, text: str) -> float:
        return self._inside(decimal_of(text))

    def _inside(self, value: float) -> float:
        if value < self.low or (self.open_low and value == self.low) or value > self.high:
            raise Refused("is out of range", f"write {self.allowed()}", value=value)
        return value

    def allowed(self) -> str:
        low = f"number > {self.low:g}" if self.open_low else f"number >= {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and <= {self.high:g}"


@dataclass(frozen=True, slots=True)
class Choice(TextType[Any]):
    """One of a few words, the same as in the field's Literal type."""

    words: tuple[str, ...]

    def from_text(self, text: str) -> str:
        if text in self.words:
            return text
        raise Refused("is not one of the choices", choose(text, self.words), value=text)

    def allowed(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words)


@dataclass(frozen=True, slots=True)
class OrAuto(ValueType[Any]):
    """A value of another type, or the word `auto`."""

    kind: ValueType[Any]

    wants: ClassVar[str] = "a value or auto"

    def from_toml(self, value: object) -> object:
        if isinstance(value, str):
            if value == AUTO:
                return AUTO
            raise Refused(f"is not {self.kind.wants} or auto", self._hint(value), value=value)
        return self.kind.from_toml(value)

    def from_text(self, text: str) -> object:
        if text == AUTO:
            return AUTO
        try:
            return self.kind.from_text(text)
        except Refused as refused:
            raise Refused(refused.why, self._hint(text) or refused.hint, value=refused.value) from None

    def _hint(self, text: str) -> str:
        return choose(text, [AUTO]) if nearest(text, [AUTO]) else f"write {plain(self.allowed())}"

    def allowed(self) -> str:
        return f"{self.kind.allowed()}, or `auto`"


@dataclass(frozen=True, slots=True)
class Size(ValueType[int]):
    """Bytes: an integer, or text of an integer directly followed by KiB, MiB or GiB."""

    low: int = 0
    wants: ClassVar[str] = "a size"

    def from_toml(self, value: object) -> int:
        if isinstance(value, str):
            return self.from_text(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.mistyped(value)
        return self._inside(value)

    def from_text(self, text: str) -> int:
        match = _SIZE.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
        if match is None:
            raise Refused("is not a size", _nearest_size(text) or 'such as "512MiB", "20GiB" or 1048576', value=text)
        return self._inside(int(match[1]) * SIZE_UNITS.get(match[2] or "", 1))

    def _inside(self, value: int) -> int:
        if not self.low <= value <= MAX_INTEGER:
            raise Refused(
                f"is not in {self.low}..{MAX_INTEGER} bytes",
                f"nearest: {min(max(value, self.low), MAX_INTEGER)}",
                value=value,
            )
        return value

    def allowed(self) -> str:
        return "bytes, or text such as `512MiB` (KiB, MiB, GiB)"


def _nearest_size(text: str) -> str:
    """Return the hint for text such as `10 GB`, or an empty string."""
    match = re.fullmatch(r"([1-9][0-9]*)([kmg])(?:i?b)?", "".join(text[:_LONGEST_NUMBER].lower().split()), re.ASCII)
    return f"nearest: {match[1]}{match[2].upper()}iB" if match else ""


@dataclass(frozen=True, slots=True)
class Line(TextType[str]):
    """One line of text without control characters or surrounding spaces."""

    may_be_empty: bool = True

    def from_text(self, text: str) -> str:
        if not text and not self.may_be_empty:
            raise Refused("is empty", "write a value or remove the key", value=text)
        if text != text.strip():
            raise Refused("has surrounding spaces", f'nearest: "{text.strip()}"', value=text)
        if any(ord(character) < 32 or ord(character) == 127 or "\ud800" <= character <= "\udfff" for character in text):
            raise Refused("holds a control character", "write one line of printable text", value=text)
        return text

    def allowed(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class Several(ValueType[tuple[Any, ...]]):
    """A list of values of one type; as text, separated by commas (`[]` is the empty list)."""

    item: ValueType[Any]
    distinct: bool = True
    wants: ClassVar[str] = "a list"

    def from_toml(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise self.mistyped(value)
        return self._read_each(value)

    def from_text(self, text: str) -> tuple[Any, ...]:
        return self._read_each([] if text == "[]" else [Text(part) for part in split_list(text)])

    def _read_each(self, values: Sequence[object]) -> tuple[Any, ...]:
        check_length(values)
        read: list[Any] = []
        for index, value in enumerate(values):
            try:
                item = self.item.read(value)
            except Refused as refused:
                raise Refused(refused.why, refused.hint, value=value, inside=f"[{index}]{refused.inside}") from None
            if self.distinct and item in read:
                raise Refused("is listed twice", "remove one of the two", value=value, inside=f"[{index}]")
            read.append(item)
        return tuple(read)

    def write(self, value: tuple[Any, ...]) -> object:
        return [self.item.write(item) for item in value]

    def allowed(self) -> str:
        return f"list of: {self.item.allowed()}"


def check_length(values: Sequence[object]) -> None:
    """Raise Refused for a list of more than MAX_ITEMS."""
    if len(values) > MAX_ITEMS:
        raise Refused(f"has {len(values)} items, more than {MAX_ITEMS}", "shorten the list")


def split_list(text: str) -> list[str]:
    """Split a list given as text at its commas; raises Refused for empty items."""
    parts = text.split(",")
    if "" in parts:
        why = "is empty" if parts == [""] else "has an empty item"
        raise Refused(why, "write items separated by single commas, such as a,b; [] is the empty list", value=text)
    return parts
