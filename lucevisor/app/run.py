"""`lucevisor start` below the command line: builds a service, its HTTP endpoint and its admin socket, and serves.

The first SIGINT or SIGTERM gives running requests a moment to end, the second shortens every deadline, the third kills
the daemons.  SIGHUP applies what of a changed configuration needs no new deployment, `lucevisor reload` all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import ssl
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import structlog
import uvloop

from lucevisor import __version__
from lucevisor.api.app_state import ACTIVE, MODELS
from lucevisor.api.contexts import (
    ApiSettings,
    ModelCard,
    ModelContext,
    NotReadyPart,
    SamplingDefaults,
    ServerContext,
)
from lucevisor.api.keys import ApiKeys
from lucevisor.api.preprocessing import Preprocessor
from lucevisor.api.server import adopt, create_app, listen
from lucevisor.app import logs, traces
from lucevisor.app.endpoint import Endpoint
from lucevisor.app.extra_models import make_compressor, make_encoder, make_image_reader, make_page_scorer
from lucevisor.app.handover import Handover, no_room_error
from lucevisor.app.model_files import FamilyCard, find_card, open_models, open_tokenizer, without_unusable
from lucevisor.app.rundir import RunDirectory, log_path
from lucevisor.app.status import LoadProgress, status
from lucevisor.app.systemd import Notifier, SystemdReport, listen_sockets, watchdog_s
from lucevisor.config import (
    ApiKey,
    Config,
    ServerConfig,
    changed_keys,
    load,
    merge_overrides,
    read_api_keys,
    server_context,
    values_in_file,
)
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.model_swapper import LoadControl
from lucevisor.deployment.preflight import check_before_start
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import ModelService, Service
from lucevisor.engine.shell import Engine
from lucevisor.errors import AdminError, ConfigError, ExitCode, LucevisorError, suggest, unusable
from lucevisor.model.lora import LoraAdapter
from lucevisor.model.values import dtype_bytes
from lucevisor.protocol import fault_hooks
from lucevisor.snapshots.maintenance import check_directory
from lucevisor.supervision.events import State
from lucevisor.supervision.machine import SupervisionLimits
from lucevisor.text.template import TEMPLATE_KEY, ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

log = structlog.get_logger("lucevisor.app")


_MAX_FILES: Final = 65536


class EarlySignals:
    """Handles SIGINT, SIGTERM and SIGHUP until the event loop does, so that none is lost during the start."""

    def __init__(self) -> None:
        self.asked = ""
        self.reload = False
        self.hangup = HangupHandler()
        self._raising = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def stop_raising(self) -> None:
        """Only record signals from now on.  Raises KeyboardInterrupt if one has arrived."""
        self._raising = False
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and (effect := self.hangup.effect()) != "stop":
            self.reload |= effect == "reload"
            return
        self.asked = signal.Signals(number).name
        if self._raising:
            raise KeyboardInterrupt


class HangupHandler:
    """Effect of a SIGHUP: a stop if the terminal was closed, but under nohup none; else a reload."""

    def __init__(self) -> None:
        self._ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._in_terminal = _has_terminal()

    def effect(self) -> Literal["stop", "reload", "none"]:
        if not self._in_terminal or _has_terminal():
            return "reload"
        return "none" if self._ignored else "stop"


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def freeze_gc() -> None:
    """Exclude what exists now from later collections, and make full ones rare, as they visit every container."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 5, 100)  # a full one after 350,000 allocations, at most 40 MB of garbage


