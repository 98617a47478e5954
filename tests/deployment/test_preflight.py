"""What is refused before a daemon is started: key, value, nearest choice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import Config, load
from lucevisor.deployment import measurements
from lucevisor.deployment.preflight import check_before_start
from lucevisor.errors import ConfigError, ExitCode, LucevisorError
from lucevisor.protocol.messages import Checked, CheckLine
from lucevisor.supervision.probe import Probe

DEMO = Path(__file__).parents[2] / "etc" / "demo.toml"


def refused(*overrides):
    config = load(DEMO, [*overrides, "draft.kind=off"])
    with pytest.raises(ConfigError) as caught:
        check_before_start(config, [open_model(config)])
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        (["draft.width=64"], "draft.width", "nearest: 7"),
        (["engine.max_context=1"], "engine.max_context", "nearest: 2"),
        (["engine.max_context=4096", "engine.pages=5"], "engine.pages", "nearest: 64, or engine.max_context = 320"),
    ],
)
def test_what_no_plan_can_be_made_of(overrides, key, hint):
    config = load(DEMO, overrides)
    with pytest.raises(ConfigError) as caught:
        check_before_start(config, [open_model(config)])
    assert (caught.value.key, caught.value.hint) == (key, hint)


def test_cores_that_do_not_exist():
    usable = sorted(os.sched_getaffinity(0))
    error = refused(f"groups.right.cores={usable[0]},8191")
    assert (error.key, error.value) == ("groups.right.cores", [usable[0], 8191])
    assert "core 8191 does not exist" in error.why
    assert error.hint == f"nearest: {sorted({usable[0], usable[-1]})}"


@pytest.mark.parametrize(("python", "why"), [("/nowhere/python", "executable"), ("no-such-python", "not on PATH")])
def test_an_interpreter_that_is_missing(python, why):
    error = refused(f"groups.right.python={python}")
    assert (error.key, error.value) == ("groups.right.python", python)
    assert why in error.why


# ---- tuning


@pytest.fixture
def config() -> Config:
    return load(DEMO, ["placement.target_devices=left:0,right:5"])


def answers(monkeypatch: pytest.MonkeyPatch, answer: Probe) -> list[tuple[str, list[int]]]:
    """The groups that are asked, and the devices that each is to tune."""
    asked: list[tuple[str, list[int]]] = []

    async def probe(group, launcher, devices, check, check_s):
        asked.append((group.name, check[0].tune.devices))
        return answer

    monkeypatch.setattr(measurements, "probe", probe)
    return asked


async def test_every_index_of_a_cpu_group_is_its_one_device(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, Probe(checked=Checked([CheckLine("cpu:0 Q4_K", True, "tiled rows to 32")])))
    lines = await measurements.tune([], config)
    assert asked == [("left", [0]), ("right", [0])]
    assert [line.subject for line in lines] == ["left cpu:0 Q4_K", "right cpu:0 Q4_K"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Probe(problem="it is gone"), "it is gone"),
        (Probe(checked=Checked([CheckLine("cpu:0", False, "no such speed")])), "cpu:0: no such speed"),
    ],
)
async def test_a_group_that_was_not_tuned_is_named(
    answer: Probe, why: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, answer)
    with pytest.raises(LucevisorError, match=f"groups.left was not tuned: {why}"):
        await measurements.tune([], config)
