"""Links and speeds that a start measures: what is kept, what is read again, and when nothing is started to measure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.config import Config, load
from lucevisor.deployment.measurements import link_file, links_for, read_links, speeds_for
from lucevisor.model.families import open_spec
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.links import ASSUMED
from lucevisor.protocol.tcp import TcpPath
from tests.placement.made import DEMO, cpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def configured(folder: Path, hosts: dict[str, str], listen: str = "10.0.0.1") -> Config:
    (folder / "secret").write_text("0123456789abcdef" * 4)
    (folder / "secret").chmod(0o600)
    text = f'[model]\npath = "{DEMO}"\n[cluster]\nlisten = "{listen}"\nsecret_file = "secret"\n'
    for group, host in hosts.items():
        text += f'[groups.{group}]\nbackend = "cpu"\nthreads = 1\n' + (f'host = "{host}"\n' if host else "")
    (folder / "box.toml").write_text(text)
    return load(folder / "box.toml")


async def test_a_link_is_measured_once_by_one_group_of_its_host(tmp_path: Path) -> None:
    config = configured(tmp_path, {"here": "", "a": "attic", "b": "me@attic", "c": "cellar"})
    asked = []

    async def time_way(group: str) -> TcpPath | None:
        asked.append(group)
        return TcpPath(5e-3, 0, 1e-3) if group == "a" else None  # an old kernel, and a daemon that is lost

    links = await links_for(config, time_way)
    assert asked == ["a", "c"]
    assert (await links_for(config, time_way)).of_host == links.of_host == read_links(config).of_host
    assert asked == ["a", "c", "c"]
    link = links.of_host["attic"]
    assert (link.round_trip_s, link.bytes_per_s) == (1e-3, ASSUMED.bytes_per_s)
    assert link.measured
    assert links.between("", "cellar") == ASSUMED

    elsewhere = configured(tmp_path, {"a": "attic"}, listen="192.168.0.1")
    assert not read_links(elsewhere).of_host
    await links_for(elsewhere, time_way)
    assert len(json.loads(link_file().read_text())["links"]) == 2
    await links_for(config, time_way, fresh=True)
    assert asked[-2:] == ["a", "c"]


@pytest.mark.parametrize(
    "link", [{"round_trip_s": -1.0, "bytes_per_s": 1.0}, {"round_trip_s": 1.0, "bytes_per_s": 0.0}]
)
def test_numbers_that_no_link_has_are_ignored(link: dict[str, float], tmp_path: Path) -> None:
    link_file().parent.mkdir(parents=True)
    link_file().write_text(json.dumps({"version": 1, "links": {"10.0.0.1 attic": link}}))
    with capture_logs() as said:
        assert not read_links(configured(tmp_path, {"a": "attic"})).of_host
    assert [line["event"] for line in said] == ["link file ignored"]


async def test_nothing_waits_for_resources_that_its_own_daemon_has(tmp_path: Path) -> None:
    config = configured(tmp_path, {"here": "", "a": "attic=1"})
    config = replace(config, cluster=replace(config.cluster, launcher="ray"))  # which need not be installed
    inventory = {"here": [cpu()], "a": [cpu()]}
    config = with_target_devices(config, inventory)
    with capture_logs() as said:
        assert await speeds_for(open_spec(DEMO), [DEMO], config, inventory) is None
    assert [(line["event"], line["reason"]) for line in said] == [
        ("speeds not measured", "the resources of a are in use")
    ]
