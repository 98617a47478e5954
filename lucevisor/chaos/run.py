"""Runs a supervisor under requests and random faults, and reports which answers were right, wrong or lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import psutil

from lucevisor.chaos.faults import FAULTS, HEARTBEAT_S, READY_S, Target
from lucevisor.chaos.traffic import Counts, Traffic
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.demo import demo_config
from lucevisor.cli.options import RangeOfNumbers
from lucevisor.config import load, merge_overrides, single_model
from lucevisor.errors import ExitCode, LucevisorError
from lucevisor.protocol import fault_hooks
from lucevisor.source_tree import module_command

NAME: Final = "chaos"
START_S: Final = 600.0
STOP_S: Final = 60.0
_POLL_S: Final = 0.05

EXACT: Final = (
    *("server.port=0", "engine.dtype=float32", "cache.min_tokens=64"),
    *("recovery.restart_limit=9999/60s", "recovery.hold_s=600"),
)
"""Settings of a run; those of the operator replace them."""


@dataclass(slots=True)
class Report:
    """``rows``: by fault; one that came with another counts for both.  ``times``: how often each came.  ``total``:
    every answer once.
    """

    seed: int
    rows: dict[str, Counts]
    times: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    total: Counts = field(default_factory=Counts)
    restarts: int = 0
    recovery: dict[str, Any] = field(default_factory=dict)
    descriptors: tuple[int, int] = (0, 0)
    left: list[str] = field(default_factory=list)
    """Resources that were not free when nothing ran any more."""

    @property
    def passed(self) -> bool:
        return not (self.total.wrong or self.total.lost or self.left)


class Chaos:
    """One run with ``config``, which must compute in float32 to be exact. ``faults``: names of FAULTS, each as often as
    the others."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        seed: int,
        faults: Sequence[str] = tuple(FAULTS),
    ) -> None:
        self._config, self._overrides = config, overrides
        self._rng = random.Random(seed)
        self._faults = faults
        self._began_s = time.monotonic()
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self.report = Report(seed, {name: Counts() for name in faults})

    def run(self, seconds: float, n_faults: int | None = None) -> Report:
        """Return the report, after so many faults or so long. Raises LucevisorError when the supervisor does not start
        or recover. Keeps its log if anything was wrong."""
        directory, done = Path(tempfile.mkdtemp(prefix="lucevisor-chaos-")), False
        (directory / "hooks").mkdir()
        try:
            try:
                url = self._until_ready(directory, self._start(directory))
                asyncio.run(self._run(directory, url, seconds, n_faults))
            except BaseExceptionGroup as group:
                raise _first(group) from None
            finally:
                for process in self._supervisors:
                    self._stop(process)
            done = self.report.passed
        finally:
            shutil.rmtree(directory if done else directory / "cache", ignore_errors=True)
            if not done:
                self._print(f"the supervisor's log is kept below {directory}")
        return self.report

    def _start(self, directory: Path, *more: str) -> subprocess.Popen[bytes]:
        limits = {"heartbeat_s": HEARTBEAT_S, "busy_heartbeat_s": HEARTBEAT_S, "backoff_max_s": 0.5}
        limits["hello_s"] = READY_S  # a start took more than a minute where 40 processes shared two cores
        command = [*module_command(), "start", str(self._config), "--name", NAME, "--detached", *more]
        command += ["--starter", str(os.getpid())]
        command += ["--allow-faults", ",".join(f"{name}={value}" for name, value in limits.items())]
        for override in merge_overrides([*EXACT, f"cache.dir={directory / 'cache'}"], self._overrides):
            command += ["--set", override]
        env = os.environ | {"XDG_RUNTIME_DIR": str(directory), "XDG_STATE_HOME": str(directory / "state")}
        env |= {fault_hooks.VARIABLE: str(directory / "hooks")}
        with (directory / "output").open("ab") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        self._supervisors.append(process)
        return process

    async def _run(self, directory: Path, url: str, seconds: float, n_faults: int | None) -> None:
        socket, pids = _socket(directory), [self._supervisors[0].pid]

        async def order(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            return await asyncio.to_thread(
                AdminClient(socket).call, method, path, body, 30.0 if body is None else 300.0
            )

        async def take_over() -> None:
            earlier, later = self._supervisors[-1], self._start(directory, "--take-over")
            pids.insert(0, later.pid)
            try:
                await asyncio.to_thread(self._until_ready, directory, later)
            except LucevisorError:  # the earlier supervisor continues
                pids.remove(later.pid)
                self._supervisors.remove(later)
                self._stop(later)
                raise
            pids.remove(earlier.pid)
            await asyncio.to_thread(earlier.wait, START_S)

        target = Target(pids, directory / "hooks", directory / "cache", order, take_over)
        traffic = Traffic(url, self._rng)
        async with traffic.open():
            await traffic.learn()
            self.report.descriptors = (psutil.Process(target.pid).num_fds(), 0)
            began_s = time.monotonic()
            async with traffic.counting() as self.report.total, asyncio.TaskGroup() as tasks:
                tasks.create_task(traffic.run())
                try:
                    await self._inject(target, traffic, began_s + seconds, n_faults)
                finally:
                    traffic.end()
            self.report.seconds = time.monotonic() - began_s
            await self._check_idle(target)

    def _until_ready(self, directory: Path, process: subprocess.Popen[bytes]) -> str:
        """Return the URL."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and process.poll() is None:
            with contextlib.suppress(LucevisorError):  # it listens later
                status = AdminClient(_socket(directory)).call("GET", "/status")
                if (status["state"], status["pid"]) == ("ready", process.pid):
                    return str(status["url"])
            time.sleep(_POLL_S)
        output = (directory / "output").read_text(errors="replace")
        raise LucevisorError(f"the supervisor did not start:\n{output[-4000:]}")

    def _print(self, line: str) -> None:
        click.echo(f"{time.monotonic() - self._began_s:7.1f} s  {line}", err=True)

    async def _inject(self, target: Target, traffic: Traffic, end_s: float, n_faults: int | None) -> None:
        """Inject the faults in turn, in another order in every round."""
        left: list[str] = []
        n_done = 0
        while time.monotonic() < end_s and n_done != n_faults:
            left = left or self._rng.sample(self._faults, len(self._faults))
            names = [left.pop()]
            others = [name for name in self._faults if name != names[0]]
            if others and n_done + 1 != n_faults and self._rng.random() < 0.25:
                names.append(self._rng.choice(others))
            n_done += len(names)
            self._print(" and ".join(names))
            running = traffic.running
            async with traffic.counting() as counts:
                async with asyncio.TaskGroup() as tasks:
                    for name in names:
                        tasks.create_task(FAULTS[name](target, self._rng))
                await target.ready()
                await traffic.answered(running)  # else a slow machine would interrupt them again and again
            for name in dict.fromkeys(names):
                self.report.rows[name].add(counts)
                self.report.times[name] += 1

    async def _check_idle(self, target: Target) -> None:
        """Wait until no request runs, and report what the supervisor still holds."""
        end_s = time.monotonic() + 60.0
        # A restored snapshot is judged by a request of its own.
        while (status := await target.status())["engine"]["running"] and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        report, engine = self.report, status["engine"]
        report.restarts = sum(group["restarts"] for group in status["groups"])
        report.recovery = engine["recovery"] | {"cache": status["cache"]}
        report.descriptors = (report.descriptors[0], psutil.Process(target.pid).num_fds())
        for state in ("running", "queued", "held"):
            if engine[state]:
                report.left.append(f"{engine[state]} requests {state}")
        if engine["pages"]["used"]:
            report.left.append(f"{engine['pages']['used']} pages used")

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        try:
            children = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.report.left.append(f"the supervisor, {STOP_S:.0f} s after SIGTERM")
        _, alive = psutil.wait_procs(children, timeout=10.0)
        self.report.left += [f"process {process.pid}" for process in alive]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a task group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _socket(directory: Path) -> Path:
    return directory / "lucevisor" / NAME / "admin.sock"


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key.")
@click.option("--minutes", type=RangeOfNumbers(0.01, 10_000), default=2.0, show_default=True)
@click.option("--fault", "faults", metavar="NAME", multiple=True, help="Inject only this fault; may be repeated.")
@click.option(
    "--times", "n_faults", type=click.IntRange(min=1), help="End after this many faults instead of after --minutes."
)
@click.option("--seed", type=int, help="Seed for kinds and times of faults (default: random).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def chaos(
    config: Path | None,
    overrides: tuple[str, ...],
    minutes: float,
    faults: tuple[str, ...],
    n_faults: int | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Start CONFIG (default: the demo) in float32, in a directory of its own, and let eight clients ask it while its
    processes are killed, stopped, hung and starved at random.  Exit code 1 if an answer was wrong or lost."""
    if unknown := [name for name in faults if name not in FAULTS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(FAULTS)}", param_hint="--fault")
    file = config or demo_config()
    # Refused here, not by a supervisor whose output is in a file.
    single_model(load(file, merge_overrides(EXACT, overrides)), "chaos")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.FAILED))  # not without its supervisor

    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    seconds = 60 * minutes if n_faults is None else math.inf
    report = Chaos(file, overrides, seed, faults or tuple(FAULTS)).run(seconds, n_faults)
    click.echo(_json(report) if as_json else _table(report))
    for problem in [*report.total.wrong, *report.total.lost, *report.left][:5]:
        click.echo(problem, err=True)
    return ExitCode.DONE if report.passed else ExitCode.FAILED


