"""What ``engine.kv_dtype`` saves is in the plan, in bytes, and the daemon takes just these."""

from __future__ import annotations

import pytest

from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, Space
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_text
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import LoadFiles, load_message
from tests.placement.made import DEMO, configure

PAGES = 20


@pytest.fixture(scope="module")
def spec():
    return open_spec(DEMO)


def planned(spec, folder, kv_dtype: str) -> Placement:
    config = configure(folder, ["left:0"], dtype="float32", kv_dtype=kv_dtype, pages=PAGES)
    found = plan(spec, config)
    assert isinstance(found, Placement)
    return found


@pytest.mark.parametrize(("kv_dtype", "bits"), [("float16", 16), ("bfloat16", 16), ("q8_0", 8.5)])
def test_the_plan_counts_the_bits_of_keys_and_values(spec, tmp_path, kv_dtype, bits):
    exact, smaller = planned(spec, tmp_path, "float32"), planned(spec, tmp_path, kv_dtype)
    numbers = sum(layer.unit_bytes(Dtype.FLOAT32) for layer in spec.layers if layer.space is Space.FULL) // 4 * PAGES
    saved = exact.devices[0].state_bytes - smaller.devices[0].state_bytes
    assert saved == numbers * (32 - bits) / 8
    assert exact.devices[0].weight_bytes == smaller.devices[0].weight_bytes
    (reason,) = [r for r in smaller.reasons if r.startswith("keys and values of 64 tokens in all layers take")]
    assert f" as {kv_dtype}, " in reason
    assert reason in plan_text(smaller)
    assert not any(r.startswith("keys and values of") for r in exact.reasons)


def test_the_daemon_takes_what_the_plan_says_of_q8_0(spec, tmp_path):
    placement = planned(spec, tmp_path, "q8_0")
    load = load_message(placement, "left", LoadFiles([str(DEMO)]), threads=1)
    (use,) = LoadedStage.load(spec, load.stages[0], load, Backend.CPU, lambda _: None).usage()
    assert use.state_bytes == placement.devices[0].state_bytes
