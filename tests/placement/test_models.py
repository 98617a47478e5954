"""Several models on the same devices: each plans with its share of what is usable there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.app.model_files import open_models
from lucevisor.config import Config, load
from lucevisor.deployment.served_model import pipelines
from lucevisor.errors import ConfigError
from lucevisor.placement.devices import memories_of, target_devices
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_text
from lucevisor.placement.result import Placement
from tests.placement.made import DEMO, cpu, gpu

INVENTORY = {"cuda": [gpu(0), gpu(1)], "left": [cpu(8)], "right": [cpu(8)]}
GPUS = {"a": '["cuda:0", "cuda:1"]', "b": '["cuda:1"]'}


def configs(folder: Path, devices: dict[str, str], *sizes: int, more: str = "") -> list[Config]:
    """The configuration of models whose files have so many bytes."""
    text = "".join(
        f'[models.{name}]\npath = "{DEMO}"\nplacement.target_devices = {on}\n' for name, on in devices.items()
    )
    groups = dict.fromkeys(name for on in devices.values() for name in INVENTORY if name in on)
    text += "".join(f'[groups.{name}]\nbackend = "{"cuda" if name == "cuda" else "cpu"}"\n' for name in groups)
    (folder / "box.toml").write_text(text)
    loaded = load(folder / "box.toml", more.split())
    models = [SimpleNamespace(n_bytes=size) for size in sizes]
    return [own for own, _ in pipelines(loaded, models)]  # type: ignore[arg-type]


def usable(config: Config) -> dict[str, int | None]:
    return {name: memory.usable_bytes for name, memory in memories_of(target_devices(config, INVENTORY)).items()}


def shares(found: list[Config], alone: Config) -> list[dict[str, float]]:
    whole = usable(alone)
    return [{name: round(n / whole[name], 3) for name, n in usable(config).items()} for config in found]  # type: ignore[operator]


def test_a_device_is_divided_by_the_sizes_of_the_files_of_those_that_use_it(tmp_path):
    both = configs(tmp_path, GPUS, 3 << 30, 1 << 30)
    [alone] = configs(tmp_path, {"a": GPUS["a"]}, 1)
    assert shares(both, alone) == [{"cuda:0": 1.0, "cuda:1": 0.75}, {"cuda:1": 0.25}]


def test_a_configured_share_leaves_the_rest_to_the_others(tmp_path):
    both = configs(tmp_path, GPUS, 3 << 30, 1 << 30, more="models.b.memory_share=0.6")
    [alone] = configs(tmp_path, {"a": GPUS["a"]}, 1)
    assert shares(both, alone) == [{"cuda:0": 1.0, "cuda:1": 0.4}, {"cuda:1": 0.6}]


def test_cpu_groups_are_one_memory_whichever_a_model_uses(tmp_path):
    both = configs(tmp_path, {"a": '["left:0"]', "b": '["right:0"]'}, 1 << 30, 1 << 30)
    [alone] = configs(tmp_path, {"a": '["left:0"]'}, 1)
    assert shares(both, alone) == [{"host": 0.5}, {"host": 0.5}]


@pytest.mark.parametrize("given", ["models.a.memory_share=0.5 models.b.memory_share=0.6", "models.b.memory_share=1"])
def test_shares_that_leave_nothing_are_refused_where_they_meet(tmp_path, given):
    both = configs(tmp_path, GPUS, 3, 1, more=given)
    for config in both:
        with pytest.raises(ConfigError, match=r"memory_share = .*leaves nothing of cuda:1 for others"):
            usable(config)


@given(sizes=st.lists(st.integers(1, 1 << 40), min_size=2, max_size=5))
def test_all_together_never_have_more_than_there_is(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("shares")
    every = configs(folder, {f"m{i}": '["cuda:1"]' for i in range(len(sizes))}, *sizes)
    [alone] = configs(folder, {"m0": '["cuda:1"]'}, 1)
    assert sum(usable(config)["cuda:1"] or 0 for config in every) <= (usable(alone)["cuda:1"] or 0)


def test_plans_say_what_is_for_others_and_fit_together(tmp_path):
    configs(tmp_path, {"a": '["left:0", "right:0"]', "b": '["right:0"]'}, 1, 1)
    loaded = load(tmp_path / "box.toml", ["models.b.memory_share=0.25"])
    models = open_models(loaded)
    plans = [plan(model.spec, own, INVENTORY) for own, model in pipelines(loaded, models)]
    assert all(isinstance(found, Placement) for found in plans)
    assert [share in plan_text(found) for share, found in zip(("75%", "25%"), plans, strict=True)] == [True, True]
    assert sum(device.needed_bytes for found in plans for device in found.devices) < 8 << 30


@pytest.mark.parametrize("device", ["left:0", "cuda:0"])
def test_a_model_takes_no_more_of_a_memory_than_its_plan_needs(tmp_path, device):
    on_demand = "models.b.preload=false"
    config, _ = configs(tmp_path, {"a": f'["{device}"]', "b": f'["{device}"]'}, 1, 1, more=on_demand)
    [model, _] = open_models(load(tmp_path / "box.toml", []))
    placed = plan(model.spec, config, INVENTORY, None, None, None)
    assert isinstance(placed, Placement)
    [share], whole = placed.memory_shares.values(), usable(config)[placed.devices[0].memory]
    assert 0 < share < 0.2
    assert share * whole == pytest.approx(sum(one.needed_bytes for one in placed.devices), rel=0.01)
