"""Spares in a plan: the memory that they take is not given to shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lucevisor.model.spec import ModelSpec
from lucevisor.placement.devices import SPARE_DEVICE_BYTES, SPARE_HOST_BYTES
from lucevisor.placement.report import text
from tests.placement.made import BOX, BOX_SPLIT, CPUS, configure, cpu, gpu, placed


@pytest.mark.parametrize(
    ("devices", "split", "each"), [(BOX, BOX_SPLIT, SPARE_DEVICE_BYTES), (CPUS, None, 2 * SPARE_HOST_BYTES)]
)
def test_their_memory_is_kept_free(
    demo: ModelSpec, tmp_path: Path, devices: list[str], split: list[float] | None, each: int
) -> None:
    config = configure(tmp_path, devices, split) if split else configure(tmp_path, devices)
    inventory = {group: [gpu(0), gpu(1)] for group in ("cuda", "hip")} | {group: [cpu()] for group in ("left", "right")}
    kept = []
    for n in (0, 1, 3):
        found = placed(demo, replace(config, recovery=replace(config.recovery, spares=n)), inventory)
        kept.append(found.devices[0].reserve_bytes)
        assert ("also for spares" in text(found)) == (n > 0)
    assert (kept[1] - kept[0], kept[2] - kept[0]) == (each, 3 * each)
