"""Stop strings are found wherever the stream was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lucevisor.text.stop import StopMatcher


def expected(stops, text):
    """What a reader who looks after every single character gives out."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text, places):
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="abc\n", max_size=30),
    st.lists(st.integers(0, 100), max_size=8),
)
@example(["bcd", "abcde"], "abcde", [])
@example(["bcd", "abcde"], "abcde", [1, 2, 3, 4])
def test_the_first_complete_stop_wins_under_any_cut(stops, text, places):
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(piece) for piece in cut(text, places)) + matcher.flush()
    assert (given_out, matcher.matched) == expected(stops, text)


def test_text_is_held_back_no_longer_than_needed():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a", "bE", "N", "x", "EN")] == ["a", "b", "", "ENx", ""]
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("\ntwo") == ""
    assert matcher.matched == "\n\n"
    assert matcher.push("three") + matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["a", ""])
