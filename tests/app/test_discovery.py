"""Interpreters and their devices, from stand-ins that answer as torch builds of each vendor do."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

from lucevisor.app.discovery import choose_groups, model_name, probe_interpreter, save_config, write_config
from lucevisor.config import load
from lucevisor.errors import ConfigError, LucevisorError
from tests.another_user import as_nobody, needs_root, open_directory


def stand_in(folder: Path, name: str, answer: object) -> str:
    """An executable that answers every command with a line of JSON."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho a line of a library\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory without environments beside it."""
    (tmp_path / "prefix").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    return tmp_path


CUDA = {"torch": "2.13.0+cu130", "backend": "cuda", "devices": ["NVIDIA H200"], "memory_bytes": 150_000_000_000}
HIP = {
    "torch": "2.13.0+rocm7.2",
    "backend": "hip",
    "devices": ["AMD Radeon AI PRO R9700", "AMD Radeon RX 7900 XTX"],
    "memory_bytes": 58_000_000_000,
}
CPU = {"torch": "2.13.0+cpu", "backend": "cpu", "devices": []}
BLIND = {"torch": "2.13.0+cu130", "backend": "cuda", "devices": []}


def test_each_vendor_gets_a_group_of_the_first_interpreter_that_sees_its_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(folder, "own", BLIND))
    answers = (("cuda", CUDA), ("rocm", HIP), ("again", CUDA), ("cpu", CPU))
    pythons = [stand_in(folder, name, answer) for name, answer in answers]
    groups = choose_groups("m.gguf", pythons)  # no daemon is asked: it is small
    assert [(group.backend, group.python, len(group.devices)) for group in groups] == [
        ("cuda", pythons[0], 1),
        ("hip", pythons[1], 2),
    ]
    config = load(save_config("m.gguf", groups, "box"), [])
    assert config.model.path == str(folder / "m.gguf")
    assert {name: group.python for name, group in config.groups.items()} == {"cuda": pythons[0], "hip": pythons[1]}
    assert config.placement.devices == ()
    monkeypatch.setattr("lucevisor.app.discovery.model_fits", lambda model, groups: False)
    assert [group.backend for group in choose_groups("m.gguf", pythons)] == ["cuda", "hip", "cpu"]


def test_without_a_gpu_the_processor_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(folder, "own", BLIND))
    (group,) = choose_groups("m.gguf", [])
    assert tomllib.loads(write_config("hf:me/model/m.gguf", [group])) == {
        "model": {"path": "hf:me/model/m.gguf"},
        "groups": {"cpu": {"backend": "cpu"}},  # the supervisor's own interpreter needs no key
    }
    assert "this machine's processor" in str(group)


def test_environments_beside_this_one_are_queried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(folder, "own", {"problem": "ModuleNotFoundError: torch"}))
    (folder / "rocm" / "bin").mkdir(parents=True)
    (folder / "rocm" / "pyvenv.cfg").touch()
    python = stand_in(folder / "rocm" / "bin", "python", CPU)
    assert [group.python for group in choose_groups("m.gguf", [])] == [python]


@needs_root
def test_an_environment_that_this_user_may_not_enter_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_directory() as place:
        for name in ("closed", "other/bin"):
            (place / name).mkdir(parents=True)
        (place / "other" / "pyvenv.cfg").touch()
        (place / "other" / "bin" / "python").symlink_to(stand_in(place / "closed", "python", CPU))
        (place / "closed").chmod(0o700)
        own = stand_in(place, "own", CPU)
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "executable", own)
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        with as_nobody():
            assert [group.python for group in choose_groups("m.gguf", [])] == [own]


def test_an_interpreter_is_asked_again_when_its_answer_may_have_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, torch = folder / "asked", folder / "version.py"
    torch.touch()
    python = Path(stand_in(folder, "own", CPU | {"file": str(torch)}))
    python.write_text(python.read_text() + f"echo >> {asked}\n")
    monkeypatch.setattr(sys, "executable", str(python))

    def n_asked() -> int:
        choose_groups("m.gguf", [])
        return asked.stat().st_size

    assert [n_asked(), n_asked()] == [1, 1]
    os.utime(torch, ns=(1, 1))
    assert [n_asked(), n_asked()] == [2, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [n_asked(), n_asked()] == [3, 3]
    (folder / "cache" / "lucevisor" / "interpreters.json").write_text("{")
    assert [n_asked(), n_asked()] == [4, 4]
    python.write_text("#!/bin/sh\n" + f"echo >> {asked}\n")
    for _ in range(2):
        with pytest.raises(LucevisorError, match="no interpreter can run a daemon"):
            n_asked()
    assert asked.stat().st_size == 6  # a problem may be gone the next time


def test_what_cannot_run_a_daemon_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"problem": "ModuleNotFoundError: No module named torch"}
    monkeypatch.setattr(sys, "executable", stand_in(folder, "own", none))
    with pytest.raises(LucevisorError, match=r"no interpreter can run a daemon \(.*No module named torch.*--python"):
        choose_groups("m.gguf", [])
    with pytest.raises(ConfigError, match=r"--python = .*No such file"):
        choose_groups("m.gguf", ["./none"])
    assert "is not a Python interpreter" in probe_interpreter("/bin/true").problem
    assert probe_interpreter(sys.executable) == probe_interpreter(sys.executable)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3.5-27B-Q4_K_M.gguf", "Qwen3.5-27B-Q4_K_M"),
        ("hf:unsloth/Qwen3-4B-GGUF:Q4_K_M", "Qwen3-4B-GGUF"),
        ("hf:me/model/q8/a b.gguf", "a-b"),
        ("...gguf", "model"),
        ("x" * 100 + ".gguf", "x" * 64),
    ],
)
def test_a_supervisor_is_named_after_its_model(model: str, name: str) -> None:
    assert model_name(model) == name
