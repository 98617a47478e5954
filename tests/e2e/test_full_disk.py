"""Run directory and cache on one file system that is full to the last byte: everything but logs and snapshots goes on.

The file system is a tmpfs in a mount namespace of the supervisor's own; the tests reach it through /proc/PID/root.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lucevisor.cli.admin_client import AdminClient
from lucevisor.errors import NotRunningError
from tests.app.test_logs import fill
from tests.e2e.process import DEMO, Cli
from tests.waiting import wait_until

NAMESPACE = ("unshare", "--mount", "--propagation", "private")
AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
ASK = {"prompt": "import os\n", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}


def mounted(directory: Path, n_kib: int, *command: str) -> list[str]:
    """A command line that runs ``command`` with a small tmpfs on ``directory``, seen by nobody else."""
    mount = f'mount -t tmpfs -o size={n_kib}k,mode=0700 tmpfs "$0" && exec "$@"'
    return [*NAMESPACE[:1], *AS_ROOT, *NAMESPACE[1:], "sh", "-c", mount, str(directory), *command]


@pytest.fixture
def box(cli: Cli) -> Box:
    """The command line with a small tmpfs for its run directory and cache."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare command")
    tried = subprocess.run(mounted(cli.runtime, 64, "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    return Box(cli)


class Box:
    """A supervisor whose disk can be filled."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.process: subprocess.Popen[str] | None = None

    def start(self, n_kib: int = 4096) -> dict[str, Any]:
        sets = ["server.port=0", "engine.dtype=float32", "engine.max_sequences=8", "cache.min_tokens=1",
                f"cache.dir={self.cli.runtime}/cache", "recovery.restart_limit=9/60s"]  # fmt: skip
        arguments = [part for one in sets for part in ("--set", one)]
        command = [sys.executable, "-m", "lucevisor", "start", str(DEMO), "--name", "t", *arguments]
        self.process = self.cli.popen_raw(mounted(self.cli.runtime, n_kib, *command))
        wait_until(lambda: self.process.poll() is not None or self.socket.exists(), 60, "the admin socket")
        assert self.process.poll() is None, self.process.communicate()
        wait_until(self.ready, 60, "ready")
        return self.status()

    @property
    def disk(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.cli.runtime}")

    @property
    def socket(self) -> Path:
        return self.disk / "lucevisor" / "t" / "admin.sock"

    def status(self) -> dict[str, Any]:
        return AdminClient(self.socket).call("GET", "/status")

    def ready(self) -> bool:
        with contextlib.suppress(NotRunningError):  # the socket is there before anybody listens
            return bool(self.status()["state"] == "ready")
        return False

    def group(self, name: str) -> dict[str, Any]:
        return next(g for g in self.status()["groups"] if g["name"] == name)

    def records(self) -> list[dict[str, Any]]:
        lines = (self.disk / "state/lucevisor/t/supervisor.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]  # every line is whole


class Clients:
    """Streams without end, one after the other; notes how each ended and when."""

    def __init__(self, url: str, n: int) -> None:
        self.url = url
        self.done = threading.Event()
        self.ended: list[tuple[float, float, str, list[int]]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(n)
        self._running = [self._pool.submit(self._work, i) for i in range(n)]

    def _work(self, worker: int) -> None:
        n_asked = 0
        while not self.done.is_set():
            n_asked += 1
            prompt = f"import os\n# {worker % 2} {n_asked}\n"  # new prompts: slots that want to be saved
            began = time.monotonic()
            how, ids = self.ask(prompt if worker else str(ASK["prompt"]))
            self.ended.append((began, time.monotonic(), how, ids if not worker else []))
            if how != "done":
                time.sleep(0.05)

    def ask(self, prompt: str) -> tuple[str, list[int]]:
        body = json.dumps(ASK | {"prompt": prompt, "stream": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        ids: list[int] = []
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                for line in reply:
                    if line == b"data: [DONE]\n":
                        return "done", ids
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return str(event["error"]["code"]), ids
                        for choice in event["choices"]:
                            ids += choice.get("token_ids") or []
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["error"]["code"]), []
        return "cut off", ids

    def finish(self) -> None:
        self.done.set()
        for one in self._running:
            one.result(timeout=120)
        self._pool.shutdown()

    def failures(self, outages: list[tuple[float, float]]) -> list[Any]:
        """Requests that failed though the pipeline was whole for as long as they ran."""
        return [
            one for one in self.ended
            if one[2] != "done" and not any(one[0] <= until and one[1] >= since for since, until in outages)
        ]  # fmt: skip


def kill(box: Box, name: str) -> tuple[float, float]:
    """Kill a group's daemon and wait for the pipeline; return when it was not whole."""
    before = box.group(name)
    since = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: box.group(name)["restarts"] > before["restarts"], 60, "a restart")
    wait_until(lambda: box.status()["state"] == "ready", 90, "ready again")
    return since, time.monotonic()


def dropped(url: str) -> float:
    """Log records that the file had no room for."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        metrics = answer.read().decode().splitlines()
    (line,) = [one for one in metrics if one.startswith('lucevisor_log_records_dropped_total{sink="file"}')]
    return float(line.split()[-1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_only_requests_of_a_killed_daemon_fail(box: Box) -> None:
    status = box.start()
    clients = Clients(status["url"], 2)
    try:
        expected = clients.ask(str(ASK["prompt"]))
        assert expected[0] == "done"
        fill(box.disk / "filler")
        n_done = len(clients.ended)
        wait_until(lambda: len(clients.ended) > n_done + 2, 60, "requests on a full disk")
        outages = [kill(box, "left")]
        since = time.monotonic()
        box.cli.run("restart", "right", "--socket", str(box.socket), timeout_s=120)
        restarted = time.monotonic()
        n_then = len(clients.ended)
        wait_until(lambda: len(clients.ended) > n_then + 2, 60, "requests after the restart")
    finally:
        clients.finish()
    assert clients.failures(outages) == [], (outages, (since, restarted))
    assert {how for _, _, how, _ in clients.ended} <= {"done", "shard_lost", "not_ready"}
    assert {tuple(ids) for _, _, how, ids in clients.ended if how == "done" and ids} == {tuple(expected[1])}
    assert [g["state"] for g in box.status()["groups"]] == ["ready", "ready"]

    fillers = [box.disk / "filler"]
    for i in range(4):  # a few records fit into the last page of the file
        if n_dropped := dropped(status["url"]):
            break
        fillers.append(box.disk / f"filler {i}")  # room that snapshots left
        fill(fillers[-1])
        box.cli.run("restart", "right", "--socket", str(box.socket), timeout_s=120)
    assert n_dropped > 0
    n_before = len(box.records())
    for filler in fillers:
        filler.unlink()
    assert clients.ask("import re\n")[0] == "done"
    wait_until(lambda: len(box.records()) > n_before + 1, 30, "the log goes on")
    missing = [one for one in box.records() if one["event"] == "log records dropped"]
    assert sum(one["records"] for one in missing) >= n_dropped
    assert {one["reason"] for one in missing} == {"No space left on device"}
    box.cli.run("stop", "--socket", str(box.socket))
    assert box.process is not None
    output, _ = box.process.communicate(timeout=30)
    assert box.process.returncode == 0, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize(
    ("how", "more"),
    [("full", ""), ("not a directory", " --daemon")],
)
def test_a_run_directory_that_cannot_be_used_is_one_sentence_and_exit_code_2(box: Box, how: str, more: str) -> None:
    runtime = box.cli.runtime
    prepare = {
        "full": f"dd if=/dev/zero of={runtime}/filler bs=1k 2>/dev/null",
        "not a directory": f"touch {runtime}/lucevisor",
    }[how]
    start = f'{prepare}; exec "{sys.executable}" -m lucevisor start "{DEMO}" --name t --set server.port=0'
    command = mounted(runtime, 64, "sh", "-c", start + more)
    done = subprocess.run(command, env=box.cli.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f'lucevisor: XDG_RUNTIME_DIR = "{runtime}/lucevisor'), done.stderr
    assert "cannot be used" in lines[0]
