"""A grammar in Lark's notation, put together rule by rule, with a model's markers as tokens. Text from outside enters
only as a quoted string or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lucevisor.text.grammar.forms import json_schema
from lucevisor.text.tokenizer import Tokenizer

ANYTHING = "/(.|\\n)*/"
"""Any text, without markers."""
LINE_END = '"\\n"?'
"""A line end or none."""


class Rules:
    """Rules added so far.  Methods return expressions for use in other rules."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines: list[str] = []
        self._n_names = 0
        self.parts: list[dict[str, Any]] = []  # grammars that rules refer to
        self._markers = re.compile("|".join(map(re.escape, tokenizer.markers)) or "(?!)")

    def add(self, expression: str, *, lazy: bool = False) -> str:
        """Add a rule; ``lazy``: it ends as early as it can."""
        name = self.reserve()
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Remove the rules added in the block if it raises."""
        n_lines, n_parts = len(self._lines), len(self.parts)
        try:
            yield
        except BaseException:
            del self._lines[n_lines:], self.parts[n_parts:]
            raise

    def terminal(self, expression: str) -> str:
        """Add a terminal: one regular expression, in which ``&`` and ``~`` may stand."""
        name = self.reserve().upper()
        self.define(name, expression)
        return name

    def reserve(self) -> str:
        """The name of a rule that ``define`` adds later, so that it may refer to itself."""
        self._n_names += 1
        return f"r{self._n_names}"

    def define(self, name: str, expression: str) -> None:
        self._lines.append(f"{name}: {expression}")

    def part(self, part: Mapping[str, Any]) -> str:
        """A whole grammar of its own."""
        name = f"part{len(self.parts)}"
        self.parts.append({**part, "name": name})
        return f"@{name}"

    def text(self, text: str) -> str:
        pieces, end = list[str](), 0
        for match in self._markers.finditer(text):
            pieces += [quoted(text[end : match.start()]), f"<[{self._tokenizer.token_id(match.group())}]>"]
            end = match.end()
        pieces.append(quoted(text[end:]))
        return " ".join(piece for piece in pieces if piece)

    def one_of(self, texts: Iterable[str]) -> str:
        return self.add(" | ".join(self.text(text) for text in texts))

    def json(self, schema: Mapping[str, Any], *, lenient: bool) -> str:
        return self.part(json_schema(schema, lenient=lenient))

    def until(self, tag: str, *, markers: bool = False) -> str:
        """Any text up to and including a tag; ``markers``: it may contain markers, but not the end of the answer."""
        token = self._first_marker(tag)
        if token is None or not markers:
            return self.ended(ANYTHING, tag)
        return f"{self._but(token)} {self.text(tag)}"

    def ended(self, terminal: str, tag: str) -> str:
        """Text of a terminal up to and with a tag."""
        if self._first_marker(tag) is None:
            return self.add(f"({terminal}) {quoted(tag)}", lazy=True)
        return f"{self.terminal(terminal)} {self.text(tag)}"

    def without(self, tag: str) -> str:
        """Any text, as long as a tag does not begin in it, if that is a marker."""
        token = self._first_marker(tag)
        return ANYTHING if token is None else self._but(token)

    def grammar(self, start: str) -> str:
        lark = "\n".join([f"start: {start}", *self._lines, ""])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.parts]})

    def _first_marker(self, tag: str) -> int | None:
        match = self._markers.match(tag)
        return self._tokenizer.token_id(match.group()) if match else None

    def _but(self, token: int) -> str:
        excluded = ",".join(str(i) for i in sorted({token, *self._tokenizer.eos_ids}))
        return self.add(f"<[^{excluded}]>*")


def quoted(text: str) -> str:
    """Return a text as an expression; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""
