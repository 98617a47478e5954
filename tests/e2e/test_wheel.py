"""The wheel in an environment of its own: what it installs, and the demo from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip waits for the package index


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment into which pip has installed the wheel; it has no torch, which groups have."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home)
    command = [sys.executable, "-m", "pip", "--python", str(home), "install", f"{wheel}[client]"]
    subprocess.run(command, check=True, capture_output=True)
    return home


def run(command: list[str], directory: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"lucevisor"}


def test_no_module_named_daemons_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, lucevisor; print(u.find_spec('daemons'), lucevisor.__file__)"
    found, path = run([str(installed / "bin" / "python"), "-c", code], tmp_path).split()
    assert found == "None"
    assert Path(path).is_relative_to(installed)


def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    pythons = [part for group in ("left", "right") for part in ("--set", f"groups.{group}.python={sys.executable}")]
    said = run([str(installed / "bin" / "lucevisor"), "demo", "--max-tokens", "32", *pythons], tmp_path)
    assert "the same answer as without the kill" in said
    assert said.endswith("stopped\n")


def test_the_sample_configuration_names_the_demo_model_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    sample = run([str(installed / "bin" / "lucevisor"), "init"], tmp_path)
    (tmp_path / "box.toml").write_text(sample)
    model = tomllib.loads(sample)["model"]["path"]
    assert Path(model).is_relative_to(installed)
    assert "left:0" in run([str(installed / "bin" / "lucevisor"), "plan", "--no-probe", "box.toml"], tmp_path)


def test_the_unit_the_user_and_the_man_page_lie_below_the_environment(installed: Path) -> None:
    systemd, files = ROOT / "etc" / "systemd", {}
    files["lib/systemd/system/lucevisor@.service"] = systemd / "lucevisor@.service"
    files["lib/systemd/system/lucevisor@.socket"] = systemd / "lucevisor@.socket"
    files["lib/sysusers.d/lucevisor.conf"] = systemd / "lucevisor.sysusers"
    files["share/man/man1/lucevisor.1"] = ROOT / "docs" / "lucevisor.1"
    for path, source in files.items():
        assert (installed / path).read_bytes() == source.read_bytes()
