"""One daemon process with its links, one a model, and heartbeat: turns what they deliver into events for the machine.

Every message is checked before it is used (`protocol/validation.py`). Invariants: every event has this daemon's number;
its last frames come before its exit, so a `Failed` that explains the exit is never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from msgspec import structs

from lucevisor import suspend_clock
from lucevisor.errors import LucevisorError
from lucevisor.protocol.errors import LinkClosed, LocalProtocolError, ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.handshake import Expected, check_hello
from lucevisor.protocol.loading import Hello, Load, Loaded
from lucevisor.protocol.messages import (
    TIMED_BYTES,
    TIMING,
    Checked,
    Failed,
    Heartbeat,
    LogLine,
    Progress,
    Shutdown,
    Unloaded,
)
from lucevisor.protocol.steps import StepResult
from lucevisor.protocol.tcp import TcpPath
from lucevisor.protocol.transport import Channel
from lucevisor.protocol.validation import MAX_INTEGER, DaemonFacts, UnansweredStep, fault_of
from lucevisor.supervision import events as ev
from lucevisor.supervision.child import Child, ProcessEnd
from lucevisor.supervision.events import State


@dataclass(frozen=True, slots=True)
class LoadWithFiles:
    """A Load and descriptors to send with it, which the caller keeps. `vocabulary`: ids that the daemon may name."""

    load: Load
    fds: Sequence[int] = ()
    vocabulary: int = MAX_INTEGER


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The callbacks of one model, each with the group's name first.

    `make_load` may wait for other groups; None: the model is not `wanted`; an exception is a configuration error.
    `check_loaded`: why what was loaded must not be used, or "". `find_step(group, stage, step_id)`: a step that the
    stage has yet to answer. `on_lost` comes once after each `on_ready`, when the link is unusable. `on_unloaded`: its
    memory is free, or it could not be loaded. `on_draining(group, daemon)`: finish, then call `drained(daemon)`.
    """

    make_load: Callable[[str, Hello], Awaitable[LoadWithFiles | None]]
    wanted: Callable[[], bool] = lambda: True
    check_loaded: Callable[[str, Loaded], str] = lambda *_: ""
    on_ready: Callable[[str, Channel, Hello, Loaded], None] = _ignore
    on_lost: Callable[[str, str], None] = _ignore
    on_frame: Callable[[str, Frame], None] = _ignore
    find_step: Callable[[str, int, int], UnansweredStep | None] = lambda *_: None
    on_state: Callable[[str, State, str], None] = _ignore
    on_draining: Callable[[str, int], None] | None = None
    on_progress: Callable[[str, Progress], None] = _ignore
    on_unloaded: Callable[[str, Unloaded], None] = _ignore


Field = str | int | float | bool | None

LAST_FRAMES_S = 0.5  # after the exit, to read the last frames

_RESERVED = frozenset({
    "self", "method_name", "event", "positional_args",  # parameters of structlog's methods
    "exc_info", "exception", "stack", "stack_info", "level", "log_level", "timestamp", "logger", "logger_name", "name",
    "group", "pid",
})  # fmt: skip
"""Fields of a log record that mean something to structlog, its processors or this program."""


