"""The keys of a section: the fields of a frozen dataclass, annotated with bounds (`msgspec.Meta`), a Format or
a Key."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from lucevisor.config.formats import (
    AUTO,
    DEVICE,
    PATHS,
    SPLIT,
    WORD,
    Format,
    InvalidValue,
    absolute,
    kind_of,
    wrong_type,
)
from lucevisor.errors import nearest, suggest

MAX_ITEMS = 1024
"""Longest list; no key needs more items than there are devices, layers or origins."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_BOUND = re.compile(r"Expected `\w+` (<=|>=|<|>) (\S+)")
_INTEGERS = re.compile(r"integer (\S+?\.\.\d+)")
_MISMATCH = re.compile(r"Expected `(.+)`, got `")
_WANTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "int | str": "an integer or auto",
}


@dataclass(frozen=True, slots=True)
class Key:
    """Unit of a key, and its name in the file where the field's name differs."""

    unit: str = ""
    name: str = ""


class Text(str):
    """A value given as text (`--set KEY=TEXT`), not yet parsed as the key's type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FieldKey:
    """One key of a section: its field, unit, type and default (`dataclasses.MISSING` if it is required)."""

    field: str
    unit: str
    type: Any
    format: Format | None
    default: Any

    @property
    def required(self) -> bool:
        """True if the file must contain the key."""
        return self.default is dataclasses.MISSING

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def allowed(self) -> str:
        """The accepted values, in Markdown."""
        if self.format is None:
            return _allowed(self.type)
        return f"list of: {self.format.allowed}" if self.is_list else self.format.allowed

    def write(self, value: Any) -> object:
        """Return a value as in the file, JSON-compatible."""
        write = self.format.write if self.format is not None else lambda item: item
        return [write(item) for item in value] if self.is_list else write(value)

    def read(self, raw: object, folder: Path) -> Any:
        """Return the typed value of what tomllib returned, or of `Text`; paths relative to `folder`. Raises
        InvalidValue with a hint."""
        value = self._from_text(raw) if isinstance(raw, Text) else raw
        try:
            if isinstance(value, list) and len(value) > MAX_ITEMS:
                raise InvalidValue(f"has {len(value)} items, more than {MAX_ITEMS}", "shorten the list")
            if self.format is None:
                result = _convert(value, self.type, is_text=isinstance(raw, Text))
            elif self.is_list:
                result = self._parse_items(value, self.format)
            else:
                result = self.format.parse(value)
            if isinstance(result, str) and self.format in PATHS:
                result = absolute(result, folder, self.format)
        except InvalidValue as error:
            offender = error.value if error.inside else raw
            hint = error.hint or f"write {plain(self.allowed)}"
            raise InvalidValue(error.why, hint, value=offender, inside=error.inside) from None
        # Devices are compared once their groups are known; words of a command may be repeated.
        if self.is_list and self.format not in (DEVICE, WORD):
            _refuse_duplicates(result, value)
        return result

    def _parse_items(self, value: object, form: Format) -> tuple[Any, ...]:
        if not isinstance(value, list):
            wrong_type(value, "a list")
        items = []
        for index, item in enumerate(value):
            try:
                items.append(form.parse(item))
            except InvalidValue as error:
                hint = error.hint or f"write {plain(form.allowed)}"
                raise InvalidValue(error.why, hint, value=item, inside=f"[{index}]{error.inside}") from None
        return tuple(items)

    def _from_text(self, text: str) -> object:
        """Return what a TOML file would have for the text of `--set`: a list is separated by commas."""
        if self.is_list or (self.format is SPLIT and text != AUTO):
            parts = [] if text == "[]" else text.split(",")
            if "" in parts:
                why = "is empty" if parts == [""] else "has an empty item"
                hint = "write items separated by single commas, such as a,b; [] is the empty list"
                raise InvalidValue(why, hint, value=text)
            return [_plain_number(part) for part in parts]
        if self.format is not None:
            return str(text)
        if self.type is bool and text in ("true", "false"):
            return text == "true"
        return _plain_number(text)


def _plain_number(text: str) -> object:
    """Return a number for plain decimals, which `+5`, `0x10`, `1_000`, `007`, `nan` are not; else the text."""
    return json.loads(text) if len(text) <= 40 and _NUMBER.fullmatch(text) else str(text)


def _convert(value: object, type_: Any, *, is_text: bool) -> Any:
    """Convert by msgspec.  Raises InvalidValue."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
    except (OverflowError, RecursionError):
        message, place = "", ""
    offender, inside = value, place.rstrip("`")
    if inside and isinstance(value, list):
        offender = value[int(inside[1:-1])]
    hint = ""
    if match := _BOUND.search(message):
        bound = float(match[2])
        why = f"is not {match[1]} {bound:g}" if bound < 1e6 else f"is not {match[1]} {match[2]}"
        if isinstance(offender, int) and (integers := _INTEGERS.search(_allowed(type_))):
            why = f"is not in {integers[1]}"
        hint = f"nearest: {match[2]}" if "=" in match[1] and isinstance(offender, int) else ""
    elif message.startswith("Invalid enum value"):
        words = _words(type_)
        why = "is not one of the choices" if len(words) > 1 else "is not an integer or auto"
        hint = suggest(str(offender), words) if len(words) > 1 or nearest(str(offender), words) else ""
    elif match := _MISMATCH.search(message):
        wanted = _WANTED.get(match[1], "a value of another type")
        why = f"is not {wanted}" if is_text else f"is {kind_of(offender)}, not {wanted}"
    else:
        why = "is out of range"
    raise InvalidValue(why, hint, value=offender, inside=inside)


