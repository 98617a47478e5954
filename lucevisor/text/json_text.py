"""JSON whose numbers keep their text, so that they are passed on digit for digit.

Python reads 1e999 as infinity, writes it as `Infinity`, which is not JSON, and turns 1.10 into 1.1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

MAX_DEPTH: Final = 64
"""Nesting of arrays and objects; many clients' parsers stop at 64 to 128."""

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?+|[\[{]|[\]}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Number:
    """A JSON number, as text."""

    text: str

    def as_integer(self) -> Number | None:
        """Return the value without fraction and exponent; None if it is not an integer, or exceeds a double."""
        if self.text.removeprefix("-").isdigit():
            return self
        value = float(self.text)
        return Number(str(int(value))) if math.isfinite(value) and value.is_integer() else None


def parse(text: str) -> object:
    """Parse strict JSON, with numbers as Number; raises ValueError, also for nesting deeper than MAX_DEPTH."""
    depth = deepest = 0
    for token in _OPENING.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    value: object = json.loads(text, parse_constant=_refuse_constant, parse_int=Number, parse_float=Number)
    return value


def write(value: object) -> str:
    """Return JSON of values from `parse`, or of strings, booleans, None, and lists and dicts of these."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{write(str(key))}: {write(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(write, value))}]"
    # JSON can escape a lone surrogate, but UTF-8 cannot encode it: keep the escape.
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
