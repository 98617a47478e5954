"""The daemon's loader takes exactly the bytes that the plan says: the plan is followed for real, on the cpu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemons.models.stage import LoadedStage
from lucevisor.config import CacheConfig
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import LoadFiles, load_message
from tests.placement.made import DEMO, configure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("states", ["device", "host"])
@pytest.mark.parametrize("devices", [["left:0"], ["left:0", "right:0", "third:0"]])
def test_weights_and_pools_take_what_was_planned(tmp_path, devices, states, dtype):
    spec = open_spec(DEMO)
    draft = {"kind": "lookup", "width": 3}
    config = configure(tmp_path, devices, [1, 2, 1][: len(devices)], draft, dtype=dtype, pages=20)
    config = replace(config, cache=CacheConfig(prefix_slots=3, states=states))
    placement = plan(spec, config)
    assert isinstance(placement, Placement)
    assert placement.pools.draft_states
    taken = []
    for group in placement.groups:
        load = load_message(placement, group, LoadFiles([str(DEMO)]), threads=1)
        for stage in load.stages:
            taken += LoadedStage.load(spec, stage, load, Backend.CPU, lambda _: None).usage()
    assert [(use.layers, use.state_bytes, use.host_state_bytes) for use in taken] == [
        (d.layers, d.state_bytes, d.host_state_bytes) for d in placement.devices
    ]
    least = 1.0 if dtype == "float32" else 0.8  # C++ kernels keep quant blocks smaller than torch's forms
    for use, planned in zip(taken, placement.devices, strict=True):
        assert least * planned.weight_bytes <= use.weight_bytes <= planned.weight_bytes
    assert (sum(use.host_state_bytes for use in taken) > 0) == (states == "host")
