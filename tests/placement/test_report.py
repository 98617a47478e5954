"""Output of ``lucevisor plan``: table, text and JSON show what the placement says."""

from __future__ import annotations

import json

import pytest

from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_json, plan_rows, plan_table, plan_text
from lucevisor.protocol.loading import DeviceInfo
from tests.placement.made import configure, cpu, gpu, placed, refused

DEVICES = ["cuda:0", "left:0", "left:1"]


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"),
        (1023 << 20, "1023.0 MiB"), (5000 << 40, "5000.0 TiB"), (-(3 << 20), "-3.00 MiB"), ((1 << 30) - 1, "1.00 GiB"),
        (1048575, "1.00 MiB"), (10239, "10.0 KiB"),
    ],
)  # fmt: skip
def test_sizes(n_bytes, shown):
    assert format_bytes(n_bytes) == shown


def test_what_fits(demo, tmp_path):
    inventory = {"cuda": [gpu(name="RTX 3090")], "left": [cpu()]}
    p = placed(demo, configure(tmp_path, DEVICES, [1, 2, 1]), inventory)
    assert [(r.group, r.device, r.layers, r.verdict) for r in plan_rows(p)] == [
        ("cuda", "cuda:0 RTX 3090", "[0,2)", "fits"),
        ("left", "left:0 CPU", "[2,6)", "fits"),
        ("left", "left:1 CPU", "[6,8)", "fits"),
    ]
    weights = [d.weight_bytes for d in p.devices]
    assert [r.weights for r in plan_rows(p)] == list(map(format_bytes, weights))
    lines = plan_table(p).splitlines()
    start, end = lines[0].index("DEVICE"), lines[0].index("WEIGHTS") + len("WEIGHTS")
    assert {(line[start - 1], line[start : start + 2], line[end - 1 : end + 1]) for line in lines[1:]} == {
        (" ", "cu", "B "),
        (" ", "le", "B "),
    }
    shown = plan_text(p)
    assert shown.startswith("lucevisor-demo-22m (qwen35, 8 layers, Q4_K) on 3 devices, 2 stages\n")
    assert all(reason in shown for reason in p.reasons)
    assert "host: 16.0 GiB are free for left:0, left:1 together; 1.60 GiB of that are kept free" in shown
    assert "It does not fit" not in shown
    data = json.loads(json.dumps(plan_json(p)))
    assert (data["fits"], data["advice"]) == (True, [])
    assert data["model"] == {"name": "lucevisor-demo-22m", "architecture": "qwen35", "layers": 8, "quant": "Q4_K"}
    assert data["pages"]["full"] == p.pools.full_pages
    assert [(d["layers"], d["weight_bytes"], d["memory"]) for d in data["devices"]] == [
        ([0, 2], weights[0], "cuda:0"),
        ([2, 6], weights[1], "host"),
        ([6, 8], weights[2], "host"),
    ]
    assert data["stages"] == [
        {"stage": 0, "group": "cuda", "layers": [0, 2], "devices": ["cuda:0"]},
        {"stage": 1, "group": "left", "layers": [2, 8], "devices": ["left:0", "left:1"]},
    ]


def test_what_is_short_is_shown_with_advice(demo, tmp_path):
    tight = DeviceInfo(0, "RTX 3090", 24 << 30, 10 << 20, "sm_86", gpu().dtypes)
    result = refused(demo, configure(tmp_path, DEVICES, [1, 2, 1]), {"cuda": [tight], "left": [cpu()]})
    [shortage] = result.shortages
    short = format_bytes(shortage.short_bytes)
    assert [r.verdict for r in plan_rows(result)] == [f"short by {short}", "fits", "fits"]
    shown = plan_text(result)
    assert f"cuda:0 is {short} short: cuda:0 would take" in shown
    assert all(line in shown for line in result.advice)
    data = json.loads(json.dumps(plan_json(result)))
    assert (data["fits"], data["advice"]) == (False, list(result.advice))
    assert [(d["fits"], d["short_bytes"] > 0) for d in data["devices"]] == [(False, True), (True, False), (True, False)]


def test_unknown_memory_is_shown_as_such(demo, tmp_path):
    result = plan(demo, configure(tmp_path, DEVICES))
    assert {(r.free, r.verdict) for r in plan_rows(result)} == {("unknown", "unknown")}
    assert plan_json(result)["fits"] is None
