"""The real daemon behind the real supervisor, up to the moment where it would load a model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.model.values import Backend
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import LocalLauncher, stage_packages
from lucevisor.supervision.states import State
from tests.supervision.real_groups import Owner, brisk, exists


async def test_the_real_daemon_says_hello_and_what_it_cannot_load_is_told(tmp_path):
    pytest.importorskip("torch")
    owner = Owner()
    owner.load_error = LucevisorError("this test loads nothing")
    config = GroupConfig(name="left", backend="cpu")
    group = GroupSupervisor(
        config, 1, LocalLauncher(stage_packages(tmp_path)), owner.callbacks(), limits=brisk(hello_s=60.0)
    )
    await group.start()
    await group.wait(State.FAILED, timeout_s=100)
    assert group.reason == "this test loads nothing"
    assert owner.hellos[0].backend is Backend.CPU
    assert owner.hellos[0].torch
    assert owner.states == [State.STARTING, State.LOADING, State.STOPPING, State.FAILED]


async def test_a_stop_while_torch_is_imported_is_clean(tmp_path):
    pytest.importorskip("torch")
    group = GroupSupervisor(
        GroupConfig(name="left", backend="cpu"),
        1,
        LocalLauncher(stage_packages(tmp_path)),
        Owner().callbacks(),
        limits=brisk(hello_s=60.0),
    )
    await group.start()
    pid = group.pid
    await asyncio.sleep(0.6)
    assert group.state is State.STARTING
    began = time.monotonic()
    assert await group.stop(60.0) is State.STOPPED
    assert time.monotonic() - began < 50.0
    assert not exists(pid)


@pytest.fixture
def bare_python(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


async def test_an_interpreter_that_lacks_packages_is_refused_with_what_to_install(tmp_path, bare_python):
    config = GroupConfig(name="left", backend="cpu", python=bare_python)
    group = GroupSupervisor(
        config, 1, LocalLauncher(stage_packages(tmp_path)), Owner().callbacks(), limits=brisk(hello_s=60.0)
    )
    await group.start()
    await group.wait(State.FAILED, timeout_s=100)
    assert group.reason.endswith(f"No module named 'msgspec': install torch, numpy, gguf and msgspec for {bare_python}")
    assert group.restarts == 0
