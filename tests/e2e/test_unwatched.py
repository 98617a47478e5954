"""A box that nobody watches: what was removed is made again, logs outlive the supervisor, kills are survived."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lucevisor.errors import ExitCode
from tests.e2e.process import DEMO, ROOT, Cli, post
from tests.e2e.test_handover import Clients
from tests.waiting import wait_until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_directory_and_cache_are_made_again_under_load_and_the_log_outlives_the_supervisor(cli: Cli) -> None:
    cache = cli.runtime / "cache"
    status = cli.start(DEMO, f"cache.dir={cache}", "cache.min_tokens=1", "engine.dtype=float32")
    assert status["log"] == str(cli.log())
    clients = Clients(status["url"])
    numbers = itertools.count()

    def saves(n_before: int) -> bool:
        ask_long(status["url"], next(numbers))
        return bool(cli.status()["cache"]["saved"] > n_before)

    with clients.running():
        wait_until(lambda: saves(0), what="a snapshot")
        shutil.rmtree(cli.runtime / "lucevisor")
        shutil.rmtree(cache)
        wait_until(lambda: cli.run("status", check=False).returncode == ExitCode.DONE, what="status finds it")
        saved = cli.status()["cache"]["saved"]
        wait_until(lambda: saves(saved), what="saves work again")
        assert list(cache.glob("*.safetensors"))
        os.kill(cli.status()["groups"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: cli.status()["groups"][0]["restarts"] == 1 and cli.ready(), what="ready again")
    assert clients.wrong == []
    cli.run("stop")
    assert not (cli.runtime / "lucevisor" / "t").exists()
    for command in (("logs", "--text"), ("logs", "--name", "t", "--text", "--level", "warning")):
        text = cli.run(*command).stdout
        assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} \[warning *\] the run directory was removed", text, re.MULTILINE)
    assert '"event": "stopped"' in cli.run("logs", "-n", "1").stdout
    assert "group left" in cli.run("logs", "left", "--text").stdout
    other = cli.run("logs", "--name", "u", check=False)
    assert other.returncode == ExitCode.NOT_RUNNING
    assert other.stderr.endswith("lucevisor/u/supervisor.jsonl: there is no log of an earlier run either\n")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_start_in_the_background_imports_nothing_from_the_current_directory(cli: Cli, tmp_path: Path) -> None:
    for name in ("structlog", "uvloop", "daemons", "json", "lucevisor"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    command = [sys.executable, "-P", "-m", "lucevisor", "start", str(DEMO), "--name", "t", "--daemon"]
    cli.env |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": "/dev/null"}
    done = subprocess.run(
        [*command, "--set", "server.port=0"], cwd=tmp_path, env=cli.env, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_directory = cli.runtime / "lucevisor" / "t"
    assert cli.status()["log"] == str(run_directory / "supervisor.jsonl")  # where nothing can be kept
    assert "the log ends with this process" in cli.run("logs", "--level", "warning").stdout
    cli.stop()
    assert not run_directory.exists()


def ask_long(url: str, n: int) -> None:
    """Send a long prompt, whose prefix slot is worth a file."""
    prompt = f"# {n}\n" + f"def function_{n}(path):\n    return path\n" * 60
    post(f"{url}/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 1}, 90)
