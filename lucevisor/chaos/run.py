"""Starts a supervisor, sends it requests, injects random faults, and reports what became of the answers."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from lucevisor.chaos.faults import FAULTS, HEARTBEAT_S, Target
from lucevisor.chaos.traffic import Counts, Traffic
from lucevisor.config import merge_overrides
from lucevisor.errors import LucevisorError
from lucevisor.protocol import fault_hooks
from lucevisor.source_tree import module_command

NAME: Final = "chaos"
START_S: Final = 600.0
STOP_S: Final = 60.0
TWO_AT_ONCE: Final = 0.25
"""How often a second fault comes while the first one lasts."""
_POLL_S: Final = 0.05

EXACT: Final = ("server.port=0", "engine.dtype=float32", "recovery.restart_limit=9999/60s", "cache.min_tokens=64")
"""Settings of a run; those of the operator replace them."""

Ask = Callable[[Path, str, str], dict[str, Any]]
"""Asks an admin socket: method and path."""


@dataclass(slots=True)
class Row:
    """What happened during the faults of one kind."""

    times: int = 0
    n_right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    pause_s: float = 0.0

    def add(self, counts: Counts) -> None:
        self.times += 1
        self.n_right += counts.n_right
        self.wrong += counts.wrong
        self.lost += counts.lost
        self.pause_s = max(self.pause_s, counts.pause_s)


@dataclass(slots=True)
class Report:
    """``rows``: by fault; one that came with another counts for both.  ``total``: every answer once."""

    seed: int
    seconds: float = 0.0
    rows: dict[str, Row] = field(default_factory=lambda: {name: Row() for name in FAULTS})
    total: Counts = field(default_factory=Counts)
    restarts: int = 0
    recovery: dict[str, Any] = field(default_factory=dict)
    descriptors: tuple[int, int] = (0, 0)
    left: list[str] = field(default_factory=list)
    """What was left over: what should be free when nothing runs, and was not."""

    @property
    def good(self) -> bool:
        return not (self.total.wrong or self.total.lost or self.left)


class Chaos:
    """One run with ``config``, which must compute in float32 to be exact; ``say`` is told what is injected."""

    def __init__(self, config: Path, overrides: Sequence[str], ask: Ask, seed: int, say: Callable[[str], None]) -> None:
        self._config, self._overrides, self._ask, self._say = config, overrides, ask, say
        self._rng = random.Random(seed)
        self.report = Report(seed)

    def run(self, seconds: float) -> Report:
        """Return the report.  Raises LucevisorError when the supervisor does not start or does not recover.

        The supervisor's log is kept if anything was wrong; ``say`` is told where.
        """
        directory, done = Path(tempfile.mkdtemp(prefix="lucevisor-chaos-")), False
        try:
            process = self._start(directory)
            try:
                url = self._until_ready(directory, process)
                asyncio.run(self._run(directory, process.pid, url, seconds))
            except BaseExceptionGroup as group:
                raise _first(group) from None
            finally:
                self._stop(process)
            done = self.report.good
        finally:
            shutil.rmtree(directory if done else directory / "cache", ignore_errors=True)
            if not done:
                self._say(f"the supervisor's log is kept below {directory}")
        return self.report

    def _start(self, directory: Path) -> subprocess.Popen[bytes]:
        (directory / "hooks").mkdir()
        limits = {"heartbeat_s": HEARTBEAT_S, "busy_heartbeat_s": HEARTBEAT_S, "backoff_most_s": 0.5}
        command = [*module_command(), "start", str(self._config), "--name", NAME, "--detached"]
        command += ["--starter", str(os.getpid())]
        command += ["--allow-faults", ",".join(f"{name}={value}" for name, value in limits.items())]
        for override in merge_overrides([*EXACT, f"cache.dir={directory / 'cache'}"], self._overrides):
            command += ["--set", override]
        env = os.environ | dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), str(directory))
        env |= {fault_hooks.VARIABLE: str(directory / "hooks")}
        with (directory / "output").open("wb") as output:
            return subprocess.Popen(command, env=env, stdout=output, stderr=output)

    async def _run(self, directory: Path, pid: int, url: str, seconds: float) -> None:
        socket = _socket(directory)

        async def status() -> dict[str, Any]:
            return await asyncio.to_thread(self._ask, socket, "GET", "/status")

        target = Target(pid, directory / "hooks", directory / "cache", status)
        traffic = Traffic(url, self._rng)
        async with traffic.open():
            await traffic.learn()
            self.report.descriptors = (psutil.Process(pid).num_fds(), 0)
            began_s = time.monotonic()
            async with traffic.counting() as self.report.total, asyncio.TaskGroup() as tasks:
                tasks.create_task(traffic.run())
                try:
                    await self._inject(target, traffic, began_s + seconds)
                finally:
                    traffic.end()
            self.report.seconds = time.monotonic() - began_s
        self._look_back(pid, await status())

    def _until_ready(self, directory: Path, process: subprocess.Popen[bytes]) -> str:
        """Return the URL."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and process.poll() is None:
            if _socket(directory).exists():
                status = self._ask(_socket(directory), "GET", "/status")
                if status["state"] == "ready":
                    return str(status["url"])
            time.sleep(_POLL_S)
        said = (directory / "output").read_text(errors="replace")
        raise LucevisorError(f"the supervisor did not start:\n{said[-4000:]}")

    async def _inject(self, target: Target, traffic: Traffic, end_s: float) -> None:
        """Faults in turn, in another order in every round."""
        left: list[str] = []
        while time.monotonic() < end_s:
            left = left or self._rng.sample(list(FAULTS), len(FAULTS))
            names = [left.pop()]
            if self._rng.random() < TWO_AT_ONCE:
                names.append(self._rng.choice([name for name in FAULTS if name != names[0]]))
            self._say(" and ".join(names))
            async with traffic.counting() as counts:
                async with asyncio.TaskGroup() as tasks:
                    for name in names:
                        tasks.create_task(FAULTS[name](target, self._rng))
                await target.ready()
                await asyncio.sleep(self._rng.uniform(0.2, 1.0))  # some answers go on without a fault
            for name in dict.fromkeys(names):
                self.report.rows[name].add(counts)

    def _look_back(self, pid: int, status: dict[str, Any]) -> None:
        report, engine = self.report, status["engine"]
        report.restarts = sum(group["restarts"] for group in status["groups"])
        report.recovery = engine["recovery"] | {"cache": status["cache"]}
        report.descriptors = (report.descriptors[0], psutil.Process(pid).num_fds())
        for what in ("running", "queued", "held"):
            if engine[what]:
                report.left.append(f"{engine[what]} requests {what}")
        if engine["pages"]["used"]:
            report.left.append(f"{engine['pages']['used']} pages used")

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        try:
            below = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.report.left.append(f"the supervisor, {STOP_S:.0f} s after SIGTERM")
        _, alive = psutil.wait_procs(below, timeout=2.0)
        self.report.left += [f"process {one.pid}" for one in alive]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what a task group ended with."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _socket(directory: Path) -> Path:
    return directory / "lucevisor" / NAME / "admin.sock"
