"""Limits on TOML text, checked before tomllib parses it.

tomllib keeps every prefix of a dotted name, so time and memory grow quadratically with its parts: 50,000 parts take
6 GB. Knows TOML's strings and comments, not the schema. Invariant: tomllib parses text within the limits in linear time
and memory; text beyond them cannot be a configuration.
"""

from __future__ import annotations

import re
from typing import Final

MAX_FILE_BYTES: Final = 256 * 1024
MAX_NAME_PARTS: Final = 8
"""Of one dotted name; the longest in the schema, groups.NAME.env.VARIABLE, has four."""
MAX_KEYS: Final = 1000
"""Assignments and table headers in a file, including inline tables."""

# Possessive and with optional closing quotes, so that no character is looked at twice; what never closes, tomllib
# refuses.
_TOKEN: Final = re.compile(
    r"""
      (?P<part> \"{3} (?: [^"\\] | \\. | "{1,2}(?!") )*+ "{0,5}
              | '{3} (?: [^'] | '{1,2}(?!') )*+ '{0,5}
              | " (?: [^"\\\n] | \\. )*+ "?
              | ' [^'\n]*+ '?
              | [A-Za-z0-9_+:-]++ )
    | (?P<blank> [ \t]++ )
    | (?P<dot> \. )
    | (?P<key> = | ^\[ )
    | (?P<other> \#[^\n]*+ | . )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def fault(text: str) -> str:
    """Return which limit `text` exceeds, or an empty string."""
    n_keys = n_dots = 0
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "dot":
                n_dots += 1
            case "key":
                n_keys, n_dots = n_keys + 1, 0
            case "other":
                n_dots = 0
            case _:  # a part, or blanks beside a dot
                continue
        if n_dots >= MAX_NAME_PARTS or n_keys > MAX_KEYS:
            line = text.count("\n", 0, token.start()) + 1
            if n_keys > MAX_KEYS:
                return f"has more than {MAX_KEYS} keys (line {line})"
            return f"has a dotted name of more than {MAX_NAME_PARTS} parts (line {line})"
    return ""
