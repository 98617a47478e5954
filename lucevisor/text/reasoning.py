"""Reasoning before an answer: its tags, its grammar, and a budget after which it is closed by force."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lucevisor.text.grammar.matcher import Matcher
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around reasoning; `label`: a word after the opening tag that is not part of it. `inline`: the opening
    tag opens reasoning at any position, not only at the start of an answer. Where reasoning and answer are messages
    with headers, `answer` is that of the answer, and `between` comes before the header of a message that follows
    another."""

    open: str
    close: str
    label: str = ""
    inline: bool = False
    between: str = ""
    answer: str = ""

    @property
    def opening(self) -> str:
        """What a prompt writes before reasoning."""
        return self.open if self.answer else self.open + (self.label or "\n")

    @property
    def closing(self) -> str:
        """What stands between reasoning and the text of an answer."""
        return f"{self.close}{self.between}{self.answer}" if self.answer else f"\n{self.close}\n\n"


THINK: Final = ReasoningTags("<think>", "</think>")
CHANNEL: Final = ReasoningTags("<|channel>", "<channel|>", label="thought\n", inline=True)


def after_reasoning(rules: Rules, answer: str, tags: ReasoningTags | None, *, inside: bool) -> str:
    """Return an expression for any reasoning, then ``answer``, with its header; ``inside``: the prompt ends
    inside it."""
    if tags is None:
        return answer
    if tags.answer:
        thought = rules.add(f"{rules.until(tags.close, markers=True)} {rules.text(tags.between)}")
        thoughts = f"({rules.text(tags.open)} {thought})* {answer}"
        return f"{thought} {thoughts}" if inside else thoughts
    thought = rules.add(f"{rules.until(tags.close, markers=True)} /\\n{{0,2}}/")
    return f"{thought} {answer}" if inside else f"({rules.text(tags.open)} {thought})? {answer}"


@dataclass(frozen=True, slots=True)
class _State:
    """Position within an output. `tail`: bytes that may begin a tag; `fresh`: only whitespace so far; `n_forced`:
    tokens of the closing tag taken since the budget was exhausted."""

    inside: bool
    left: int
    tail: bytes = b""
    fresh: bool = True
    n_forced: int = 0


class ReasoningBudget:
    """Follows one output.  `inside`: the prompt ends inside reasoning; `inner`: what else the output must be."""

    def __init__(
        self, n_tokens: int, tags: ReasoningTags, tokenizer: Tokenizer, *, inside: bool, inner: Matcher | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = tags.open.encode(), tags.close.encode()
        self._inline = tags.inline
        self._ending = tokenizer.encode(tags.closing, parse_special=True)
        self._inner = inner
        self._state = _State(inside, n_tokens)
        self._lock = threading.Lock()
        self.row_bytes = -(-tokenizer.n_vocab // 8)
        self._n_taken = 0

    @property
    def n_tokens(self) -> int:
        return self._n_taken if self._inner is None else min(self._n_taken, self._inner.n_tokens)

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        """Take tokens and return masks as `Matcher.masks` does."""
        with self._lock:
            self._consume(tokens[self._n_taken - start :])
            if self._inner is not None:
                rows = self._inner.masks(start, tokens, drafts)
            else:
                rows = bytearray([0xFF]) * (self.row_bytes * (1 + len(drafts)))
            state = self._state
            for index in range(1 + len(drafts)):
                if (forced := self._forced(state)) is not None:
                    self._allow_only(rows, index, forced)
                    if index < len(drafts) and drafts[index] != forced:
                        break  # what follows a forbidden draft is not read
                if index < len(drafts):
                    state = self._after(state, drafts[index])
            return rows

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Take tokens as `masks` does; return how many `drafts` may follow them."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            self._consume(tokens[self._n_taken - start :])
            n_drafts = len(drafts) if self._inner is None else self._inner.n_valid(start, tokens, drafts)
            state = self._state
            for index in range(n_drafts):
                if self._forced(state) not in (None, drafts[index]):
                    return index
                state = self._after(state, drafts[index])
            return n_drafts
        finally:
            self._lock.release()

    def _consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._state = self._after(self._state, token)
            self._n_taken += 1

    def _forced(self, state: _State) -> int | None:
        spent = state.inside and state.left <= 0 and not _within_character(state.tail)
        if state.n_forced < len(self._ending) and (spent or state.n_forced):
            return self._ending[state.n_forced]
        return None

    def _after(self, state: _State, token: int) -> _State:
        forced = self._forced(state)
        n_forced = state.n_forced
        if forced is not None:  # a grammar inside may have had its way
            n_forced = n_forced + 1 if token == forced else len(self._ending)
        text = state.tail + self._tokenizer.token_bytes(token)
        if state.inside:
            if self._close in text:
                rest = text[text.index(self._close) + len(self._close) :]
                return replace(state, inside=False, tail=rest, fresh=False, n_forced=n_forced)
            return replace(state, left=state.left - 1, tail=text[-_kept(self._close) :], n_forced=n_forced)
        return self._after_text(replace(state, n_forced=n_forced), text)

    def _after_text(self, state: _State, text: bytes) -> _State:
        """Return the state after text outside reasoning, where the opening tag may count."""
        if self._inline:
            if self._open in text:
                return replace(state, inside=True, tail=text[text.index(self._open) + len(self._open) :])
            return replace(state, tail=text[-_kept(self._open) :])
        if not state.fresh:
            return replace(state, tail=b"")
        begun = text.lstrip()
        if begun.startswith(self._open):
            return replace(state, inside=True, fresh=False, tail=begun[len(self._open) :])
        return replace(state, tail=begun) if self._open.startswith(begun) else replace(state, fresh=False, tail=b"")

    def _allow_only(self, rows: bytearray, index: int, token: int) -> None:
        """Allow one token in a row, unless what else the output must be forbids it."""
        at = index * self.row_bytes
        if rows[at + token // 8] >> (token % 8) & 1:
            rows[at : at + self.row_bytes] = bytes(self.row_bytes)
            rows[at + token // 8] = 1 << (token % 8)


def _kept(tag: bytes) -> int:
    return max(len(tag) - 1, 3)


def _within_character(text: bytes) -> bool:
    for length in range(1, min(3, len(text)) + 1):
        byte = text[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
