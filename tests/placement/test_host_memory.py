"""Memory beside the model's: the journal, preempted requests and spares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.placement.devices import SPARE_DEVICE_BYTES, SPARE_HOST_BYTES
from lucevisor.placement.report import plan_json, plan_text
from lucevisor.placement.result import Placement
from tests.placement.made import BOX, BOX_SPLIT, CPUS, configure, cpu, gpu, placed


def planned(spec: ModelSpec, folder: Path, devices: list[str], **recovery: float) -> Placement:
    config = configure(folder, devices)
    return placed(spec, replace(config, recovery=replace(config.recovery, **recovery)))  # type: ignore[arg-type]


def test_a_journal_takes_no_more_than_all_pages_at_all_boundaries(demo: ModelSpec, tmp_path: Path) -> None:
    found = planned(demo, tmp_path, ["left:0", "right:0"])
    row_bytes = found.arenas[0].region_bytes // found.max_step_tokens
    assert found.journal_bytes == found.pools.full_pages * PAGE_TOKENS * row_bytes
    assert "the journal up to" in plan_text(found)
    assert plan_json(found)["journal_bytes"] == found.journal_bytes


def test_the_limit_of_a_journal_is_kept_in_whole_pages(demo: ModelSpec, tmp_path: Path) -> None:
    all_bytes = planned(demo, tmp_path, ["left:0", "right:0"]).journal_bytes
    found = planned(demo, tmp_path, ["left:0", "right:0"], journal=all_bytes - 1)
    assert all_bytes - 64 * 4 * 8192 < found.journal_bytes < all_bytes


def test_without_a_boundary_or_a_hold_there_is_none(demo: ModelSpec, tmp_path: Path) -> None:
    alone = planned(demo, tmp_path, ["left:0"])
    assert alone.journal_bytes == planned(demo, tmp_path, ["left:0", "right:0"], hold_s=0.0).journal_bytes == 0
    assert planned(demo, tmp_path, ["left:0", "right:0"], journal=0).journal_bytes == 0
    assert "journal" not in plan_text(alone)


def test_what_preempted_requests_may_take_is_said(demo: ModelSpec, tmp_path: Path) -> None:
    config = configure(tmp_path, ["left:0"])
    for n_slots, n_bytes in ((8, 3 << 30), (0, 0)):
        cache = replace(config.cache, prefix_slots=n_slots)
        found = placed(demo, replace(config, cache=cache, engine=replace(config.engine, swap_space=3 << 30)))
        assert found.swap_bytes == n_bytes
        assert ("preempted requests up to 3.00 GiB" in plan_text(found)) == bool(n_bytes)


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
        assert ("also for spares" in plan_text(found)) == (n > 0)
    assert (kept[1] - kept[0], kept[2] - kept[0]) == (each, 3 * each)
