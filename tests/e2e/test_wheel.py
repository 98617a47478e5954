"""The wheel in an environment of its own: what it installs, and the demo from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.e2e.environments import make_environment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the commands of an environment with the wheel, its dependencies and the extras daemon and client."""
    home = tmp_path_factory.mktemp("environment")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = project["dependencies"] + extras["daemon"] + extras["client"]
    make_environment(home, [re.split(r"[\s;<>=!~\[(]", need, maxsplit=1)[0] for need in needs])
    command = [sys.executable, "-m", "pip", "--python", str(home), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return home / "bin"


def run(command: list[str], directory: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lucevisor"}


def test_no_module_named_daemons_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, lucevisor; print(u.find_spec('daemons'), lucevisor.__file__)"
    found, path = run([str(installed / "python"), "-c", code], tmp_path).split()
    assert found == "None"
    assert Path(path).is_relative_to(installed.parent)


def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    said = run([str(installed / "lucevisor"), "demo", "--max-tokens", "32"], tmp_path)
    assert "the same answer as without the kill" in said
    assert said.endswith("stopped\n")