def without_reserved_names(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return a daemon's log fields with reserved names prefixed: `self` becomes `daemon_self`."""
    named: dict[str, Field] = {}
    for key, value in fields.items():
        name = key
        while name in _RESERVED or name.startswith("_") or (name != key and name in fields):
            name = f"daemon_{name}"
        named[name] = value
    return named


@dataclass(slots=True, eq=False)
class ModelLink:
    """The link of one model. ``facts``: for the check of messages. ``loading``: from its Load until it is unloaded."""

    callbacks: Callbacks
    channel: Channel
    hello: Hello | None = None
    loaded: Loaded | None = None
    loading: bool = False
    facts: DaemonFacts = field(default_factory=lambda: DaemonFacts(0.0))


class Daemon:
    """One incarnation of a group's daemon; `adopt` the process after the launch. `callbacks`: in the order of its
    links."""

    def __init__(
        self, number: int, expected: Expected, callbacks: Sequence[Callbacks], emit: Callable[[ev.Event], None]
    ) -> None:
        self.number = number
        self.name = expected.group
        self.heartbeat: Heartbeat | None = None
        self.links: list[ModelLink] = []
        self.child: Child
        self._heartbeat: Channel
        self._expected = expected
        self._callbacks = callbacks
        self._emit = emit
        self._ready = False
        self._timed = asyncio.Event()
        self._distrusted = False  # it sent an impossible message, so all others are ignored
        self._facts = DaemonFacts(0.0)  # for messages on the heartbeat
        self._started_at = time.monotonic()
        self._loading: asyncio.Task[None] | None = None
        self._later: set[asyncio.Task[None]] = set()  # loads of one model each
        self._ended: ProcessEnd | None = None
        # Not `bind`, which would keep the level of now.
        self._log = structlog.get_logger("lucevisor.supervision", group=self.name)

    def adopt(self, child: Child) -> None:
        self.child = child
        self._log = structlog.get_logger("lucevisor.supervision", group=self.name, pid=child.pid)
        for i, callbacks in enumerate(self._callbacks):
            on_frame = partial(self._on_link_frame, i)
            channel = child.open_link(f"{self.name} link", on_frame, self._on_link_closed, i)
            self.links.append(ModelLink(callbacks, channel))
        self._heartbeat = child.open_heartbeat(
            f"{self.name} heartbeat", self._on_heartbeat_frame, self._on_heartbeat_closed
        )

    @property
    def hello(self) -> Hello | None:
        """The hello of the process; None until there is one for each model."""
        return self.links[0].hello if all(link.hello is not None for link in self.links) else None

    @property
    def loads(self) -> list[Loaded | None]:
        """What is loaded of each model in order; None: nothing."""
        return [link.loaded for link in self.links]

    @property
    def _all_loaded(self) -> bool:
        return all(link.loaded is not None or not link.loading for link in self.links)

    def join_group(self, number: int, emit: Callable[[ev.Event], None]) -> None:
        """Make a spare the group's daemon ``number``."""
        self.number, self._emit = number, emit

    # ---- instructions of the machine

    def send_load(self) -> None:
        self._loading = asyncio.get_running_loop().create_task(self._load(), name=f"load of {self.name}")

    async def time_way(self, timeout_s: float) -> TcpPath | None:
        """Time the way to a daemon on another host, after its hello; None on this host or if it is lost."""
        channel = self.links[0].channel
        if channel.path is None:
            return None
        try:
            self._timed.clear()
            channel.send(TIMING, payload=[bytes(TIMED_BYTES)])
            async with suspend_clock.timeout(timeout_s):
                await self._timed.wait()
        except ProtocolError:
            return None
        except TimeoutError:
            pass  # slow: what has arrived says how slow
        return channel.path

    def load_model(self, callbacks: Callbacks) -> None:
        """Load a model while the daemon serves others; `on_ready` follows, or `on_unloaded`.  Before READY that comes
        anyway."""
        link = next(link for link in self.links if link.callbacks is callbacks)
        if self._ready and not link.loading:
            link.loading = True
            task = asyncio.get_running_loop().create_task(self._load_later(link), name=f"load at {self.name}")
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    def send_shutdown(self, reason: str) -> None:
        for link in self.links:
            with contextlib.suppress(ProtocolError):
                link.channel.send(Shutdown(reason))

    def signal(self, signal: ev.ProcessSignal) -> None:
        self._log.info("signal", to=signal.value)
        with contextlib.suppress(ProcessLookupError):
            self.child.send(signal)

    def announce_ready(self) -> None:
        self._ready = True
        for link in self.links:
            if link.loaded is not None:
                self._pass_on(link)
            elif link.callbacks.wanted():  # since the loads were made
                self.load_model(link.callbacks)

    def _pass_on(self, link: ModelLink) -> None:
        assert link.hello is not None
        assert link.loaded is not None
        link.callbacks.on_ready(self.name, link.channel, link.hello, link.loaded)

    def stop_delivering(self) -> None:
        self._ready = False

    # ---- frames, output and exit of the process

    def on_line(self, stream: str, line: str) -> None:
        self._log.info("output", stream=stream, line=line)

    def on_ended(self, ended: ProcessEnd) -> None:
        """Called when the process is reaped; its last frames may still be in the sockets."""
        self._ended = ended
        if not self._finish_when_read():
            asyncio.get_running_loop().call_later(LAST_FRAMES_S, self._finish)

    def _finish_when_read(self) -> bool:
        """Report the exit if all sockets are read to their end; return whether it is reported."""
        if self._heartbeat.closed and all(link.channel.closed for link in self.links):
            self._finish()
        return self._ended is None

    def _finish(self) -> None:
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        for task in [self._loading, *self._later]:
            if task is not None:
                task.cancel()
        for link in self.links:
            link.channel.close("the process ended")
        self._heartbeat.close("the process ended")
        self._emit(ev.Exited(self.number, ended.code, ended.signal, ended.hint))

    async def _load(self) -> None:
        try:
            orders = await asyncio.gather(*map(self._make_load, self.links))
            for link, order in zip(self.links, orders, strict=True):
                if order is not None:
                    self._send(link, order)
        except LinkClosed:
            return  # on_closed reports it
        except (LucevisorError, LocalProtocolError) as error:
            self._emit(ev.Failure(self.number, str(error), configuration=True))
        except OSError as error:  # descriptors, memory, a disk: it may pass
            self._emit(ev.Failure(self.number, f"nothing to load: {type(error).__name__}: {error}"))
        except Exception as error:  # the owner's code: without an answer the daemon would wait for its load for ever
            self._log.exception("nothing to load")
            self._emit(ev.Failure(self.number, f"nothing to load: {type(error).__name__}: {error}", configuration=True))
        else:
            self._emit(ev.LoadSent(self.number))
            if not any(link.loading for link in self.links):
                self._emit(ev.LoadedReceived(self.number))

    async def _load_later(self, link: ModelLink) -> None:
        try:
            order = await self._make_load(link)
            if order is not None:
                self._send(link, replace(order, load=structs.replace(order.load, shared_process=True)))
                return
            link.loading = False
        except LinkClosed:
            return  # on_closed reports it
        except (LucevisorError, LocalProtocolError, OSError) as error:
            self._refused(link, Unloaded(problem=str(error)))
        except Exception as error:  # the owner's code: without an answer it would wait for ever
            self._log.exception("nothing to load")
            self._refused(link, Unloaded(problem=f"nothing to load: {type(error).__name__}: {error}"))

    def _refused(self, link: ModelLink, unloaded: Unloaded) -> None:
        link.loading, link.loaded = False, None
        link.callbacks.on_unloaded(self.name, unloaded)

    async def _make_load(self, link: ModelLink) -> LoadWithFiles | None:
        assert link.hello is not None
        return await link.callbacks.make_load(self.name, link.hello)

    def _send(self, link: ModelLink, order: LoadWithFiles) -> None:
        replays = bool(order.load.replay)
        link.loading = True
        link.facts = DaemonFacts(0.0, order.load, replays=replays, vocabulary=order.vocabulary)
        link.channel.send(order.load, fds=order.fds)

    def _check_frame(self, frame: Frame, facts: DaemonFacts, step: UnansweredStep | None = None) -> bool:
        if self._distrusted:
            return False
        facts.age_s = time.monotonic() - self._started_at
        message = frame.message
        fault = fault_of(message, frame.payload, facts, step)
        if fault:
            self._distrusted = True
            self._log.error("daemon sent an impossible message", message=type(message).__name__, reason=fault)
            self._emit(ev.Failure(self.number, f"it sent an impossible message: {fault}"))
        return not fault

    def _on_link_frame(self, model: int, frame: Frame) -> None:
        link, step = self.links[model], None
        if isinstance(frame.message, StepResult) and self._ready:
            step = link.callbacks.find_step(self.name, frame.message.stage, frame.message.step_id)
        if not self._check_frame(frame, link.facts, step):
            return
        match frame.message:
            case Hello() as hello:
                self._on_hello(link, hello)
            case Loaded() as loaded:
                self._on_loaded(link, loaded)
            case Unloaded() as unloaded if self._ready:
                self._refused(link, unloaded)
            case Failed() as failed:
                self._on_failed(failed)
            case Checked():
                self._timed.set()
            case _ if self._ready:
                link.callbacks.on_frame(self.name, frame)
            case _:
                pass  # a late answer of a daemon that was given up

    def _on_hello(self, link: ModelLink, hello: Hello) -> None:
        problems = check_hello(hello, self._expected)
        if problems:
            reason = "; ".join(str(problem) for problem in problems)
            self._emit(ev.Failure(self.number, reason, configuration=True))
            return
        link.hello = hello
        if self.hello is not None:
            self._emit(ev.HelloReceived(self.number))

    def _on_loaded(self, link: ModelLink, loaded: Loaded) -> None:
        link.loaded = loaded
        if problem := link.callbacks.check_loaded(self.name, loaded):
            self._emit(ev.Failure(self.number, problem))
        elif self._ready:
            self._pass_on(link)
        elif self._all_loaded:
            self._emit(ev.LoadedReceived(self.number))

    def _on_failed(self, failed: Failed) -> None:
        reason = f"{failed.what} failed at {failed.where}: {failed.reason}; {failed.advice}"
        self._log.error(
            "daemon failed", what=failed.what, where=failed.where, reason=failed.reason, details=failed.details
        )
        self._emit(ev.Failure(self.number, reason, failed.configuration, exiting=True))

    def _on_link_closed(self, error: ProtocolError) -> None:
        if self._report_cut(error):
            return
        if len(self.links) > 1:  # one of the others may have the reason
            self._lose_later(str(error))
            return
        self._emit(ev.LinkLost(self.number, str(error)))
        self._finish_when_read()

    def _on_heartbeat_frame(self, frame: Frame) -> None:
        facts = self._facts
        if isinstance(frame.message, Progress) and 0 <= frame.message.model < len(self.links):
            facts = self.links[frame.message.model].facts
        if not self._check_frame(frame, facts):
            return
        match frame.message:
            case Heartbeat() as heartbeat:
                self.heartbeat = heartbeat
                self._emit(ev.HeartbeatReceived(self.number, heartbeat.phase))
                self._log.debug("heartbeat", phase=heartbeat.phase, busy_s=round(heartbeat.busy_s, 3))
            case Progress() as progress:
                self._emit(ev.ProgressReceived(self.number))
                self._callbacks[progress.model].on_progress(self.name, progress)
            case LogLine(level, event, fields):
                getattr(self._log, level)(event, **without_reserved_names(fields))
            case _:
                pass

    def _on_heartbeat_closed(self, error: ProtocolError) -> None:
        """Report a lost heartbeat, but after the link: a daemon that exits closes both, and its link has the reason."""
        if not self._report_cut(error):
            self._lose_later(f"heartbeat: {error}")

    def _report_cut(self, error: ProtocolError) -> bool:
        """Report a host that answers no more; its daemon ends by itself, in an order that explains nothing."""
        if not (isinstance(error, LinkClosed) and error.cut):
            return False
        self._emit(ev.Failure(self.number, error.what))
        self._finish_when_read()
        return True

    def _lose_later(self, reason: str) -> None:
        self._finish_when_read()
        closed = ev.LinkLost(self.number, reason)
        asyncio.get_running_loop().call_later(LAST_FRAMES_S, self._emit, closed)