def _table(report: Report) -> str:
    lines = ["| fault | times | right | wrong | lost | longest pause |", "|---|---|---|---|---|---|"]
    rows = [(name, report.times[name], row) for name, row in report.rows.items()]
    for name, times, row in [*rows, ("all, each answer once", report.times.total(), report.total)]:
        pause = f"{row.pause_s:.2f} s"
        lines.append(f"| {name} | {times} | {row.n_right} | {len(row.wrong)} | {len(row.lost)} | {pause} |")
    recovery, cache = report.recovery, report.recovery["cache"]
    summary = [
        f"{report.seconds:.0f} s, seed {report.seed}; {report.restarts} restarts of daemons",
        f"{recovery['sequences']} sequences went on",
        f"{recovery['rebuilt_tokens']} tokens rebuilt by the lost stages alone",
        f"{recovery['recomputed_tokens']} computed again by all",
        f"{cache['restored']} snapshots restored, refused: {cache['failures'] or 'none'}",
        f"descriptors of the supervisor {report.descriptors[0]} before, {report.descriptors[1]} after",
        f"left over: {', '.join(report.left) or 'nothing'}",
    ]
    lines += ["", "; ".join(summary)]
    return "\n".join(lines)


def _json(report: Report) -> str:
    plain = {name: getattr(report, name) for name in ("seed", "seconds", "restarts", "recovery", "descriptors", "left")}
    faults = {name: {"times": report.times[name], **row.as_json()} for name, row in report.rows.items()}
    return json.dumps({**plain, "faults": faults, "answers": report.total.as_json()}, indent=2)
