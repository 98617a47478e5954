"""A supervisor that `demo` or `chaos` started for itself does not outlive it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.e2e.process import DEMO, Cli, alive, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "chaos"])
def test_a_killed_command_leaves_no_process(user_cli: Cli, command: str) -> None:
    user_cli.env["TMPDIR"] = str(user_cli.runtime)  # of the directory that nobody removes now
    process = user_cli.popen(command)
    starter = psutil.Process(process.pid)
    wait_until(lambda: len(starter.children(recursive=True)) >= 3, 30, "a supervisor and two daemons")
    below = starter.children(recursive=True)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(each.pid) for each in below), 60, "all have ended")


def test_a_supervisor_whose_starter_is_gone_already_does_not_start(user_cli: Cli) -> None:
    arguments = ["start", str(DEMO), "--name", "t", "--detached", "--starter", str(os.getppid())]
    done = subprocess.run(
        [sys.executable, "-m", "lucevisor", *arguments], env=user_cli.env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert f"process {os.getppid()}, for which this supervisor was to run, has ended" in done.stderr
    assert not user_cli.socket().parent.exists()