def raise_file_limit() -> int:
    """Raise the limit of open files, to 65,536 at most, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def max_connections_for(n_files: int, n_groups: int) -> int:
    """Return the connections within `n_files` open files; daemons need the rest."""
    return max(n_files // 4, n_files - 192 - 16 * n_groups)


def run(config: Config, name: str, display: LoadProgress, options: RunOptions) -> ExitCode:
    """Serve until stopped.  Raises LucevisorError for what keeps it from starting."""
    early = EarlySignals()
    run_dir = RunDirectory(name)
    if options.take_over_s is None or not run_dir.join():
        options = replace(options, take_over_s=None)
        run_dir.claim()
    try:
        problem = _open_log(config, run_dir, options)
        log.info(logs.STARTED, version=__version__, name=name, config=str(config.file), pid=os.getpid())
        if problem:
            log.warning("the log ends with this process", directory=str(run_dir.path), reason=problem)
        if options.limits is None:
            refuse_fault_hooks(config)
        else:
            fault_hooks.listen({"clock": fault_hooks.shift_clock})
        config = without_unusable(config)
        models = open_models(config, _report_download)
        check_before_start(config, models)
        for own in config.each_model:
            if own.cache.dir and own.cache.prefix_slots:
                check_directory(Path(own.cache.dir))
        early.stop_raising()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

            async def serve() -> ExitCode:  # a Supervisor is made in a running loop
                return await Supervisor(config, models, run_dir, display, options).run(early)

            return runner.run(serve())
    except KeyboardInterrupt:  # stopped before there was anything to stop
        return ExitCode.DONE
    finally:
        logs.close()
        run_dir.close()


def _open_log(config: Config, run_dir: RunDirectory, options: RunOptions) -> str:
    """Log to the state directory, else to the run directory, and return why."""
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


def _report_download(what: str) -> None:
    log.info("fetching", what=what)
    Notifier().send(STATUS=f"fetching {what}", EXTEND_TIMEOUT_USEC=6 * 3600 * 10**6)  # for the download


_LIVE_KEYS: Final = {"log.level", "server.api_keys_file", "server.admin_keys_file", "server.cors_origins"}
_TLS_KEYS: Final = {"server.tls_cert_file", "server.tls_key_file"}
"""Applied only with HTTPS on: a listening socket cannot begin to speak TLS, or cease to."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """`KEY=VALUE` overrides of `start`, and those of the last `lucevisor reload`."""

    file: Path
    from_start: Sequence[str]
    from_reload: Sequence[str] = ()

    @property
    def effective(self) -> list[str]:
        return merge_overrides(self.from_start, self.from_reload)

    def load(self) -> Config:
        return load(self.file, self.effective)

    def as_json_rows(self) -> list[dict[str, object]]:
        """Return key, value, source and the overridden value; environment variables may be secrets."""
        pairs = [override.partition("=")[::2] for override in self.effective]
        of_reload = {override.partition("=")[0] for override in self.from_reload}
        hidden = values_in_file(self.file, [key for key, _ in pairs])
        return [
            {
                "key": key,
                "value": None if ".env." in key else value,
                "source": "reload" if key in of_reload else "start",
                "hides": None if ".env." in key else hidden[key],
            }
            for key, value in pairs
        ]


def live_keys(after: Config, tls: ssl.SSLContext | None) -> set[str]:
    return _LIVE_KEYS | _TLS_KEYS if tls is not None and after.server.tls_cert_file else set(_LIVE_KEYS)


def apply_live_keys(
    config: Config, after: Config, server: ServerContext | None, tls: ssl.SSLContext | None
) -> tuple[Config, list[str], list[str]]:
    """Apply the keys of ``after`` that need no new deployment.  Raises ConfigError, and then nothing has changed.

    Returns the configuration in force, the keys applied, and the changed keys that need a reload.
    """
    client_keys, admin_keys = read_server_keys(after.server)
    at_once = live_keys(after, tls)
    if tls is not None and after.server.tls_cert_file:
        files = Path(after.server.tls_cert_file), Path(after.server.tls_key_file)
        server_context(*files)  # a pair that does not fit would leave the context without a key
        tls.load_cert_chain(*files)
    if server is not None:
        server.keys.replace(client_keys)
        server.admin_keys.replace(admin_keys)
        server.settings = replace(server.settings, cors_origins=after.server.cors_origins)
    logs.set_level(after.log.level)
    changed = changed_keys(config, after)
    names = [key.partition(".")[2] for key in at_once if key.startswith("server.")]
    effective = replace(
        config,
        log=replace(config.log, level=after.log.level),
        server=replace(config.server, **{name: getattr(after.server, name) for name in names}),
    )
    return effective, [k for k in changed if k in at_once], [k for k in changed if k not in at_once]


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    return server_context(Path(server.tls_cert_file), Path(server.tls_key_file)) if server.tls_cert_file else None


def read_server_keys(server: ServerConfig) -> tuple[Sequence[ApiKey], Sequence[ApiKey]]:
    """Return API keys and admin keys.  Raises ConfigError."""
    clients = read_api_keys(Path(server.api_keys_file)) if server.api_keys_file else ()
    admins = read_api_keys(Path(server.admin_keys_file), "server.admin_keys_file") if server.admin_keys_file else ()
    return clients, admins


class Supervisor:
    """A service, its HTTP endpoint and its admin socket."""

    def __init__(
        self,
        config: Config,
        models: Sequence[ServedModel],
        run_dir: RunDirectory,
        display: LoadProgress,
        options: RunOptions,
    ) -> None:
        self.config, self.models, self.run_dir = config, models, run_dir
        self._overrides = Overrides(config.file, config.overrides)
        self._described = self._overrides.as_json_rows()
        self._tls = tls_context(config.server)
        self._traces = traces.configured()
        self._server: ServerContext | None = None  # of the API
        self._contexts: dict[str, ModelContext] = {}
        self._display = display
        self._stop_asked = asyncio.Event()
        self._wait_forever = options.wait_forever
        self.service = Service(config, models, run_dir.own, display, self._on_engine, options.limits)
        self._admin_operations = AdminOperations(self.service)
        self._endpoint = Endpoint(self, run_dir.socket, self._tls)
        self._report = SystemdReport(self._status_line)
        self._handover = Handover(
            self.service, self._endpoint, run_dir, self._report, options.take_over_s, self._stop_asked.set
        )
        self._n_stops = 0
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop keeps no reference to them

    async def run(self, early: EarlySignals) -> ExitCode:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup, early.hangup)
        if early.asked:
            self.stop(early.asked)
        if early.reload:
            self._reload_live_keys()
        for notice in self.config.notices:
            log.warning("configuration", notice=str(notice))
        self._report.use(Notifier(), watchdog_s())
        report = asyncio.create_task(self._report.run(), name="systemd")
        watch = asyncio.create_task(self._watch_run_directory(), name="watch run directory")
        started = asyncio.create_task(self._start(), name="start")
        asked = asyncio.create_task(self._stop_asked.wait(), name="wait for a stop")
        try:
            await asyncio.wait({started, asked}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
            await asked
        finally:
            started.cancel()  # before what it opens is closed
            await asyncio.gather(started, return_exceptions=True)
            watch.cancel()
            await self._handover.close()
            await self.service.stop()
            await self._endpoint.close()
            if self._traces is not None:
                await self._traces.close()
            report.cancel()
        log.info("stopped", name=self.run_dir.name)
        return ExitCode.DONE

    async def _start(self) -> None:
        """Start the groups, and serve while they load; with --take-over once they have.  Raises LucevisorError."""
        server = self.config.server
        if not self._handover.pending:
            sockets = adopt(listen_sockets(), server.host, server.port) or listen(server.host, server.port)
            self.service.opening = "tokenizers and chat templates are built"
            await self._endpoint.open_admin()
            await self.service.start()
            await self._make_api()
            await self._endpoint.open(sockets)
            self._prepare()
            self._listening()
            self._handover.listen()
            while not await self.service.wait_ready(None) and self.service.state == "failed":
                if not self._wait_forever or self.service.retry_in_s() is None:
                    raise LucevisorError(f"{self.run_dir.name} did not start: {self.service.failure()}")
                await self.service.changes.wait_for(lambda: self.service.state != "failed")
            return
        self._display.announces = False
        await self.service.start()
        await self._make_api()
        if await self.service.wait_ready(None):
            self._prepare()
            # A stop does not end it halfway, when one of the two has the name and the other one the sockets.
            await asyncio.shield(self._spawn(self._handover.take_over(server), "take over"))
            self._display.announces = True
            self._listening()
        elif not self._stop_asked.is_set():
            raise no_room_error(self.service)

    async def _make_api(self) -> None:
        """Build tokenizers, templates and routes, while daemons import torch.

        Seconds in a thread.  It cannot be cancelled, but ends within one part of one model.
        """
        self._server = make_server_context(self.config, self.models)
        self._server.not_ready, self._server.status = self._not_ready, self.status
        self._server.restart = self._begin_restart
        if self._traces is not None:
            self._server.trace = self._traces
        contexts = {}
        for own, model in zip(self.config.each_model, self.models, strict=True):
            tokenizer = await asyncio.to_thread(open_tokenizer, own, model.spec)
            contexts[model.name] = context = make_model_context(own, model, tokenizer, self._server)
            await asyncio.to_thread(context.grammars.prepare)
            self._connect_service(context, self._pipelines_of(context))
            for marker in context.template.lost_markers(context.tokenizer) if context.template is not None else []:
                log.warning("chat template writes a marker in a way that makes it ordinary text",
                            model=context.model.name, marker=marker)  # fmt: skip
        self._endpoint.app = create_app(*contexts.values())
        self._contexts = contexts
        for service in self.service.models.values():
            if service.engine is not None:  # its daemons were faster
                self._connect_engine(service, service.engine)

    async def _watch_run_directory(self) -> None:
        """Recreate what was removed of the run directory, so that commands find this process."""
        result = ""
        while True:
            await asyncio.sleep(1.0)
            if not self.url or self._handover.pending or self.run_dir.is_intact:
                continue
            try:
                self.run_dir.renew()
                await self._endpoint.open_admin()
                await self._handover.listen_again()
            except (OSError, LucevisorError) as error:
                if str(error) != result:
                    log.error("the run directory was removed and cannot be made again: no command finds this process",
                              path=str(self.run_dir.path), pid=os.getpid(), reason=str(error))  # fmt: skip
                result = str(error)
            else:
                result = ""
                log.warning("the run directory was removed and is made again", path=str(self.run_dir.path))

    def _prepare(self) -> None:
        models = self._endpoint.app[MODELS]
        if models.server.preprocessor is not None:
            models.server.preprocessor.start(models)
        freeze_gc()

    def _listening(self) -> None:
        self._display.listening(self.url)
        log.info("listening", url=self.url, name=self.run_dir.name, pid=os.getpid())
        self.service.opening = ""
        self.service.on_change()

    @property
    def url(self) -> str:
        return self._endpoint.url

    def _status_line(self) -> tuple[str, str]:
        """Return the state, and the line that `systemctl status` shows."""
        if self._handover.pending:
            return "starting", f"about to take over: {self.service.reason() or 'ready'}"
        state = self.service.state
        text = f"{', '.join(self.service.models)} at {self.url}" if state == "ready" else self.service.reason()
        return state, f"{state}: {text}"

    # ---- for operators (lucevisor.app.admin.AdminPort)

    def status(self) -> dict[str, Any]:
        requests = self._endpoint.app[ACTIVE].generating(time.monotonic()) if self._contexts else []
        compressors = {name: context.compressor for name, context in self._contexts.items()}
        name = self.run_dir.name
        return status(self.service, name, self.url, self._display, requests, compressors, self._described)

    async def wait_ready(self, timeout_s: float) -> bool:
        return await self.service.wait_ready(timeout_s)

    def stop(self, reason: str) -> None:
        self._n_stops += 1
        log.info("stopping", reason=reason, ask=self._n_stops)
        self._stop_asked.set()
        if self._n_stops > 1:
            self._spawn(self.service.stop(0.0, 1.0 if self._n_stops == 2 else 0.0), "hurried stop")

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reload_live_keys(self) -> None:
        try:
            overrides = Overrides(self.config.file, self._overrides.from_start)
            after = overrides.load()
            after = after.without_models(after.found - self.config.models.keys())  # of files that came later
            config, changed, waiting = apply_live_keys(self.config, after, self._server, self._tls)
            # Overrides of `lucevisor reload --set` that changed the deployment stay; live keys follow the file again.
            left = [o for o in self._overrides.from_reload if o.partition("=")[0] in waiting]
            self._overrides = replace(overrides, from_reload=left)
            self._described = self._overrides.as_json_rows()
        except ConfigError as error:
            log.error("configuration not reloaded: nothing has changed", reason=str(error))
            return
        self.config = self.service.config = config
        log.info("configuration reloaded, with API keys and certificate", changed=changed)
        if waiting:
            log.warning("changed keys that wait for `lucevisor reload` or a start", keys=waiting)

    def _on_hangup(self, hangup: HangupHandler) -> None:
        if (effect := hangup.effect()) == "stop":
            self.stop("SIGHUP, the terminal was closed")
        elif effect == "reload":
            with self._report.reload():
                self._reload_live_keys()

    async def restart(self, groups: list[str], *, now: bool) -> None:
        await self._admin_operations.restart_all(groups or self.service.used_groups, now=now)

    async def load(self, model: str) -> None:
        await self._control(model).load()

    async def unload(self, model: str) -> None:
        await self._control(model).unload()

    def _control(self, name: str) -> LoadControl:
        """Return what loads the model that an operator names by its id or its section.  Raises AdminError."""
        models = self.service.models
        for key, model in models.items():
            if model.control is None:
                raise AdminError("replicas are loaded as long as their groups run; stop or restart the groups")
            if key == name or model.config.section == f"models.{name}":
                return model.control
        raise AdminError(f"there is no model {name!r}; {suggest(name, [*models], 'models')}")

    async def reload(self, overrides: list[str]) -> dict[str, object]:
        task = self._spawn(self._reload(overrides), "reload")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if the client is gone
        changed: dict[str, object] = await asyncio.shield(task)  # half a move would serve nobody
        return changed

    async def _reload(self, overrides: list[str]) -> dict[str, object]:
        with self._report.reload():
            later = replace(self._overrides, from_reload=overrides)
            after, described = await asyncio.to_thread(lambda: (without_unusable(later.load()), later.as_json_rows()))
            at_once = live_keys(after, self._tls)
            self._admin_operations.check_reload(after, at_once)
            await asyncio.to_thread(check_before_start, after, self.models)
            changed = await self._admin_operations.reload(after, at_once)
            apply_live_keys(self.config, after, self._server, self._tls)
        self.config, self._overrides, self._described = after, later, described
        log.info("configuration reloaded, with API keys and certificate", changed=[*changed])
        return changed

    def _begin_restart(self, group: str, now: bool) -> None:
        self._admin_operations.check_group(group)
        self._spawn(self._restart_one(group, now), f"restart {group}")

    async def _restart_one(self, group: str, now: bool) -> None:
        try:
            await self._admin_operations.restart_all([group], now=now)
        except LucevisorError as error:
            log.warning("not restarted", group=group, reason=str(error))

    # ---- for clients

    def _pipelines_of(self, context: ModelContext) -> list[ModelService]:
        return [model for model in self.service.models.values() if model.name == context.model.name]

    def _connect_service(self, context: ModelContext, models: Sequence[ModelService]) -> None:
        context.retry_in_s = lambda: min(filter(None, (model.retry_in_s() for model in models)), default=None)
        context.control = models[0].control
        context.snapshots = lambda: next(filter(None, (model.snapshot_store for model in models)), None)

    def _on_engine(self, model: ModelService, engine: Engine) -> None:
        if self._contexts:  # else the API is made later
            self._connect_engine(model, engine)

    def _connect_engine(self, model: ModelService, engine: Engine) -> None:
        context = self._contexts[model.name]
        models = self._pipelines_of(context)
        placements = [one.placement for one in models if one.placement is not None]
        context.engine = self.service.replicated or engine
        context.max_context = min(placement.max_context for placement in placements)  # so that any may go on with it
        context.max_sequences = sum(placement.max_sequences for placement in placements)
        width = model.model.spec.boundary_width
        context.boundary_row_bytes = dtype_bytes(placements[0].dtype, width)
        context.compressor = context.compressor or make_compressor(models, context.tokenizer)
        context.encode_image = make_encoder(models)
        engine.relevance.score = make_page_scorer(model, context.tokenizer)

    def _not_ready(self) -> list[NotReadyPart]:
        if self.service.state == "ready":
            models = [model for model in self.service.models.values() if model.engine is not None]
            invalid = [model.engine.invalid for model in models if model.engine is not None and model.engine.invalid]
            if self.service.replicated is not None and len(invalid) < len(models):
                return []
            return [NotReadyPart("pipeline", "invalid logits", reason) for reason in invalid]
        parts = [
            NotReadyPart(f"group {name}", g.state.name.lower(), g.reason)
            for name, g in self.service.groups.items()
            if g.state is not State.READY
        ]
        return parts or [NotReadyPart("pipeline", self.service.state, self.service.reason())]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``take_over_s``: seconds for requests of the supervisor to take over from; None: off.  ``wait_forever``: try
    groups that were given up again."""

    to_terminal: bool = True
    wait_forever: bool = False
    take_over_s: float | None = None
    limits: SupervisionLimits | None = None


