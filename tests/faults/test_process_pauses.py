"""A supervisor that is stopped for longer than its deadlines, alone, with its daemons, or beside one that hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.daemon_forks import Forker
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAUSE_S = 4.5  # half as long again as every deadline of tests/supervision/paused_supervisor.py


class Paused:
    """A supervisor with the demo's daemons and a request that streams."""

    def __init__(self, pid: int, output: IO[str], log: Path) -> None:
        self.pid, self._output, self._log = pid, output, log
        self.daemons: list[int] = self.next_line()["pids"]

    def next_line(self) -> dict:
        line = self._output.readline()
        assert line, self._log.read_text()[-4000:]
        return dict(json.loads(line))


@pytest.fixture
def streaming(tmp_path: Path, forker: Forker) -> Iterator[Callable[[int], Paused]]:
    """Start one, with a request for so many tokens."""
    reading, writing = os.pipe()
    started: list[int] = []

    def start(n_tokens: int) -> Paused:
        command = [sys.executable, "-m", "tests.supervision.paused_supervisor", str(tmp_path), str(n_tokens)]
        with (tmp_path / "stderr").open("wb") as log:
            started.append(forker.command(command, env=dict(os.environ), cwd=ROOT, output=writing, errors=log.fileno()))
        os.close(writing)
        return Paused(started[0], output, tmp_path / "stderr")

    with os.fdopen(reading) as output:
        yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)  # the kernel ends its daemons, stopped ones as well
        os.waitpid(pid, 0)


def pause(run: Paused, *daemons: int) -> None:
    wait_until(lambda: psutil.Process(run.pid).status() == psutil.STATUS_STOPPED)
    for pid in daemons:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)


@pytest.mark.parametrize("with_daemons", [False, True])
def test_a_pause_of_the_supervisor_kills_no_healthy_daemon(
    streaming: Callable[[int], Paused], with_daemons: bool
) -> None:
    run = streaming(300)
    daemons = run.daemons if with_daemons else []
    pause(run, *daemons)
    for pid in (run.pid, *daemons):
        os.kill(pid, signal.SIGCONT)
    end = run.next_line()
    assert end == {"n_tokens": 300, "reason": "length", "pids": run.daemons, "why": "", "states": ["ready", "ready"]}


def test_a_daemon_that_hangs_is_found_also_after_a_pause(streaming: Callable[[int], Paused]) -> None:
    run = streaming(300)
    pause(run, run.daemons[1])
    os.kill(run.pid, signal.SIGCONT)
    end = run.next_line()
    assert (end["n_tokens"], end["reason"], end["states"]) == (300, "length", ["ready", "ready"])
    assert end["pids"][0] == run.daemons[0]
    assert end["pids"][1] != run.daemons[1], "another daemon took over"
