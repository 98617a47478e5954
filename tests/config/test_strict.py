"""Strict reading of single values: what is taken, what is refused, and that nothing else is ever raised."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.config.strict import (
    MAX_INTEGER,
    Choice,
    Flag,
    Line,
    OrAuto,
    Real,
    Refused,
    Several,
    Size,
    Text,
    Whole,
    choose,
    nearest,
    split_list,
)

NOT_NUMBERS = [
    "",
    " ",
    "   -1",
    "-1 ",
    "+5",
    "0x10",
    "0b1",
    "0o7",
    "1_000",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1e400",
    "1;5",
    "٣",
    "１",
    "--1",
    "1.",
    ".5",
    "1e",
    "\t1",
    "1\n",
    "∞",
    "007",
    "00",
    "-01",
    "1" * 5000,
]
KINDS = [
    Flag(),
    Whole(-5, 10),
    Whole(0),
    Real(0.0),
    Real(0.0, 1.0, open_low=True),
    Choice(("auto", "console", "json")),
    OrAuto(Whole(1)),
    Size(),
    Line(),
    Line(may_be_empty=False),
    Several(Whole(0, 3)),
    Several(Choice(("a", "b"))),
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("text", NOT_NUMBERS)
@pytest.mark.parametrize(
    "kind", [Whole(-(10**9)), Real(-math.inf), OrAuto(Whole(0)), Size(), Several(Whole(0))], ids=str
)
def test_text_that_is_no_plain_number_is_refused(kind, text):
    with pytest.raises(Refused):
        kind.read(Text(text))


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("-7", -7), ("65535", 65535)])
def test_whole_numbers_from_text(text, value):
    assert Whole(-10, 65535).read(Text(text)) == value


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0.0), ("0.25", 0.25), ("1e-3", 0.001), ("2E+2", 200.0), ("-0.5", -0.5)]
)
def test_numbers_from_text(text, value):
    assert Real(-1000.0).read(Text(text)) == value


def test_toml_integers_are_numbers_and_booleans_are_not():
    assert Real(0.0).read(3) == 3.0
    assert isinstance(Real(0.0).read(3), float)
    for kind in (Real(0.0), Whole(0), Size(), OrAuto(Whole(0))):
        with pytest.raises(Refused, match="is true or false"):
            kind.read(True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(Refused, match="not finite"):
        Real(-math.inf).read(value)


def test_whole_numbers_are_not_taken_from_floats_or_quotes():
    for value in (8.0, "8", [8]):
        with pytest.raises(Refused, match="not an integer"):
            Whole(0).read(value)


@pytest.mark.parametrize(("value", "near"), [(-1, "0"), (65536, "65535"), (10**30, "65535")])
def test_a_number_out_of_range_is_told_the_nearest(value, near):
    with pytest.raises(Refused) as refused:
        Whole(0, 65535).read(value)
    assert refused.value.hint == f"nearest: {near}"


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        (0, 0),
        (1048576, 2**20),
        ("1048576", 2**20),
        ("1KiB", 2**10),
        ("512MiB", 2**29),
        ("20GiB", 20 * 2**30),
        ("0GiB", 0),
    ],
)
def test_sizes(value, n_bytes):
    assert Size().read(value) == n_bytes
    assert Size().read(Text(value)) == n_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("10 GiB", "nearest: 10GiB"),
        ("10GB", "nearest: 10GiB"),
        ("10gib", "nearest: 10GiB"),
        ("5m", "nearest: 5MiB"),
        ("7kb", "nearest: 7KiB"),
        ("1.5GiB", "such as"),
        ("-1GiB", "such as"),
        ("GiB", "such as"),
        ("1TiB", "such as"),
        ("", "such as"),
        ("99999999999GiB", f"nearest: {MAX_INTEGER}"),
    ],
)
def test_sizes_that_are_refused_and_what_they_were_meant_to_be(text, hint):
    with pytest.raises(Refused) as refused:
        Size().read(text)
    assert hint in refused.value.hint


def test_flags():
    assert Flag().read(True) is True
    assert Flag().read(Text("false")) is False
    for value in ("true", 1, 0, Text("True"), Text("yes"), Text("1"), Text("")):
        with pytest.raises(Refused):
            Flag().read(value)


def test_a_wrong_word_is_told_the_nearest():
    with pytest.raises(Refused) as refused:
        Choice(("auto", "console", "json")).read("jsn")
    assert "nearest: json" in refused.value.hint
    with pytest.raises(Refused) as refused:
        OrAuto(Whole(1)).read("aut")
    assert "nearest: auto" in refused.value.hint


def test_lines():
    assert Line().read("") == ""
    assert Line().read("ein Bär") == "ein Bär"
    for value in (" x", "x ", "a\nb", "a\0", "\x7f", "\ud800", "\t"):
        with pytest.raises(Refused):
            Line().read(value)
    with pytest.raises(Refused, match="is empty"):
        Line(may_be_empty=False).read("")


def test_lists_from_toml_and_from_text():
    kind = Several(Whole(0, 9))
    assert kind.read([1, 2]) == kind.read(Text("1,2")) == (1, 2)
    assert kind.read([]) == kind.read(Text("[]")) == ()
    assert kind.write((1, 2)) == [1, 2]


@pytest.mark.parametrize("text", ["", ",", "1,", ",1", "1,,2", "1, 2", " 1"])
def test_lists_with_empty_or_blank_items_are_refused(text):
    with pytest.raises(Refused):
        Several(Whole(0, 9)).read(Text(text))


def test_an_item_is_named_by_its_place():
    with pytest.raises(Refused) as refused:
        Several(Whole(0, 9)).read([1, "x"])
    assert (refused.value.inside, refused.value.value) == ("[1]", "x")
    with pytest.raises(Refused, match="is listed twice") as refused:
        Several(Whole(0, 9)).read([1, 2, 1])
    assert refused.value.inside == "[2]"


def test_split_list_keeps_every_item():
    assert split_list("a,b,c") == ["a", "b", "c"]


def test_nearest_ignores_case_and_distance():
    assert nearest("PORT", ["port", "host"]) == "port"
    assert nearest("zzzz", ["port", "host"]) == ""
    assert choose("zzzz", ["port", "host"], "keys") == "keys: port, host"


@settings(deadline=None, max_examples=300)
@given(value=anything, kind=st.sampled_from(KINDS))
def test_any_value_is_read_or_refused_and_reads_back(value, kind):
    try:
        read = kind.read(value)
    except Refused:
        return
    assert kind.read(kind.write(read)) == read


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(max_size=30)
    | st.from_regex(r"[+-]?[0-9_]{0,4}\.?[0-9]{0,3}([eE][+-]?[0-9]{1,3})?([KMG]i?B)?", fullmatch=True),
    kind=st.sampled_from(KINDS),
)
def test_any_text_is_read_or_refused_and_reads_back(text, kind):
    try:
        read = kind.read(Text(text))
    except Refused:
        return
    assert kind.read(kind.write(read)) == read