def _refuse_duplicates(result: Sequence[object], raw: object) -> None:
    for index, item in enumerate(result):
        if item in result[:index]:
            offender = raw[index] if isinstance(raw, list) else item
            raise InvalidValue("is listed twice", "remove one of the two", value=offender, inside=f"[{index}]")


def _words(type_: Any) -> list[str]:
    if get_origin(type_) is Literal:
        return list(get_args(type_))
    return [word for part in get_args(type_) if get_origin(type_) in (Union, UnionType) for word in _words(part)]


def _allowed(type_: Any) -> str:
    """Return a description of the values of a type that msgspec converts."""
    notes: list[msgspec.Meta] = [note for note in get_args(type_)[1:] if isinstance(note, msgspec.Meta)]
    base = get_args(type_)[0] if get_origin(type_) is Annotated else type_
    if words := _words(base):
        parts = [_allowed(part) for part in get_args(base) if get_origin(part) is not Literal and part not in words]
        return ", or ".join([*parts, ", ".join(f"`{word}`" for word in words)])
    if get_origin(base) is tuple:
        return f"list of: {_allowed(get_args(base)[0])}"
    if base is bool:
        return "`true` or `false`"
    bounds = notes[0]
    if base is int:
        return f"integer {bounds.ge}..{bounds.le}"
    low = f"> {bounds.gt:g}" if bounds.gt is not None else f">= {bounds.ge:g}"
    return f"number {low} and <= {bounds.le:g}"


def plain(markdown: str) -> str:
    """Return Markdown text without backticks."""
    return markdown.replace("`", "")


_KEYS: dict[type[Any], Mapping[str, FieldKey]] = {}


def keys_of(section: type[Any]) -> Mapping[str, FieldKey]:
    """Return the keys of a section class by their names in the file, in order."""
    if section not in _KEYS:
        _KEYS[section] = MappingProxyType(_keys_of(section))
    return _KEYS[section]


def _keys_of(section: type[Any]) -> dict[str, FieldKey]:
    hints = get_type_hints(section, include_extras=True)
    keys: dict[str, FieldKey] = {}
    for field in dataclasses.fields(section):
        if not field.metadata.get("in_file", True):
            continue
        hint = hints[field.name]
        type_, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        key = next((note for note in notes if isinstance(note, Key)), Key())
        form = next((note for note in notes if isinstance(note, Format)), None)
        bounds = tuple(note for note in notes if isinstance(note, msgspec.Meta))
        bounded = Annotated[(type_, *bounds)] if bounds else type_
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        keys[key.name or field.name] = FieldKey(field.name, key.unit, bounded, form, default)
    return keys
