"""A supervisor as an operator runs it: the command line, a process of its own, its run directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from lucevisor.cli.admin_client import AdminClient
from lucevisor.errors import NotRunningError
from tests.daemon_forks import Forker
from tests.waiting import wait_until

RULES = "\n".join(f"import module_{i}  # rule {i}" for i in range(60))


def post(url: str, body: dict[str, Any], timeout_s: float = 100.0) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def tokens_of(url: str, text: str) -> list[int]:
    found: list[int] = post(f"{url}/tokenize", {"content": text})[1]["tokens"]
    return found


def complete(url: str, prompt: list[int]) -> tuple[list[int], int]:
    """Ids of 16 more tokens, and how many of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    _, answer = post(f"{url}/v1/completions", body)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(url: str, system: str, turns: Sequence[str]) -> tuple[str, int, int]:
    """The next answer of a conversation, tokens of its prompt, and how many of them were cached."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "enable_thinking": False}
    code, answer = post(f"{url}/v1/chat/completions", body)
    assert code == 200, answer
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


ROOT = Path(__file__).parents[2]
DEMO = ROOT / "etc" / "demo.toml"
FORKED = (sys.executable, "-m", "tests.forked_command", "lucevisor")


class Cli:
    """Runs commands with a run directory of its own (short: socket paths are limited to 107 bytes).

    With a ``forker`` the commands of :meth:`run` and :meth:`start` and their daemons are forks, and :meth:`start` runs
    what ``--daemon`` does, without the command that starts it and waits.
    """

    def __init__(self, forker: Forker | None = None) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="lv", dir="/tmp"))
        self.env = os.environ | {
            "XDG_RUNTIME_DIR": str(self.runtime), "XDG_STATE_HOME": str(self.runtime / "state"), "NO_COLOR": "1"
        }  # fmt: skip
        self._forker = forker
        self._started: list[subprocess.Popen[str]] = []
        self._forked: list[int] = []

    def run(self, *arguments: str, timeout_s: float = 100.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        if self._forker is not None:
            done = self._forker.run([*FORKED, *arguments], env=self.env, cwd=ROOT, timeout_s=timeout_s)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "lucevisor", *arguments],
                env=self.env, text=True, capture_output=True, timeout=timeout_s, check=False,
            )  # fmt: skip
        assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        return self.popen_raw([sys.executable, "-m", "lucevisor", *arguments])

    def popen_raw(self, command: list[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=pass_fds,
            env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def start(
        self, config: Path = DEMO, *overrides: str, name: str = "t", take_over: bool = False, limits: str = ""
    ) -> dict[str, Any]:
        """Start a supervisor and return its status when it serves.  ``limits``: deadlines of supervision."""
        more = ["--take-over"] if take_over else []
        more += ["--allow-faults", limits] if limits else []
        sets = [part for o in ("server.port=0", *overrides) for part in ("--set", o)]
        if self._forker is None:
            self.run("start", str(config), "--daemon", "--name", name, "--timeout", "100", *more, *sets, timeout_s=120)
            return self.status(name)
        command = [*FORKED, "start", str(config), "--name", name, "--detached", *more, *sets]
        with (self.runtime / f"output-{name}-{len(self._forked)}").open("wb") as file:
            fd = file.fileno()
            pid = self._forker.command(command, env=self.env, cwd=ROOT, output=fd, errors=fd)
        self._forked.append(pid)

        def ready() -> bool:
            assert alive(pid), (self.runtime / f"output-{name}-{len(self._forked) - 1}").read_text()
            return self.ready(name, pid)

        wait_until(ready, what="ready")
        return self.status(name)

    def ready(self, name: str = "t", pid: int | None = None) -> bool:
        """Whether it serves, and is process ``pid``; also False before it listens."""
        with contextlib.suppress(NotRunningError):
            status = self.status(name)
            assert status["state"] != "failed", status["reason"]
            return bool(status["state"] == "ready" and pid in (None, status["pid"]))
        return False

    def socket(self, name: str = "t") -> Path:
        return self.runtime / "lucevisor" / name / "admin.sock"

    def log(self, name: str = "t") -> Path:
        return self.runtime / "state" / "lucevisor" / name / "supervisor.jsonl"

    def status(self, name: str = "t") -> dict[str, Any]:
        """What ``status --json`` prints; asked without a process, since tests ask again and again."""
        return AdminClient(self.socket(name)).call("GET", "/status")

    def stop(self, name: str = "t") -> None:
        self.run("stop", "--name", name)

    def close(self) -> None:
        """Kill what a failed test left, so that it does not disturb the next."""
        for process in psutil.process_iter(["pid", "environ"]):
            if (process.info["environ"] or {}).get("XDG_RUNTIME_DIR") == str(self.runtime):
                process.send_signal(signal.SIGKILL)
        for pid in self._forked:  # they have the environment of what they are forks of
            os.kill(pid, signal.SIGKILL)
        for started in self._started:  # a zombie or an open pipe would be found by another test
            started.communicate(timeout=60)
        for pid in self._forked:
            os.waitpid(pid, 0)
        shutil.rmtree(self.runtime, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
