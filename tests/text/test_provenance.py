"""A traced text is its plain text in all respects, and knows who wrote each character.

The oracle is the text itself: the template's own characters are upper case and `_`, foreign ones lower case and `-`, so
after any operation that only moves characters each of them still tells whose it is.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.text.provenance import TracedText, concatenate

OWN, FOREIGN = "AB_ ", "ab-\t"


def traced(text):
    """Mark each character by what it looks like."""
    return TracedText(text, bytes(character in OWN for character in text))


def check(result, expected):
    """The same plain value, and every traced character marked as it looks."""
    assert result == expected
    if isinstance(expected, (list, tuple)):
        for item, plain in zip(result, expected, strict=True):
            check(item, plain)
    elif isinstance(result, TracedText):
        assert result.origin == bytes(character in OWN for character in result)
    elif isinstance(result, str):
        pytest.fail(f"{result!r} lost its origin")


texts = st.text(alphabet=OWN + FOREIGN, max_size=12)
short = st.text(alphabet=OWN + FOREIGN, min_size=1, max_size=2)


@given(texts, texts, short, short, st.integers(-1, 3), st.integers(-13, 13), st.integers(-13, 13))
def test_operations_move_marks_with_their_characters(text, other, part, new, count, start, stop):
    marked, other_marked = traced(text), traced(other)
    check(marked + other_marked, text + other)
    check(marked * count, text * count)
    check(count * marked, count * text)
    check(marked[start:stop], text[start:stop])
    check(marked[::-1], text[::-1])
    check(list(marked), list(text))
    check(marked.strip(), text.strip())
    check(marked.strip(part), text.strip(part))
    check(marked.lstrip(part), text.lstrip(part))
    check(marked.rstrip(), text.rstrip())
    check(marked.removeprefix(part), text.removeprefix(part))
    check(marked.removesuffix(part), text.removesuffix(part))
    check(marked.split(), text.split())
    check(marked.split(None, count), text.split(None, count))
    check(marked.rsplit(None, count), text.rsplit(None, count))
    check(marked.split(part, count), text.split(part, count))
    check(marked.rsplit(part, count), text.rsplit(part, count))
    check(marked.partition(part), text.partition(part))
    check(marked.rpartition(part), text.rpartition(part))
    check(marked.replace(part, traced(new), count), text.replace(part, new, count))
    check(marked.join([other_marked, marked, traced(part)]), text.join([other, text, part]))
    check(concatenate([marked, other_marked]), text + other)
    check(str(marked), text)
    check(copy.deepcopy(marked), text)


@given(st.text(alphabet=OWN + FOREIGN + "\n\r\u2028", max_size=12), st.booleans())
def test_lines(text, keepends):
    marked = TracedText(text, bytes(character in OWN + "\n" for character in text))
    lines = marked.splitlines(keepends)
    assert lines == text.splitlines(keepends)
    assert all(line.origin == bytes(c in OWN + "\n" for c in line) for line in lines)


@given(texts)
def test_a_marked_string_behaves_as_a_plain_one(text):
    marked = traced(text)
    assert marked == text
    assert hash(marked) == hash(text)
    assert {text: 1}[marked] == 1
    assert (text in marked, marked in text, marked.startswith(text), len(marked)) == (True, True, True, len(text))
    assert isinstance(marked, str)


def test_plain_strings_count_as_foreign_on_either_side():
    own = TracedText.own("OWN")
    assert (own + "x").origin == b"\1\1\1\0"
    assert ("x" + own).origin == b"\0\1\1\1"
    assert own.replace("W", "ww").origin == b"\1\0\0\1"
    assert own.join(["x", "y"]).origin == b"\0\1\1\1\0"
    assert TracedText("abc").origin == b"\0\0\0"
    assert TracedText.of(own) is own


def test_a_change_of_case_keeps_marks_unless_it_changes_the_length():
    assert TracedText.own("abc").upper().origin == b"\1\1\1"
    assert (TracedText.own("a") + "b").title().origin == b"\1\0"
    assert ("A" + TracedText.own("B")).lower().origin == b"\0\1"
    assert ("a" + TracedText.own("B")).capitalize().origin == b"\0\1"
    assert not isinstance(TracedText.own("aß").upper(), TracedText)


@pytest.mark.parametrize(
    "operation",
    [
        lambda text: text % {"x": "y"},
        lambda text: text.format("y"),
        lambda text: text.translate({65: "x"}),
        lambda text: text.replace("", "-"),
        lambda text: text.center(20),
    ],
)
def test_what_cannot_be_followed_is_foreign(operation):
    result = operation(TracedText.own("A%(x)s{}"))
    assert not isinstance(result, TracedText) or not any(result.origin)
