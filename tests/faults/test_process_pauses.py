"""A supervisor that is stopped for longer than its deadlines, alone, with its daemons, or beside one that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAUSE_S = 3.0  # twice every deadline of tests/supervision/paused_supervisor.py


class Paused:
    """A supervisor with the demo's daemons and a request that streams."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        self.daemons: list[int] = self.next_line()["pids"]

    def next_line(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text()[-4000:]
        return dict(json.loads(line))


@contextmanager
def streaming(tmp_path: Path, n_tokens: int) -> Iterator[Paused]:
    command = [sys.executable, "-m", "tests.supervision.paused_supervisor", str(tmp_path), str(n_tokens)]
    with (tmp_path / "stderr").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    try:
        yield Paused(process, tmp_path / "stderr")
    finally:
        process.kill()  # the kernel ends its daemons, stopped ones as well
        process.communicate()


def pause(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)


@pytest.mark.parametrize("with_daemons", [False, True])
def test_a_pause_of_the_supervisor_kills_no_healthy_daemon(tmp_path: Path, with_daemons: bool) -> None:
    with streaming(tmp_path, 300) as run:
        pids = [run.process.pid, *(run.daemons if with_daemons else [])]
        pause(*pids)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        end = run.next_line()
    assert end == {"n_tokens": 300, "reason": "length", "pids": run.daemons, "why": "", "states": ["ready", "ready"]}


def test_a_daemon_that_hangs_is_found_also_after_a_pause(tmp_path: Path) -> None:
    with streaming(tmp_path, 3000) as run:
        pause(run.process.pid, run.daemons[1])
        os.kill(run.process.pid, signal.SIGCONT)
        end = run.next_line()
    assert end["reason"] == "error"
    assert end["states"][0] == "ready"
    assert "group right" in end["why"]
