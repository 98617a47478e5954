"""Where the scoring model of PFlash goes, what it takes, and that the daemon takes the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.relevance.stage import ScoreStage
from lucevisor.config import Config, load
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_json, plan_rows, plan_text
from lucevisor.placement.result import Infeasible, Placement, PlacementError
from lucevisor.placement.stages import LoadFiles, load_message
from tests.model.drafter_files import TARGET
from tests.placement.made import CPUS, configure, cpu, gpu

SCORER = Path(__file__).parents[2] / "etc" / "demo" / "demo-scorer-q8_0.gguf"


@pytest.fixture(scope="module")
def small() -> ModelSpec:
    return open_spec(TARGET)


@pytest.fixture(scope="module")
def scorer() -> ModelSpec:
    return open_spec(SCORER)


def configured(tmp_path: Path, *pflash: str, devices: list[str] = CPUS, **engine) -> Config:
    config = configure(tmp_path, devices, [1] * len(devices), **engine)
    return load(config.file, ["pflash.mode=always", "pflash.path=s.gguf", *(f"pflash.{each}" for each in pflash)])


def placed(spec: ModelSpec, config, inventory=None, scorer: ModelSpec | None = None) -> Placement:
    result = plan(spec, config, inventory, scorer=scorer)
    assert isinstance(result, Placement), result.message
    return result


def test_the_scoring_model_is_where_it_is_configured_else_beside_the_last_layers(small, scorer, tmp_path):
    p = placed(small, configured(tmp_path, dtype="float32"), None, scorer)
    assert p.scorer is not None
    assert (str(p.scorer.device), p.scorer.window_tokens, p.scorer.step_tokens) == ("right:0", 8192, 512)
    p = placed(small, configured(tmp_path, "device=left:0", "window=600", dtype="float32"), None, scorer)
    assert p.scorer is not None
    assert (p.scorer.group, p.scorer.window_tokens) == ("left", 600)
    assert [row.layers for row in plan_rows(p)][-1] == "scoring"
    assert "scoring model: lucevisor-demo-scorer on left:0, as configured" in plan_text(p)
    assert plan_json(p)["pflash"]["name"] == "lucevisor-demo-scorer"
    assert plan_json(placed(small, configured(tmp_path, dtype="float32")))["pflash"] is None


def test_the_daemon_takes_the_bytes_that_were_planned(small, scorer, tmp_path):
    p = placed(small, configured(tmp_path, "window=1000", dtype="float32"), None, scorer)
    assert p.scorer_device is not None
    assert load_message(p, "left", LoadFiles([str(TARGET)])).score is None
    message = load_message(p, "right", LoadFiles([str(TARGET)]), score_files=[str(SCORER)])
    use = ScoreStage.load(message, Backend.CPU, lambda _: None).usage()
    assert (use.weight_bytes, use.state_bytes) == (p.scorer_device.weight_bytes, p.scorer_device.state_bytes)


def test_memory_of_the_scoring_model_is_not_the_models(small, scorer, tmp_path):
    inventory = {"left": [cpu(8)], "right": [cpu(8)]}
    config = configured(tmp_path, dtype="float32", max_sequences=64)
    without, beside = placed(small, config, inventory), placed(small, config, inventory, scorer)
    assert beside.pools.full_pages <= without.pools.full_pages
    tight = {"left": [cpu(1 / 64)], "right": [cpu(1 / 64)]}
    found = plan(small, config, tight, scorer=scorer)
    assert isinstance(found, Infeasible)
    needed = found.shortages[0].needed_bytes
    alone = plan(small, config, tight)
    assert isinstance(alone, Infeasible)
    assert found.placement.scorer_device is not None
    assert needed == alone.shortages[0].needed_bytes + found.placement.scorer_device.needed_bytes


def test_a_device_that_does_not_exist_is_refused_by_name(small, scorer, tmp_path):
    config = configured(tmp_path, "device=cuda:7", devices=["cuda:0"])
    with pytest.raises(PlacementError) as caught:
        placed(small, config, {"cuda": [gpu()]}, scorer)
    assert caught.value.key == "pflash.device"
    assert "nearest: cuda:0" in caught.value.hint
