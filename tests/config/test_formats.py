"""Values of single keys: what is taken, what is refused, and what the refusal suggests."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.config import Auto, DeviceRef, HubFile, Ranges, RestartLimit, WeightedSplit, is_loopback
from lucevisor.config.formats import MAX_INTEGER, InvalidValue, hub_file
from lucevisor.config.schema import Text, keys_of
from lucevisor.config.sections import SECTIONS, GroupConfig

FOLDER = Path("/etc/box")
SECTION_CLASSES = {**SECTIONS, "groups": GroupConfig}
KEYS = {f"{name}.{key}": field for name, kind in SECTION_CLASSES.items() for key, field in keys_of(kind).items()}
SPLIT = "placement.target_layer_split"
NOT_NUMBERS = [
    *("", " ", "   -1", "-1 ", "+5", "0x10", "0b1", "0o7", "1_000", "nan", "inf", "-inf", "1e400", "1;5", "٣", "１"),
    *("--1", "1.", ".5", "1e", "\t1", "1\n", "∞", "007", "00", "-01", "1" * 5000),
]


def read(key, value):
    return KEYS[key].read(value, FOLDER)


def refusal(key, value):
    with pytest.raises(InvalidValue) as caught:
        read(key, value)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("text", NOT_NUMBERS)
@pytest.mark.parametrize("key", ["server.port", "recovery.hold_s", "engine.pages", "cache.memory", "groups.cores"])
def test_text_that_is_no_plain_number_is_refused(key, text):
    refusal(key, Text(text))


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("server.port", 8081, 8081),
        ("server.port", Text("0"), 0),
        ("recovery.hold_s", 3, 3.0),
        ("recovery.hold_s", Text("2E+2"), 200.0),
        ("recovery.hold_s", Text("1e-3"), 0.001),
        ("server.allow_open", Text("true"), True),
        ("engine.pages", Text("auto"), "auto"),
        ("groups.cores", Text("1,2"), (1, 2)),
        ("groups.cores", Text("[]"), ()),
        ("log.level", "debug", "debug"),
        ("model.name", "ein Bär", "ein Bär"),
        ("model.name", Text("7"), "7"),
        ("cache.memory", 1048576, 2**20),
        ("cache.memory", "1048576", 2**20),
        ("cache.memory", Text("512MiB"), 2**29),
        ("cache.memory", "20GiB", 20 * 2**30),
        ("cache.memory", "0GiB", 0),
        ("placement.target_devices", ["cuda:0", "left:12"], (DeviceRef("cuda", 0), DeviceRef("left", 12))),
        ("placement.target_devices", Text("cuda:0,hip:1"), (DeviceRef("cuda", 0), DeviceRef("hip", 1))),
        ("draft.device", "", None),
        ("draft.device", "hip:1", DeviceRef("hip", 1)),
        (SPLIT, "auto", Auto()),
        (SPLIT, [1, 2.5], WeightedSplit((1.0, 2.5))),
        (SPLIT, Text("0.08,0.46,0.46"), WeightedSplit((0.08, 0.46, 0.46))),
        (SPLIT, ["0-4", "4-8"], Ranges(((0, 4), (4, 8)))),
        (SPLIT, Text("0-64"), Ranges(((0, 64),))),
        ("recovery.restart_limit", "5/60s", RestartLimit(5, 60)),
        ("recovery.restart_limit", Text("0/1s"), RestartLimit(0, 1)),
        ("pflash.curve", ["9:0.5", "10:1"], ((9, 0.5), (10, 1.0))),
        ("groups.visible_devices", [0, "GPU-4f1b2c3d-0000-1111", "MIG-GPU-4f1b/1/0"],
         ("0", "GPU-4f1b2c3d-0000-1111", "MIG-GPU-4f1b/1/0")),
        ("groups.env", {"A": "1", "_b2": " x "}, {"A": "1", "_b2": " x "}),
        ("groups.python", "python3.12", "python3.12"),
        ("groups.python", "venv/bin/python", "/etc/box/venv/bin/python"),
        ("groups.python", "", ""),
        ("cache.dir", "python3.12", "/etc/box/python3.12"),
        ("cache.dir", "hf:owner", "/etc/box/hf:owner"),
        ("model.path", "../x.gguf", "/etc/box/../x.gguf"),
        ("model.path", "/models/x.gguf", "/models/x.gguf"),
        ("model.path", "hf:owner/repo/x.gguf", "hf:owner/repo/x.gguf"),
        ("model.path", "./hf:odd", "/etc/box/hf:odd"),
    ],
)  # fmt: skip
def test_values_that_are_taken(key, value, result):
    taken = read(key, value)
    assert taken == result
    assert type(taken) is type(result) or key == "groups.env"


@pytest.mark.parametrize(
    ("key", "values", "why"),
    [
        ("server.port", (8.0, "8", [8], True, None), "not an integer"),
        ("recovery.hold_s", ("1", True, [1.0]), "not a number"),
        ("server.allow_open", ("true", 1, 0, Text("True"), Text("yes"), Text("1"), Text("")), "not true or false"),
        ("model.name", (" x", "x "), "has surrounding spaces"),
        ("model.name", ("a\nb", "a\0", "\x7f", "\ud800"), "control character"),
        ("model.path", ("",), "is empty"),
        ("model.path", ("hf:owner",), "is not a file of the hub"),
        ("groups.cores", (Text(""), Text(","), Text("1,"), Text(",1"), Text("1,,2")), "empty"),
        ("placement.target_devices", ([0], [True], [["cuda:0"]], [1.5]), "not GROUP:INDEX"),
        (SPLIT, ("half", "0.5,0.5", ""), "is not auto, weights or layer ranges"),
        (SPLIT, (0.5, True, {}), "not auto, weights or layer ranges"),
        (SPLIT, ([], Text("0.3,"), Text("")), "empty"),
        (SPLIT, ([1e307] * 40,), "sum that is not finite"),
        ("recovery.restart_limit", ("5/60", "5", "5/0s", "+5/60s", "05/60s", "5/1m", "-1/60s", ""), "COUNT/SECONDSs"),
        ("recovery.restart_limit", (5, ["5/60s"]), "not COUNT/SECONDSs"),
        ("pflash.curve", (["5"], ["5:"], ["0:0.5"], ["5:+1"]), "is not TOKENS:SHARE"),
        ("server.host", ("", "[::1]", "127.0.0.1:80", "127.1", "0", "2130706433", "0x7f000001", "1.2.3.256", "a..b",
                         "-a", "a-", "a b", "http://x", "x/y", "é.org", "a" * 64, "a." * 130 + "a"), ""),
        ("groups.visible_devices", (["0,1"], ["-1"], [""], ["01"], [" 0"], [-1], [True], [1.0], [10**5000]), ""),
    ],
)  # fmt: skip
def test_values_that_are_refused(key, values, why):
    for value in values:
        assert why in refusal(key, value).why, value


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("server.port", 65536, "nearest: 65535"),
        ("server.port", -1, "nearest: 0"),
        ("server.port", 10**30, "nearest: 65535"),
        ("log.format", "jsn", "nearest: json"),
        ("engine.pages", "aut", "nearest: auto"),
        ("engine.pages", "lots", "or auto"),
        ("server.host", "[::1]", "nearest: ::1"),
        ("cache.memory", "10 GiB", "nearest: 10GiB"),
        ("cache.memory", "10GB", "nearest: 10GiB"),
        ("cache.memory", "5m", "nearest: 5MiB"),
        ("cache.memory", "1.5GiB", "such as"),
        ("cache.memory", "1TiB", "such as"),
        ("cache.memory", "99999999999GiB", f"nearest: {MAX_INTEGER}"),
        ("draft.device", "cuda:01", "nearest: cuda:1"),
        ("draft.device", "cuda:+1", "nearest: cuda:1"),
        ("draft.device", " CUDA: 1", "nearest: cuda:1"),
        ("draft.device", "cuda", "nearest: cuda:0"),
        ("draft.device", "cuda:000", "nearest: cuda:0"),
        ("draft.device", "cuda:1000", "an index is decimal digits, 0 to 999"),
        ("draft.device", "cuda:٣", "an index is decimal digits, 0 to 999"),
        ("draft.device", "a" * 33 + ":0", "an index is decimal digits, 0 to 999"),
    ],
)
def test_the_nearest_value_is_suggested(key, value, hint):
    assert hint in refusal(key, value).hint


@pytest.mark.parametrize(
    ("key", "value", "inside", "hint"),
    [
        ("groups.cores", [1, "x"], "[1]", "integer 0..8191"),
        ("groups.cores", [1, 2, 1], "[2]", "remove one of the two"),
        ("server.cors_origins", ["*", "HTTPS://Example.org/"], "[1]", "nearest: https://example.org"),
        ("server.cors_origins", ["*", "example.org"], "[1]", "such as http://localhost:3000"),
        ("server.cors_origins", ["*", "http://u@x"], "[1]", ""),
        ("groups.env", {"1A": "x"}, ".1A", "no digit first"),
        ("groups.env", {"A-B": "x"}, ".A-B", "no digit first"),
        ("groups.env", {"A": 1}, ".A", "quotes"),
        ("groups.env", {"A": "x\0"}, ".A", "remove it"),
        ("groups.env", {"PYTHONPATH": "x"}, ".PYTHONPATH", "own environment"),
        *((SPLIT, [0.5, weight], "[1]", "weights") for weight in (0.0, -0.1, math.nan, math.inf, 10**400, True, "0.5")),
        *((SPLIT, Text(f"0.5,{weight}"), "[1]", "weights") for weight in ("-1", "+5", "nan", "1e400", "1_000", "0")),
        (SPLIT, ["1-4", "4-8"], "[0]", "nearest: 0-4"),
        (SPLIT, ["0-4", "3-8"], "[1]", "nearest: 4-8"),
        (SPLIT, ["0-4", "4-2"], "[1]", "nearest: 4-5"),
        (SPLIT, ["0-4", "04-8"], "[1]", "START-STOP"),
        (SPLIT, ["0-4", 0.5], "[1]", "START-STOP"),
    ],
)  # fmt: skip
def test_what_is_wrong_inside_a_value_is_named_by_its_place(key, value, inside, hint):
    error = refusal(key, value)
    assert error.inside == inside
    assert hint in error.hint


def test_hub_files():
    assert hub_file("hf:o/r-GGUF/Q4_K_M/a.gguf") == HubFile("o", "r-GGUF", "Q4_K_M/a.gguf")
    assert hub_file("hf:owner/repo/a.gguf").repo_id == "owner/repo"
    for text in ("hf:", "hf:owner/repo", "hf:owner/repo/", "hf:o/r/../x", "hf:/repo/x", "hf:o o/r/x", "hf:o/r//x"):
        with pytest.raises(InvalidValue, match="not a file of the hub"):
            hub_file(text)


@settings(deadline=None)
@given(address=st.ip_addresses())
def test_loopback_of_addresses_is_what_the_standard_library_says(address):
    mapped = getattr(address, "ipv4_mapped", None)
    assert is_loopback(str(address)) == (mapped or address).is_loopback


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
number_like = st.from_regex(r"[+-]?[0-9_]{0,4}\.?[0-9]{0,3}([eE][+-]?[0-9]{1,3})?([KMG]i?B)?", fullmatch=True)


@settings(deadline=None, max_examples=400)
@given(value=anything | st.text(max_size=30).map(Text) | number_like.map(Text), key=st.sampled_from(sorted(KEYS)))
def test_any_value_is_read_or_refused_and_reads_back(value, key):
    try:
        result = read(key, value)
    except InvalidValue:
        return
    assert KEYS[key].read(KEYS[key].write(result), FOLDER) == result
