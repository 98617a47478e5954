"""What is refused before a daemon is started: key, value, nearest choice."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import Config, load
from lucevisor.deployment import probe as probes
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


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter without packages: this one without its site-packages."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


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


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "it ended with code 3: nothing"),
        ("echo no >&2", "code 0: no"),
        ("kill -9 $$", "it ended with signal 9"),
    ],
)
def test_a_program_that_is_no_interpreter(tmp_path, script, why):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    error = refused(f"groups.right.python={program}")
    assert (error.key, error.value) == ("groups.right.python", str(program))
    assert f"{program} does not work as a Python interpreter: " in error.why
    assert why in error.why


def test_an_interpreter_without_torch(bare_python):
    error = refused(f"groups.right.python={bare_python}")
    assert (error.key, error.value) == ("groups.right.python", str(bare_python))
    assert f"{bare_python} has no torch, gguf, msgspec, numpy" in error.why
    assert f"{bare_python} -m pip install torch gguf msgspec numpy" in error.hint


def python_with_torch(tmp_path, version, cuda, hip):
    """An interpreter whose torch says that it was built so."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('torch must not be imported')")
    lines = ["from typing import Optional", f"__version__ = {version!r}"]
    (package / "version.py").write_text("\n".join([*lines, f"cuda: Optional[str] = {cuda!r}", f"hip = {hip!r}"]))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec "{sys.executable}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "backend", "why"),
    [
        ("2.13.0+cpu", None, None, "cuda", "torch 2.13.0+cpu of {python} is not built for cuda"),
        ("2.13.0+rocm7.1", None, "7.1", "cuda", "is not built for cuda"),
        ("2.13.0", "13.0", None, "hip", "is not built for hip"),
        ("2.3.1+cu121", "12.1", None, "cuda", "torch 2.3.1+cu121 of {python} is older than 2.4"),
        ("2.3.1", None, None, "cpu", "is older than 2.4"),
    ],
)
def test_an_interpreter_with_the_wrong_torch(tmp_path, version, cuda, hip, backend, why):
    python = python_with_torch(tmp_path, version, cuda, hip)
    error = refused(f"groups.right.python={python}", f"groups.right.backend={backend}")
    assert (error.key, error.value) == ("groups.right.python", str(python))
    assert why.format(python=python) in error.why
    assert f"{python} -m pip install" in error.hint


@pytest.mark.parametrize(
    ("cuda", "hip", "backend"),
    [("13.0", None, "cuda"), (None, "7.1", "hip"), ("13.0", None, "cpu"), (None, None, "cpu")],
)
def test_an_interpreter_with_the_right_torch(tmp_path, cuda, hip, backend):
    python = python_with_torch(tmp_path, "2.13.0", cuda, hip)
    config = load(DEMO, [f"groups.right.python={python}", f"groups.right.backend={backend}", "draft.kind=off"])
    check_before_start(config, [open_model(config)])


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
