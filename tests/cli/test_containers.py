"""The compose file names what exists: Containerfiles, and a command that `lucevisor start` takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from lucevisor.cli import cli
from lucevisor.config import load

FOLDER = Path(__file__).parents[2] / "etc" / "container"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_start_with_keys_that_exist(name, tmp_path):
    service = SERVICES[name]
    build = service["build"]
    file = Path(os.path.normpath(FOLDER / build["context"] / build["dockerfile"]))  # relative to the context, `dist`
    assert file.parent == FOLDER
    text = file.read_text()
    for argument in build.get("args", {}):
        assert f"ARG {argument}=" in text
    command, *arguments = service["command"]
    start = cli.get_command(None, command)
    parsed = start.make_context("start", [re.sub(r"\$\{MODEL.*\}", "models/m.gguf", each) for each in arguments]).params
    config = tmp_path / "box.toml"
    config.write_text('[model]\npath = "m.gguf"\n[groups.cpu]\nbackend = "cpu"\n')
    loaded = load(config, parsed["overrides"])
    assert (loaded.server.host, loaded.server.allow_open) == ("0.0.0.0", True)
    assert service["ports"] == [f"127.0.0.1:{loaded.server.port}:{loaded.server.port}"]
    assert f"EXPOSE {loaded.server.port}\n" in text


def test_the_image_for_cpus_has_the_torch_of_the_environment_for_cpus():
    root = FOLDER.parents[1]
    [pinned] = re.findall(r"^TORCH +:= (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert re.search(rf" {pinned}$", (FOLDER / "Containerfile.cpu").read_text(), re.MULTILINE)
