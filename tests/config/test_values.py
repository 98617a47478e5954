"""Devices, splits, restart limits and loopback: what is taken, what is refused and what the refusal suggests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.config.strict import Refused, Text
from lucevisor.config.values import (
    Auto,
    DeviceName,
    DeviceRef,
    HubFile,
    LayerSplit,
    MaybeDevice,
    Ranges,
    RestartLimit,
    Restarts,
    WeightedSplit,
    hub_file,
    is_loopback,
)


def refused(kind, value):
    with pytest.raises(Refused) as caught:
        kind.read(value)
    return caught.value


def test_devices():
    assert DeviceName().read("cuda:0") == DeviceName().read(Text("cuda:0")) == DeviceRef("cuda", 0)
    assert str(DeviceRef("left", 12)) == "left:12"
    assert MaybeDevice().read("") is None
    assert MaybeDevice().read("hip:1") == DeviceRef("hip", 1)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("cuda:01", "cuda:1"),
        ("cuda:+1", "cuda:1"),
        ("cuda: 1", "cuda:1"),
        (" cuda:1", "cuda:1"),
        ("CUDA:1", "cuda:1"),
        ("cuda", "cuda:0"),
        ("cuda:", "cuda:0"),
        ("cuda:000", "cuda:0"),
        ("cuda:-1", ""),
        ("cuda:1000", ""),
        ("cuda:1.0", ""),
        ("cuda:0x1", ""),
        ("cuda:1:2", ""),
        (":0", ""),
        ("", ""),
        ("cuda:¹", ""),
        ("cuda:٣", ""),
        ("a" * 33 + ":0", ""),
    ],
)
def test_devices_that_are_refused(text, near):
    hint = refused(DeviceName(), text).hint
    assert hint == (f"nearest: {near}" if near else "such as cuda:0; an index is decimal digits, 0 to 999")


@pytest.mark.parametrize("value", [0, True, ["cuda:0"], {"cuda": 0}, 1.5])
def test_a_device_is_text(value):
    assert "not GROUP:INDEX" in refused(DeviceName(), value).why


@pytest.mark.parametrize(
    ("toml", "text", "split"),
    [
        ("auto", "auto", Auto()),
        ([0.5, 0.5], "0.5,0.5", WeightedSplit((0.5, 0.5))),
        ([1, 2], "1,2", WeightedSplit((1.0, 2.0))),
        ([0.08, 0.46, 0.46], "0.08,0.46,0.46", WeightedSplit((0.08, 0.46, 0.46))),
        (["0-4", "4-8"], "0-4,4-8", Ranges(((0, 4), (4, 8)))),
        (["0-64"], "0-64", Ranges(((0, 64),))),
    ],
)
def test_splits(toml, text, split):
    assert LayerSplit().read(toml) == LayerSplit().read(Text(text)) == split
    assert LayerSplit().read(LayerSplit().write(split)) == split


@pytest.mark.parametrize(
    "value",
    [
        [0.5, 0.0],
        [0.5, -0.1],
        [0.5, float("nan")],
        [0.5, float("inf")],
        [0.5, 10**400],
        [0.5, True],
        [0.5, None],
        [0.5, "0.5"],
        [0.5, [0.5]],
        [0.5, "0-4"],
        Text("0.5,   -1"),
        Text("0.5,-1"),
        Text("0.5,+5"),
        Text("0.5,nan"),
        Text("0.5,inf"),
        Text("0.5,1e400"),
        Text("0.5,0x10"),
        Text("0.5,1_000"),
        Text("0.5,0"),
    ],
)
def test_a_wrong_weight_is_named_by_its_place(value):
    assert refused(LayerSplit(), value).inside == "[1]"


@pytest.mark.parametrize(
    "value",
    [Text("0.3,"), Text(",0.3"), Text("0.3,,0.7"), Text(""), Text(" "), "", "half", "0.5,0.5", [], 0.5, True, {}],
)
def test_what_is_no_split_at_all(value):
    refused(LayerSplit(), value)


def test_weights_whose_sum_overflows_are_refused():
    assert "sum" in refused(LayerSplit(), [1e308, 1e308]).why


@pytest.mark.parametrize(
    ("ranges", "place", "why", "near"),
    [
        (["1-4", "4-8"], "[0]", "does not start at layer 0", "0-4"),
        (["0-4", "5-8"], "[1]", "does not start at layer 4", "4-8"),
        (["0-4", "3-8"], "[1]", "does not start at layer 4", "4-8"),
        (["0-4", "4-4"], "[1]", "is empty", "4-5"),
        (["0-4", "4-2"], "[1]", "is empty", "4-5"),
        (["0-0"], "[0]", "is empty", "0-1"),
        (["0-4", "4 - 8"], "[1]", "is not a layer range", ""),
        (["0-4", "4-"], "[1]", "is not a layer range", ""),
        (["0-4", "04-8"], "[1]", "is not a layer range", ""),
        (["0-4", "4–8"], "[1]", "is not a layer range", ""),
        (["0-4", "0.5"], "[1]", "is not a layer range", ""),
    ],
)
def test_ranges_start_at_zero_and_leave_no_gap(ranges, place, why, near):
    caught = refused(LayerSplit(), ranges)
    assert caught.inside == place
    assert why in caught.why
    assert near in caught.hint


def test_restart_limits():
    assert Restarts().read("5/60s") == RestartLimit(5, 60)
    assert Restarts().read(Text("0/1s")) == RestartLimit(0, 1)
    assert Restarts().write(RestartLimit(5, 60)) == "5/60s"
    for value in ("5/60", "5", "5/0s", "5 / 60s", "+5/60s", "05/60s", "5/1m", "-1/60s", "", 5, ["5/60s"]):
        assert refused(Restarts(), value)


def test_hub_files():
    assert hub_file("hf:owner/repo/a.gguf") == HubFile("owner", "repo", "a.gguf")
    assert hub_file("hf:o/r-GGUF/Q4_K_M/a-00001-of-00002.gguf").file == "Q4_K_M/a-00001-of-00002.gguf"
    assert hub_file("hf:owner/repo/a.gguf").repo_id == "owner/repo"
    for text in (
        "hf:",
        "hf:owner",
        "hf:owner/repo",
        "hf:owner/repo/",
        "hf:owner/repo/../x",
        "hf:/repo/x",
        "hf:o o/r/x",
        "hf:o/r//x",
        "hf:../r/x",
    ):
        with pytest.raises(Refused, match="not a file of the hub"):
            hub_file(text)


@settings(deadline=None)
@given(address=st.ip_addresses())
def test_loopback_of_addresses_is_what_the_standard_library_says(address):
    mapped = getattr(address, "ipv4_mapped", None)
    assert is_loopback(str(address)) == (mapped or address).is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("192.168.1.5", False),
        ("box.local", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


@settings(deadline=None)
@given(weights=st.lists(st.floats(min_value=1e-300, max_value=1e300), min_size=1, max_size=6))
def test_weights_read_back_from_text_exactly(weights):
    split = WeightedSplit(tuple(weights))
    assert LayerSplit().read(Text(",".join(repr(weight) for weight in weights))) == split
    assert LayerSplit().read(LayerSplit().write(split)) == split


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_contiguous_ranges_are_always_taken(sizes):
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    ranges = tuple(zip([0, *stops], stops, strict=False))
    assert LayerSplit().read([f"{start}-{stop}" for start, stop in ranges]) == Ranges(ranges)
