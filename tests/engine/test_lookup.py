"""Prompt lookup: the index against a naive search over all positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.spec_decode.ngram import (
    INDEX_TOKENS,
    MAX_CANDIDATES,
    MAX_MATCH,
    MIN_MATCH,
    NgramLookup,
    NgramMatch,
)
from lucevisor.kv.tokens import TokenBuffer
from tests.costs import lines_of

ALPHABET = 4
"""Ids of the naive comparison: their n-grams all have buckets of their own (asserted below)."""


def naive(tokens: Sequence[int]) -> NgramMatch | None:
    """The longest of the matches at the newest occurrences of the last tokens, by trying every position."""
    tokens, best = list(tokens), None
    n = len(tokens)
    occurrences = [s for s in range(n - 1, MIN_MATCH - 1, -1) if tokens[s - MIN_MATCH : s] == tokens[n - MIN_MATCH :]]
    for start in occurrences[:MAX_CANDIDATES]:
        length = max(m for m in range(1, min(start, MAX_MATCH) + 1) if tokens[start - m : start] == tokens[n - m :])
        if best is None or length > best.length:
            best = NgramMatch(start, length)
    return best


def indexed(tokens: Sequence[int]) -> NgramLookup:
    lookup = NgramLookup(TokenBuffer(tokens))
    while lookup.index():
        pass
    return lookup


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=120))
def test_matches_are_those_of_a_naive_search(tokens: list[int]) -> None:
    assert indexed(tokens).match() == naive(tokens)


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=60), st.lists(st.integers(0, ALPHABET - 1), max_size=60))
def test_a_growing_sequence_is_indexed_as_a_whole_one(prompt: list[int], answer: list[int]) -> None:
    tokens = TokenBuffer(prompt)
    lookup = NgramLookup(tokens)
    for token in answer:
        lookup.index(7)
        tokens.append(token)
    while lookup.index(5):
        pass
    assert lookup.match() == naive(tokens)
    assert lookup._older == indexed(tokens)._older


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 50), max_size=200))
def test_a_match_is_one_whatever_the_ids(tokens: list[int]) -> None:
    """Buckets may be shared: candidates of other n-grams are no matches."""
    tokens = tokens * 2
    match = indexed(tokens).match()
    if match is None:
        assert len(tokens) <= MIN_MATCH + 1
    else:
        assert MIN_MATCH <= match.length <= MAX_MATCH
        assert tokens[match.start - match.length : match.start] == tokens[len(tokens) - match.length :]


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], [4, 5, 6, 9]),
        ([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], [5, 0, 1, 2]),  # the newest of equal ones
        ([7, 1, 2, 3, 4, 0, 1, 2, 3, 5, 7, 1, 2, 3], [4, 0, 1, 2]),  # the longest
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),  # the repetition goes on behind the end
        ([5, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 1, 2], []),
        ([], []),
    ],
)
def test_drafts_repeat_what_followed(tokens: list[int], drafts: list[int]) -> None:
    lookup = indexed(tokens)
    match = lookup.match()
    assert (lookup.continuation(match, 4) if match is not None else []) == drafts


def test_a_long_prompt_is_indexed_in_slices() -> None:
    n = 262_144
    tokens = TokenBuffer([(i * i + i // 7) % 150_000 for i in range(n)])
    lookup = NgramLookup(tokens)
    n_calls = 0
    while lookup.n_waiting:
        n_waiting = lookup.n_waiting
        assert lines_of(lookup.index) < 8 * INDEX_TOKENS  # it holds up the event loop
        assert 0 < n_waiting - lookup.n_waiting <= INDEX_TOKENS
        n_calls += 1
    assert n_calls == -(-(n - MIN_MATCH) // INDEX_TOKENS)
    assert len(lookup._older) * lookup._older.itemsize < 2 << 20


def test_a_text_of_one_token_costs_few_candidates() -> None:
    tokens = TokenBuffer([1] * 20_000 + [2, 1, 1, 1])
    lookup = indexed(tokens)
    assert lines_of(lookup.match) < 2_000  # a walk of the chain would take 20,000 comparisons
