"""`lucevisor start` below the command line: builds a service, its HTTP endpoint and its admin socket, and serves.

The first SIGINT or SIGTERM (or `lucevisor stop`) gives running requests a moment to end, the second shortens every
deadline, the third kills the daemons.  SIGHUP reads the configuration again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog
import uvloop

from lucevisor import __version__
from lucevisor.api.context import ACTIVE
from lucevisor.api.listening import adopt, listen
from lucevisor.api.ports import NotReadyPart, Ports, SnapshotMetrics
from lucevisor.api.server import create_app
from lucevisor.api.traces import no_trace
from lucevisor.app import collector, logs, traces
from lucevisor.app.api_ports import make_ports
from lucevisor.app.cache_operations import CacheOperations, figures
from lucevisor.app.compression import make_compressor, make_page_scorer
from lucevisor.app.endpoint import Endpoint
from lucevisor.app.group_metrics import group_metrics
from lucevisor.app.log_lines import STARTED
from lucevisor.app.model_files import open_model, open_tokenizer
from lucevisor.app.progress import KeptProgress
from lucevisor.app.reload import Overrides, apply, keys_at_once, read_again, tls_of
from lucevisor.app.run_options import RunOptions, refuse_faults
from lucevisor.app.rundir import RunDirectory, log_path
from lucevisor.app.signals import EarlySignals, Hangup
from lucevisor.app.status import Address, status
from lucevisor.app.succession import Succession, refuse_without_room
from lucevisor.app.systemd import Notifier, SystemdReport, listen_sockets, watchdog_s
from lucevisor.config import Config
from lucevisor.deployment.orders import Orders
from lucevisor.deployment.preflight import check_before_start
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.core import Engine
from lucevisor.errors import ConfigError, ExitCode, LucevisorError, unusable
from lucevisor.model.values import dtype_bytes
from lucevisor.protocol import fault_hooks
from lucevisor.snapshots.maintenance import check_directory
from lucevisor.supervision.states import State

FETCH_S = 6 * 3600.0
"""What systemd grants the download of a model file."""

RUN_DIRECTORY_S = 1.0
"""Seconds between two looks whether the run directory is whole."""

log = structlog.get_logger("lucevisor")


class Display(Observer, Protocol):
    """Watches a start, and is told the address."""

    def listening(self, url: str) -> None: ...


def run(config: Config, name: str, observer: Display, options: RunOptions) -> ExitCode:
    """Serve until stopped.  Raises LucevisorError for what keeps it from starting at all."""
    early = EarlySignals()
    run_dir = RunDirectory(name)
    if options.take_over_s is None or not run_dir.join():
        options = replace(options, take_over_s=None)
        run_dir.claim()
    try:
        problem = _open_log(config, run_dir, options)
        log.info(STARTED, version=__version__, name=name, config=str(config.file), pid=os.getpid())
        if problem:
            log.warning("the log ends with this process", directory=str(run_dir.path), reason=problem)
        if options.limits is None:
            refuse_faults(config)
        else:
            fault_hooks.listen({"clock": fault_hooks.shift_clock})
        model = open_model(config, _fetching)
        check_before_start(config, model)
        if config.cache.dir and config.cache.prefix_slots:
            check_directory(Path(config.cache.dir))
        early.stop_raising()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, model, run_dir, observer, options, early))
    except KeyboardInterrupt:  # stopped before there was anything to stop
        return ExitCode.DONE
    finally:
        logs.close()
        run_dir.close()


def _open_log(config: Config, run_dir: RunDirectory, options: RunOptions) -> str:
    """Log to the state directory; to the run directory, which goes with this process, where that is impossible.

    Returns why it is; empty if it is not.
    """
    try:
        directory = log_path(run_dir.name)
        logs.configure(config.log.format, config.log.level, directory, to_terminal=options.to_terminal)
    except (OSError, ConfigError) as error:
        problem = str(error)
    else:
        return ""
    try:
        logs.configure(config.log.format, config.log.level, run_dir.path, to_terminal=options.to_terminal)
    except OSError as error:
        raise unusable(run_dir.path, error) from error
    return problem


def _fetching(what: str) -> None:
    """Called when a model file is about to be downloaded, which blocks."""
    log.info("fetching", what=what)
    Notifier().send(STATUS=f"fetching {what}", EXTEND_TIMEOUT_USEC=int(FETCH_S * 1e6))


async def _run(
    config: Config,
    model: ServedModel,
    run_dir: RunDirectory,
    observer: Display,
    options: RunOptions,
    early: EarlySignals,
) -> ExitCode:
    return await Supervisor(config, model, run_dir, observer, options).run(early)


class Supervisor:
    """A service, its HTTP endpoint and its admin socket.  Create it in a running loop."""

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        run_dir: RunDirectory,
        observer: Display,
        options: RunOptions,
    ) -> None:
        self.config, self.model, self.run_dir = config, model, run_dir
        self._overrides = Overrides(config.file, config.overrides)
        self._described = self._overrides.described()
        self._tls = tls_of(config.server)
        self._traces = traces.configured()
        self._tokenizer = open_tokenizer(config, model.spec)
        self._ports = make_ports(config, model, self._tokenizer, self._not_ready)
        self._ports.grammars.prepare()
        self._display = observer
        self._stop_asked = asyncio.Event()
        self._progress = KeptProgress(observer)
        self.service = Service(config, model, run_dir.own, self._progress, self._on_engine, options.limits)
        self._orders = Orders(self.service)
        self._add_running(self._ports)
        self._app = create_app(self._ports)
        self._endpoint = Endpoint(self._app, self, run_dir.socket, self._tls)
        self._report = SystemdReport(self._in_a_line)
        self._succession = Succession(
            self.service, self._endpoint, run_dir, self._report, options.take_over_s, self._stop_asked.set
        )
        self._restarts: set[asyncio.Task[None]] = set()
        self._reloads: set[asyncio.Task[dict[str, object]]] = set()
        self.cache = CacheOperations(self.service)
        self._n_stops = 0
        self._hurried_stops: set[asyncio.Task[None]] = set()

    async def run(self, early: EarlySignals) -> ExitCode:
        """Start, serve, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup, early.hangup)
        if early.asked:
            self.stop(early.asked)
        if early.reload:
            self._reread()
        for notice in self.config.notices:
            log.warning("configuration", notice=str(notice))
        for marker in self._ports.template.lost_markers(self._tokenizer) if self._ports.template is not None else []:
            log.warning("chat template writes a marker in a way that makes it ordinary text", marker=marker)
        self._report.use(Notifier(), watchdog_s())
        report = asyncio.create_task(self._report.run(), name="systemd")
        watch = asyncio.create_task(self._watch_run_directory(), name="watch run directory")
        try:
            started = asyncio.ensure_future(self._start())
            asked = asyncio.ensure_future(self._stop_asked.wait())
            await asyncio.wait({started, asked}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
            await asked
        finally:
            watch.cancel()
            await self._succession.close()
            await self.service.stop()
            await self._endpoint.close()
            if self._traces is not None:
                await self._traces.close()
            report.cancel()
        log.info("stopped", name=self.run_dir.name)
        return ExitCode.DONE

    async def _start(self) -> None:
        """Listen, then start the groups; the other way round to take over from another supervisor.

        Raises LucevisorError when a group is given up before requests were served: another try would say the same.
        """
        server = self.config.server
        if not self._succession.pending:
            await self._endpoint.open_admin()
            sockets = adopt(listen_sockets(), server.host, server.port)
            await self._endpoint.open(sockets or listen(server.host, server.port))
            self._prepare()
            self._listening()
            self._succession.offer_it()
            await self.service.start()
            if not await self.service.wait_ready(None) and self.service.state == "failed":
                raise LucevisorError(f"{self.run_dir.name} did not start: {self.service.failure()}")
            return
        self._progress.announced = False
        await self.service.start()
        if await self.service.wait_ready(None):
            self._prepare()
            await self._succession.take_over(server)
            self._listening()
            self._progress.announced = True
            self._progress.ready(self.service)
        elif not self._stop_asked.is_set():
            raise refuse_without_room(self.service)

    async def _watch_run_directory(self) -> None:
        """Make the run directory whole again when something of it was removed, so that commands find this process."""
        told = ""
        while True:
            await asyncio.sleep(RUN_DIRECTORY_S)
            if not self.url or self._succession.pending or self.run_dir.whole:
                continue
            try:
                self.run_dir.renew()
                await self._endpoint.open_admin()
                await self._succession.offer_again()
            except (OSError, LucevisorError) as error:
                if str(error) != told:
                    log.error("the run directory was removed and cannot be made again: no command finds this process",
                              path=str(self.run_dir.path), pid=os.getpid(), reason=str(error))  # fmt: skip
                told = str(error)
            else:
                told = ""
                log.warning("the run directory was removed and is made again", path=str(self.run_dir.path))

    def _prepare(self) -> None:
        if self._ports.preprocessor is not None:
            self._ports.preprocessor.start(self._ports)
        collector.quieten()

    def _listening(self) -> None:
        self._display.listening(self.url)
        log.info("listening", url=self.url, name=self.run_dir.name, pid=os.getpid())

    @property
    def url(self) -> str:
        return self._endpoint.url

    def _in_a_line(self) -> tuple[str, str]:
        """Return the state, and what `systemctl status` shows of it."""
        if self._succession.pending:
            return "starting", f"about to take over: {self.service.reason() or 'ready'}"
        state = self.service.state
        text = f"{self.service.model.name} at {self.url}" if state == "ready" else self.service.reason()
        return state, f"{state}: {text}"

    # ---- for operators (lucevisor.api.admin.AdminPort)

    def status(self) -> dict[str, Any]:
        requests = self._app[ACTIVE].generating(time.monotonic())
        address = Address(self.url, self.config.server.tls_cert_file)
        compressor, name = self._ports.compressor, self.run_dir.name
        return status(self.service, name, address, self._progress, requests, compressor, self._described)

    async def wait_ready(self, timeout_s: float) -> bool:
        return await self.service.wait_ready(timeout_s)

    def stop(self, reason: str) -> None:
        self._n_stops += 1
        log.info("stopping", reason=reason, ask=self._n_stops)
        self._stop_asked.set()
        if self._n_stops > 1:
            task = asyncio.create_task(self.service.stop(0.0, 1.0 if self._n_stops == 2 else 0.0), name="hurried stop")
            self._hurried_stops.add(task)
            task.add_done_callback(self._hurried_stops.discard)

    def _reread(self) -> None:
        """Read the configuration again; apply what needs no new deployment, and log what was."""
        try:
            overrides = Overrides(self.config.file, self._overrides.of_start)
            done = apply(self.config, read_again(overrides), self._ports, self._tls)
            # What `lucevisor reload --set` moved stays until the next one; what is applied at once is the file's again.
            left = [o for o in self._overrides.of_reload if o.partition("=")[0] in done.waiting]
            self._overrides = replace(overrides, of_reload=left)
            self._described = self._overrides.described()
        except ConfigError as error:
            log.error("configuration not reloaded: all stays as it is", reason=str(error))
            return
        self.config = self.service.config = done.config
        log.info("configuration reloaded, with API keys and certificate", changed=list(done.changed))
        if done.waiting:
            log.warning("changed keys that wait for `lucevisor reload` or a start", keys=list(done.waiting))

    def _on_hangup(self, hangup: Hangup) -> None:
        if hangup.ends:
            self.stop("SIGHUP, the terminal was closed")
        elif hangup.reloads:
            with self._report.reload():
                self._reread()

    async def restart(self, groups: list[str], *, now: bool) -> None:
        for group in groups or list(self.service.groups):
            await self._orders.restart(group, now=now)

    async def reload(self, overrides: list[str]) -> dict[str, object]:
        task = asyncio.create_task(self._reload(overrides), name="reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if its client is gone
        return await asyncio.shield(task)  # half a move would serve nobody

    async def _reload(self, overrides: list[str]) -> dict[str, object]:
        with self._report.reload():
            later = replace(self._overrides, of_reload=overrides)
            found, described = await asyncio.to_thread(lambda: (read_again(later), later.described()))
            await asyncio.to_thread(check_before_start, found, self.model)
            changed = await self._orders.reload(found, keys_at_once(found, self._tls))
            apply(self.config, found, self._ports, self._tls)
        self.config, self._overrides, self._described = found, later, described
        log.info("configuration reloaded, with API keys and certificate", changed=[*changed])
        return changed

    def _begin_restart(self, group: str, now: bool) -> None:
        """Restart a group in the background; raises OrderError if there is none of that name."""
        self._orders.check_group(group)
        task = asyncio.create_task(self._restart_one(group, now), name=f"restart {group}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart_one(self, group: str, now: bool) -> None:
        try:
            await self._orders.restart(group, now=now)
        except LucevisorError as error:
            log.warning("not restarted", group=group, reason=str(error))

    # ---- for clients

    def _add_running(self, ports: Ports) -> None:
        """Give the API what changes while the supervisor runs."""
        ports.ready_in_s = self.service.ready_in_s
        ports.groups = lambda: group_metrics(self.service)
        ports.status = self.status
        ports.restart = self._begin_restart
        ports.snapshots = self._snapshot_figures
        ports.trace = self._traces or no_trace

    def _on_engine(self, engine: Engine) -> None:
        placement = self.service.placement
        self._ports.engine = engine
        if placement is not None:
            self._ports.max_context = placement.max_context
            self._ports.max_sequences = placement.max_sequences
            self._ports.boundary_row_bytes = dtype_bytes(placement.dtype, self.model.spec.boundary_width)
        self._ports.compressor = make_compressor(self.config, self.model, self.service, self._tokenizer)
        engine.relevance.score = make_page_scorer(self.config, self.model, self.service, self._tokenizer)

    def _not_ready(self) -> list[NotReadyPart]:
        engine = self.service.engine
        if self.service.state == "ready":
            return [NotReadyPart("pipeline", "invalid logits", engine.invalid)] if engine and engine.invalid else []
        parts = [
            NotReadyPart(f"group {name}", g.state.name.lower(), g.reason)
            for name, g in self.service.groups.items()
            if g.state is not State.READY
        ]
        return parts or [NotReadyPart("pipeline", self.service.state, self.service.reason())]

    def _snapshot_figures(self) -> SnapshotMetrics | None:
        snapshots = self.service.snapshots
        return figures(snapshots.store) if snapshots is not None else None
