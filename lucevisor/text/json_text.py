"""JSON of which numbers keep their text: what a model or a client wrote comes out digit for digit.

Python reads 1e999 as infinity and writes it as `Infinity`, which is no JSON, and 1.10 as 1.1. Here a number is a
`Number`, which holds its text. Invariant: what `parse` accepts is JSON by RFC 8259 and nested at most MAX_DEPTH deep;
what `write` returns is JSON by RFC 8259 and can be encoded as UTF-8.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

MAX_DEPTH: Final = 64
"""Of arrays and objects; many clients' parsers stop at 64 to 128."""

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?+|[\[{]|[\]}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Number:
    """A JSON number as its text."""

    text: str

    def as_integer(self) -> Number | None:
        """Return the same value written without fraction and exponent; None when there is none, or beyond a double."""
        if self.text.removeprefix("-").isdigit():
            return self
        value = float(self.text)
        return Number(str(int(value))) if math.isfinite(value) and value.is_integer() else None


def parse(text: str) -> object:
    """Return the value of strict JSON text, its numbers as Number.

    Raises ValueError for what is no JSON (NaN, Infinity) or nested too deep.
    """
    depth = deepest = 0
    for token in _OPENING.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    value: object = json.loads(text, parse_constant=_refuse_constant, parse_int=Number, parse_float=Number)
    return value


def write(value: object) -> str:
    """Return JSON text of what `parse` returned or of plain strings, booleans, None, lists and dicts of them."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{write(str(key))}: {write(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(write, value))}]"
    # A lone surrogate, which JSON can name by its escape, has no UTF-8: the escape stays one.
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
