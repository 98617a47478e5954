"""What ``lucevisor plan`` shows: the table, the text and the JSON say what the placement says."""

from __future__ import annotations

import json

import pytest

from lucevisor.model.families import open_spec
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.planner import plan
from lucevisor.placement.report import as_json, rows, table, text
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.protocol.loading import DeviceInfo
from tests.placement.made import DEMO, configure, cpu, gpu

DEVICES = ["cuda:0", "left:0", "left:1"]


@pytest.fixture(scope="module")
def spec():
    return open_spec(DEMO)


@pytest.fixture
def fitting(spec, tmp_path) -> Placement:
    result = plan(spec, configure(tmp_path, DEVICES, [1, 2, 1]), {"cuda": [gpu(name="RTX 3090")], "left": [cpu()]})
    assert isinstance(result, Placement)
    return result


@pytest.fixture
def short(spec, tmp_path) -> Infeasible:
    tight = DeviceInfo(0, "RTX 3090", 24 << 30, 10 << 20, "sm_86", gpu().dtypes)
    result = plan(spec, configure(tmp_path, DEVICES, [1, 2, 1]), {"cuda": [tight], "left": [cpu()]})
    assert isinstance(result, Infeasible)
    return result


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"),
        (1023 << 20, "1023.0 MiB"), (5 << 30, "5.00 GiB"), (3 << 40, "3.00 TiB"), (5000 << 40, "5000.0 TiB"),
        (-(3 << 20), "-3.00 MiB"), ((1 << 30) - 1, "1.00 GiB"), (1048575, "1.00 MiB"), (10239, "10.0 KiB"),
    ],
)  # fmt: skip
def test_sizes(n_bytes, shown):
    assert format_bytes(n_bytes) == shown


def test_a_row_for_each_shard(fitting):
    shown = rows(fitting)
    assert [(r.group, r.device, r.layers, r.verdict) for r in shown] == [
        ("cuda", "cuda:0 RTX 3090", "[0,2)", "fits"),
        ("left", "left:0 CPU", "[2,6)", "fits"),
        ("left", "left:1 CPU", "[6,8)", "fits"),
    ]
    for row, device in zip(shown, fitting.devices, strict=True):
        assert row.weights == format_bytes(device.weight_bytes)
        assert row.state == format_bytes(device.state_bytes)
        assert row.free == format_bytes(device.free_bytes)


def test_columns_stand_below_each_other(fitting):
    lines = table(fitting).splitlines()
    assert len(lines) == 4
    start, end = lines[0].index("DEVICE"), lines[0].index("WEIGHTS") + len("WEIGHTS")
    for line in lines[1:]:
        assert line[start - 1] == " "
        assert line[start : start + 2] in ("cu", "le")
        assert line[end - 1] == "B"
        assert line[end] == " "
        assert line == line.rstrip()


def test_the_text_holds_reasons_and_no_complaint(fitting):
    shown = text(fitting)
    assert shown.startswith("lucevisor-demo-22m (qwen35, 8 layers, Q4_K) on 3 devices, 2 stages\n")
    for reason in fitting.reasons:
        assert reason in shown
    assert "host: 16.0 GiB are free for left:0, left:1 together; 1.60 GiB of that are kept free" in shown
    assert "It does not fit" not in shown


def test_what_is_short_is_shown_with_advice(short):
    [shortage] = short.shortages
    assert [r.verdict for r in rows(short)] == [f"short by {format_bytes(shortage.short_bytes)}", "fits", "fits"]
    shown = text(short)
    assert f"cuda:0 is {format_bytes(shortage.short_bytes)} short: cuda:0 would take" in shown
    for line in short.advice:
        assert line in shown


def test_unknown_memory_is_shown_as_such(spec, tmp_path):
    result = plan(spec, configure(tmp_path, DEVICES))
    assert {(r.free, r.verdict) for r in rows(result)} == {("unknown", "unknown")}
    assert as_json(result)["fits"] is None


def test_json_holds_the_numbers(fitting, short):
    shown = json.loads(json.dumps(as_json(fitting)))
    assert shown["fits"] is True
    assert shown["model"] == {"name": "lucevisor-demo-22m", "architecture": "qwen35", "layers": 8, "quant": "Q4_K"}
    pools = fitting.pools
    assert shown["pages"] == {
        "full": pools.full_pages,
        "resident": None,
        "window": 0,
        "states": pools.states,
        "host_states": 0,
        "draft_states": pools.draft_states,
        "host": 0,
    }
    assert [d["layers"] for d in shown["devices"]] == [[0, 2], [2, 6], [6, 8]]
    assert [d["weight_bytes"] for d in shown["devices"]] == [d.weight_bytes for d in fitting.devices]
    assert shown["stages"] == [
        {"stage": 0, "group": "cuda", "layers": [0, 2], "devices": ["cuda:0"]},
        {"stage": 1, "group": "left", "layers": [2, 8], "devices": ["left:0", "left:1"]},
    ]
    assert shown["advice"] == []
    failed = json.loads(json.dumps(as_json(short)))
    assert failed["fits"] is False
    assert [d["fits"] for d in failed["devices"]] == [False, True, True]
    assert failed["devices"][0]["short_bytes"] == short.shortages[0].short_bytes
    assert failed["advice"] == list(short.advice)