def refuse_fault_hooks(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the fault hooks of processes would be on."""
    settings = [(fault_hooks.VARIABLE, environ.get(fault_hooks.VARIABLE, ""))]
    for name, group in config.groups.items():
        settings.append(
            (f"groups.{name}.env.{fault_hooks.VARIABLE}", group.environment().get(fault_hooks.VARIABLE, ""))
        )
    for key, value in settings:
        if value:
            why = "switches on hooks by which the processes of this supervisor can be broken"
            raise ConfigError(key, value, why, "unset it; it is for `lucevisor chaos`")


def parse_fault_limits(text: str) -> SupervisionLimits:
    """Parse the deadlines of ``--allow-faults``; raises ConfigError."""
    known = {field.name for field in fields(SupervisionLimits) if field.name.endswith("_s")}
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, seconds = part.partition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            limits[name] = -1.0
        if name not in known or not limits[name] > 0:
            raise ConfigError("--allow-faults", part, "is not NAME=SECONDS of a deadline", f"names: {', '.join(known)}")
    return replace(SupervisionLimits(), **limits)  # type: ignore[arg-type]


def make_server_context(config: Config, models: Sequence[ServedModel]) -> ServerContext:
    """Return the context of a server; raises the limit of open files for its connections."""
    client_keys, admin_keys = read_server_keys(config.server)
    return ServerContext(
        settings=_settings(config),
        keys=ApiKeys(client_keys),
        admin_keys=ApiKeys(admin_keys),
        preprocessor=Preprocessor(*(model.metadata for model in models)),
        log_drops=logs.dropped_records,
    )


def make_model_context(config: Config, model: ServedModel, tokenizer: Tokenizer, server: ServerContext) -> ModelContext:
    """Return the context of a model that has no engine yet."""
    metadata = model.metadata
    card = find_card(model.spec.architecture, metadata) or FamilyCard(architectures=[], name="")
    return ModelContext(
        model=_model_card(model, metadata, config.model.aliases),
        tokenizer=tokenizer,
        template=ChatTemplate.from_gguf(metadata),
        server=server,
        defaults=SamplingDefaults.from_gguf(metadata, card.sampling),
        direct_defaults=card.sampling_without_thinking,
        efforts=dict(card.thinking_budgets.items()),
        stop_ids=card.stop_ids(tokenizer),
        normalise=config.cache.normalise,
        images=make_image_reader(config, model, server.settings),
        banned=tuple(range(tokenizer.n_vocab, model.spec.vocabulary)),
        pooling=model.spec.pooling,
        pooled_width=model.spec.pooled_width,
    )


def _model_card(model: ServedModel, metadata: Mapping[str, object], aliases: tuple[str, ...]) -> ModelCard:
    card = ModelCard(
        name=model.name,
        aliases=aliases,
        created_s=int(model.files[0].stat().st_mtime),
        size_bytes=sum(file.stat().st_size for file in model.files),
        path=str(model.files[0]),
        architecture=model.spec.architecture,
        quant=model.spec.quant,
        n_parameters=sum(prod(t.shape) for t in model.spec.files.tensors.values()),
        facts={key: value for key, value in metadata.items() if not isinstance(value, list) and key != TEMPLATE_KEY},
    )
    return replace(card, adapters=tuple(_adapter_card(adapter, card) for adapter in model.spec.adapters))


def _adapter_card(adapter: LoraAdapter, model: ModelCard) -> ModelCard:
    path = adapter.files.paths[0]
    status = path.stat()
    return replace(
        model,
        name=adapter.name,
        created_s=int(status.st_mtime),
        size_bytes=status.st_size,
        path=str(path),
        parent=model.name,
        scale=adapter.scale,
        aliases=(),
    )


def _settings(config: Config) -> ApiSettings:
    server = config.server
    max_connections = max_connections_for(raise_file_limit(), len(config.groups))
    if max_connections < server.max_connections:
        log.warning("connection limit lowered", max_connections=max_connections,
                    reason="the limit of open files is low: raise it (`ulimit -Hn`, LimitNOFILE=)")  # fmt: skip
    return ApiSettings(
        host=server.host,
        allow_open=server.allow_open,
        cors_origins=server.cors_origins,
        max_connections=min(server.max_connections, max_connections),
    )
