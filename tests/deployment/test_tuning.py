"""``bench --tune``: each group is asked for its own devices, and a group that does not answer is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.config import Config, load
from lucevisor.deployment import probe as probes
from lucevisor.errors import LucevisorError
from lucevisor.protocol.messages import Checked, CheckLine
from lucevisor.supervision.probe import Probe

DEMO = Path(__file__).parents[2] / "etc" / "demo.toml"


@pytest.fixture
def config() -> Config:
    return load(DEMO, ["placement.target_devices=left:0,right:5"])


def answers(monkeypatch: pytest.MonkeyPatch, answer: Probe) -> list[tuple[str, list[int]]]:
    """The groups that are asked, and the devices that each is to tune."""
    asked: list[tuple[str, list[int]]] = []

    async def probe(group, launcher, devices, check, check_s):
        asked.append((group.name, check[0].tune.devices))
        return answer

    monkeypatch.setattr(probes, "probe", probe)
    return asked


async def test_every_index_of_a_cpu_group_is_its_one_device(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, Probe(checked=Checked([CheckLine("cpu:0 Q4_K", True, "tiled rows to 32")])))
    lines = await probes.tune([], config)
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
        await probes.tune([], config)
