"""``target_layer_split = "auto"`` from end to end: speeds are measured once, kept, and followed by plan and start."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import Config, load
from lucevisor.deployment.cache_files import write_json
from lucevisor.deployment.measurements import SpeedFile, inventory, request_for_split, speed_file
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.speeds import MeasurementRequest
from lucevisor.protocol.messages import Timing
from tests.e2e.process import ROOT, Cli
from tests.e2e.service import generate, running

MODEL = ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lucevisor"


@pytest.fixture
def config(tmp_path) -> Path:
    text = f'[model]\npath = "{MODEL}"\n'
    for group in ("left", "right"):
        text += f'[groups.{group}]\nbackend = "cpu"\nthreads = 1\n'
    text += '[engine]\ndtype = "float32"\n'
    path = tmp_path / "auto.toml"
    path.write_text(text)
    return path


async def request_for(loaded: Config) -> MeasurementRequest:
    found, problems = await inventory(loaded)
    assert not problems
    request = request_for_split(open_model(loaded).spec, with_target_devices(loaded, found), found)
    assert request is not None
    return request


def keep(request: MeasurementRequest, factors: tuple[float, float]) -> None:
    """A made file: target i takes ``factors[i]`` ms a layer and token."""
    timings = [[Timing(f / 1e3, f / 10) for _ in spans] for f, spans in zip(factors, request.spans, strict=True)]
    speeds = request.to_speeds(timings, "2026-01-02 03:04 UTC")
    write_json(speed_file(request), SpeedFile(speeds=speeds), "speeds")


async def planned(cli: Cli, config: Path, *overrides: str) -> dict[str, Any]:
    """What the command says, run with the test's own cache directory."""
    cli.env["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    sets = [part for o in overrides for part in ("--set", o)]
    done = await asyncio.to_thread(cli.run, "plan", str(config), "--json", *sets)
    return dict(json.loads(done.stdout))


async def test_plan_and_start_follow_what_was_measured(cache, config, tmp_path, cli):
    keep(await request_for(load(config)), (3.0, 1.0))
    latency = await planned(cli, config)
    throughput = await planned(cli, config, "placement.goal=throughput")
    assert [d["layers"] for d in latency["devices"]] == [[0, 1], [1, 8]]
    assert [d["layers"] for d in throughput["devices"]] == [[0, 2], [2, 8]]
    assert "devices: all of all groups, as placement.target_devices names none" in latency["reasons"]
    assert (latency["goal"], latency["speeds_measured"]) == ("latency", "2026-01-02 03:04 UTC")
    assert "left:0: 1 layer takes 3 ms per token, 300 ms for 512 tokens at once" in latency["reasons"]
    assert latency["max_context"] == 4096  # the other automatic sizes hold as with any split
    assert latency["pages"]["full"] >= 8 * 64
    async with running(config, tmp_path, ["placement.goal=throughput"]) as service:
        assert service.only.placement is not None
        assert [str(d.layers) for d in service.only.placement.devices] == ["[0,2)", "[2,8)"]
        assert len(await generate(service, [1, 2, 3], 4)) == 4
    assert len(list(cache.glob("speeds-*"))) == 1  # nothing was measured


async def test_the_first_start_measures_and_the_next_remembers(cache, config, tmp_path, cli):
    async with running(config, tmp_path) as service:
        assert service.only.placement is not None
        first = service.only.placement
        assert first.measured
        assert first.goal == "latency"
        assert all(d.decode_s is not None and d.decode_s > 0 for d in first.devices)
    [file] = cache.glob("speeds-*")
    assert msgspec.json.decode(file.read_bytes(), type=SpeedFile).speeds.measured == first.measured
    shown = await planned(cli, config)
    assert [d["layers"] for d in shown["devices"]] == [[d.layers.start, d.layers.stop] for d in first.devices]


async def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(config, tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    keep(await request_for(load(config)), (3.0, 1.0))
    assert "speeds not saved" in capsys.readouterr().out
