"""Faults on processes that are real and do nothing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lucevisor.chaos import faults
from lucevisor.chaos.faults import FAULTS, Target
from lucevisor.errors import LucevisorError

LOOP = "import time\nwhile True:\n    time.sleep(0.01)"


class Supervised:
    """Two processes that are replaced when they are killed, as daemons are."""

    def __init__(self, directory: Path) -> None:
        self.processes = [self._start(), self._start()]
        self.n_steps, self.steps = 0, True
        self.target = Target([self.processes[0].pid], directory, directory, self.order, self.take_over)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", LOOP])

    async def take_over(self) -> None:
        raise LucevisorError("another supervisor cannot be started")

    async def order(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert (method, path, body) == ("GET", "/status", None)
        for i, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[i] = self._start()
        groups = [{"name": str(i), "pid": process.pid} for i, process in enumerate(self.processes)]
        self.n_steps += self.steps
        stages = [{"steps": self.n_steps}] * 2
        return {"state": "ready", "reason": "", "groups": groups, "engine": {"held": 0, "stages": stages}}

    def open(self, file: Path) -> subprocess.Popen[bytes]:
        """Let the last process be one that has a file open."""
        self.processes[-1].kill()
        self.processes[-1].wait()
        code = f"import time\nfile = open({str(file)!r}, 'w')\ntime.sleep(600)"
        self.processes[-1] = subprocess.Popen([sys.executable, "-c", code])
        return self.processes[-1]

    def states(self) -> set[str]:
        return {psutil.Process(process.pid).status() for process in self.processes}


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    one = Supervised(tmp_path)
    yield one
    for process in one.processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["kill", "terminate"])
async def test_one_process_is_replaced(supervised: Supervised, name: str) -> None:
    before = [process.pid for process in supervised.processes]
    await FAULTS[name](supervised.target, random.Random(1))
    after = [process.pid for process in supervised.processes]
    assert len(set(before) & set(after)) == 1


async def test_who_is_ready_and_makes_no_steps_is_not_served_again(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on their way when it was ready do not count."""
    await supervised.target.ready()
    assert supervised.n_steps == 1 + 2 * 2 + 1
    monkeypatch.setattr(faults, "READY_S", 0.3)
    supervised.steps = False
    with pytest.raises(LucevisorError, match="ready, and makes no steps"):
        await supervised.target.ready()


@pytest.mark.parametrize("name", ["slow", "supervisor paused"])
async def test_processes_run_when_a_pause_is_over(
    supervised: Supervised, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "HEARTBEAT_S", 0.2)
    before = [process.pid for process in supervised.processes]
    await FAULTS[name](supervised.target, random.Random(1))
    assert [process.pid for process in supervised.processes] == before
    assert not supervised.states() & {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}


async def test_the_process_that_has_a_file_open_is_killed(supervised: Supervised, tmp_path: Path) -> None:
    writing = supervised.open(tmp_path / "a.partial")
    before = supervised.processes[0].pid
    await FAULTS["killed while saving"](supervised.target, random.Random(1))
    assert supervised.processes[0].pid == before
    assert writing.returncode == -signal.SIGKILL


async def test_a_damaged_snapshot_differs_in_one_bit(supervised: Supervised, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for file in files:
        file.write_bytes(bytes(1000))
    await FAULTS["snapshots damaged"](supervised.target, random.Random(1))
    for file in files:
        assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
        assert file.stat().st_size == 1000


@pytest.mark.parametrize("name", ["hang", "heartbeat dropped", "clock jumps"])
async def test_a_process_without_hooks_is_left_alone(supervised: Supervised, name: str) -> None:
    before = [process.pid for process in supervised.processes]
    await FAULTS[name](supervised.target, random.Random(1))
    assert [process.pid for process in supervised.processes] == before
