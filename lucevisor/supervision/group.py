"""One backend group: feeds events to the machine, one at a time, and carries out its instructions in order.

Callbacks decide what to load and what a frame means; they run on the event loop and must not block.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from lucevisor import suspend_clock
from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.model.values import Backend
from lucevisor.protocol.handshake import Expected
from lucevisor.protocol.loading import Hello, Loaded
from lucevisor.protocol.messages import Heartbeat
from lucevisor.protocol.tcp import TcpPath
from lucevisor.protocol.transport import Channel
from lucevisor.supervision import events as ev
from lucevisor.supervision.child import SpawnError
from lucevisor.supervision.daemon import Callbacks, Daemon
from lucevisor.supervision.events import State
from lucevisor.supervision.launcher import Launcher
from lucevisor.supervision.machine import Machine, SupervisionLimits
from lucevisor.supervision.spares import Spares

_log = structlog.get_logger("lucevisor.supervision")


class RefusedError(LucevisorError):
    """A request that a group cannot carry out now."""


class GroupSupervisor:
    """Starts, watches, stops and restarts the daemon of one group. For a running event loop in the main thread.

    `devices`: indices in use; `n_spares`: processes kept warm; `callbacks`: of each model whose shards the daemon
    holds.
    """

    def __init__(
        self,
        config: GroupConfig,
        threads: int,
        launcher: Launcher,
        callbacks: Sequence[Callbacks],
        *,
        devices: Sequence[int] = (0,),
        limits: SupervisionLimits | None = None,
        n_spares: int = 0,
    ) -> None:
        self.config = config
        self.name = config.name
        self.limits = limits or SupervisionLimits()
        self._threads = threads
        self._launcher = launcher
        self._callbacks = callbacks
        indices = [0] if config.backend == "cpu" else list(devices)  # every index of a cpu group is the same memory
        self._expected = Expected(config.name, Backend(config.backend), launcher.source_hash, indices)
        self._machine = Machine(config.name, self.limits, random.random)
        self._loop = asyncio.get_running_loop()
        self._clock = suspend_clock.SuspendAwareClock()
        self._daemon: Daemon | None = None
        self._spares = Spares(config.name, n_spares, self._launch, self.limits, self._clock)
        self._timers: dict[ev.Timer, asyncio.TimerHandle] = {}
        self._events: deque[ev.Event] = deque()
        self._pumping = False
        self._refused = ""
        self._waiting: list[tuple[Callable[[State], bool], asyncio.Future[State]]] = []
        self._undrained = 0  # owners of models that have work at the daemon to drain

    # ---- public

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def reason(self) -> str:
        return self._machine.reason

    @property
    def quarantined(self) -> bool:
        """True while a process that SIGKILL does not end holds the group's devices."""
        return self._machine.quarantined

    @property
    def shortage(self) -> bool:
        """True while BACKOFF waits for descriptors, memory or processes."""
        return self._machine.shortage

    @property
    def retry_in_s(self) -> float | None:
        return self._machine.retry_in_s(self._clock())

    @property
    def pid(self) -> int | None:
        return self._machine.pid or None

    @property
    def restarts(self) -> int:
        return self._machine.restarts

    @property
    def hello(self) -> Hello | None:
        return self._live_daemon.hello if self._live_daemon else None

    @property
    def loads_by_model(self) -> list[Loaded | None]:
        """What is loaded of each model; None: nothing."""
        return self._live_daemon.loads if self._live_daemon else []

    @property
    def loads(self) -> list[Loaded]:
        return [loaded for loaded in self.loads_by_model if loaded is not None]

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self._live_daemon.heartbeat if self._live_daemon else None

    @property
    def spares(self) -> list[dict[str, Any]]:
        return self._spares.statuses

    @property
    def output(self) -> dict[str, tuple[str, ...]]:
        """The last lines of the present process, or of the last one, by stream."""
        lines = self._daemon.child.lines if self._daemon else {}
        return {stream: tuple(of.kept) for stream, of in lines.items()}

    @property
    def path(self) -> TcpPath | None:
        """The way to a process on another host, as the kernel has measured it."""
        links = self._live_daemon.links if self._live_daemon else []
        return links[0].channel.path if links else None

    async def time_way(self, timeout_s: float) -> TcpPath | None:
        return await self._live_daemon.time_way(timeout_s) if self._live_daemon else None

    @property
    def link(self) -> Channel | None:
        usable = self.state in (State.READY, State.DRAINING)
        return self._live_daemon.links[0].channel if self._live_daemon and usable else None

    async def start(self) -> None:
        """Start the group; returns when the process is launched, long before READY. Raises RefusedError."""
        self._request(ev.StartRequested())

    async def stop(self, deadline_s: float = 4.0, drain_s: float = 0.0) -> State:
        """End the process and return STOPPED, or FAILED when it is quarantined.

        All callers share one shutdown; a later call can only shorten its deadlines. At `deadline_s` the process is
        killed.
        """
        self._request(ev.StopRequested(deadline_s, drain_s))
        state = await self._wait_for(
            lambda state: state is State.STOPPED or (state is State.FAILED and self._machine.quarantined),
            deadline_s + self.limits.reap_s + 5.0,
        )
        await self._spares.wait_until_reaped()
        return state

    async def restart(self, *, now: bool = False, deadline_s: float = 10.0) -> None:
        """Replace the process, after its current work unless `now`; clears FAILED and the count of failures.

        Returns when that is under way. Raises RefusedError when the group is being stopped or in quarantine.
        """
        self._request(ev.RestartRequested(deadline_s, 0.0 if now else deadline_s / 2))

    def load_model(self, callbacks: Callbacks) -> None:
        if self._live_daemon is not None:
            self._live_daemon.load_model(callbacks)

    async def prepare(self) -> bool:
        """Have a warm process for the next start; return whether there is one."""
        return self.state is State.READY and await self._spares.prepare()

    async def wait(self, *states: State, timeout_s: float) -> State:
        """Wait until the group is in one of `states`, and return it. Raises TimeoutError."""
        return await self._wait_for(lambda state: state in states, timeout_s)

    def drained(self, daemon: int) -> None:
        """Report, after `on_draining`, that an owner has no work left at this daemon."""
        self._undrained -= 1
        if self._undrained <= 0:
            self._emit(ev.Drained(daemon))

    def overdue(self, what: str, waited_s: float) -> None:
        """Report that `what` took too long: the process dumps its stacks and is replaced."""
        if self._live_daemon is not None:
            self._emit(ev.Overdue(self._live_daemon.number, what, waited_s))

    def distrust(self, reason: str) -> None:
        """Report that the daemon broke the protocol: it is replaced."""
        if self._live_daemon is not None:
            self._emit(ev.Failure(self._live_daemon.number, reason))

    # ---- the pump: events in, instructions out

    def _request(self, event: ev.Event) -> None:
        self._refused = ""
        self._emit(event)
        if self._refused:
            raise RefusedError(self._refused)

    def _emit(self, event: ev.Event) -> None:
        """Give the machine one event and carry out its instructions; events emitted meanwhile are queued.

        Instructions for the process come before callbacks; one that raises stops neither the others nor the caller.
        """
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                instructions = self._machine.handle(self._events.popleft(), self._clock())
                for instruction in instructions:
                    self._carry_out(instruction)
                for instruction in instructions:
                    try:
                        self._announce(instruction)
                    except Exception as error:  # the owner's code: the other callbacks still run
                        context = {"message": f"group {self.name}: {instruction} was not taken", "exception": error}
                        self._loop.call_exception_handler(context)
        finally:
            self._pumping = False

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartTimer(timer, after_s):
                self._cancel(timer)
                self._timers[timer] = self._loop.call_later(after_s, self._fire, timer)
            case ev.CancelTimer(timer):
                self._cancel(timer)
            case ev.Spawn(number):
                self._spawn(number)
            case ev.SendLoad():
                self._current_daemon.send_load()
            case ev.SendShutdown(_, reason):
                self._current_daemon.send_shutdown(reason)
            case ev.SendSignal(_, signal):
                self._current_daemon.signal(signal)
            case ev.Refuse(reason):
                self._refused = reason

    def _announce(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Publish(state, reason):
                self._publish(state, reason)
            case ev.AnnounceReady():
                self._current_daemon.announce_ready()
            case ev.AnnounceLost(_, reason):
                self._current_daemon.stop_delivering()
                for callbacks in self._callbacks:
                    callbacks.on_lost(self.name, reason)
            case ev.AnnounceDraining(number):
                draining = [one.on_draining for one in self._callbacks if one.on_draining is not None]
                self._undrained = len(draining)
                for on_draining in draining:
                    on_draining(self.name, number)
                if not draining:
                    self._emit(ev.Drained(number))

    @property
    def _live_daemon(self) -> Daemon | None:
        return self._daemon if self._machine.pid else None

    @property
    def _current_daemon(self) -> Daemon:
        assert self._daemon is not None
        return self._daemon

    def _spawn(self, number: int) -> None:
        spare = self._spares.take_warm()
        if spare is not None:
            self._daemon = spare
            spare.join_group(number, self._emit)
            self._emit(ev.Spawned(number, spare.child.pid))
            self._emit(ev.HelloReceived(number))
            return
        try:
            self._daemon = self._launch(number, self._emit)
        except SpawnError as error:
            self._emit(ev.SpawnFailed(number, f"groups.{self.name}: {error.reason}", error.configuration))
        else:
            self._emit(ev.Spawned(number, self._daemon.child.pid))

    def _launch(self, number: int, emit: Callable[[ev.Event], None]) -> Daemon:
        daemon = Daemon(number, self._expected, self._callbacks, emit)
        n_links = len(self._callbacks)
        daemon.adopt(self._launcher.launch(self.config, self._threads, daemon.on_line, daemon.on_ended, n_links))
        return daemon

    def _fire(self, timer: ev.Timer) -> None:
        del self._timers[timer]
        self._emit(ev.TimerFired(timer))

    def _cancel(self, timer: ev.Timer) -> None:
        handle = self._timers.pop(timer, None)
        if handle is not None:
            handle.cancel()

    # ---- states and who waits for them

    def _publish(self, state: State, reason: str) -> None:
        if state is State.STOPPED:
            self._clock.pause()
        else:
            self._clock.resume()
        log = {State.FAILED: _log.error, State.BACKOFF: _log.warning}.get(state, _log.info)
        log("group state", group=self.name, state=state.value, reason=reason, pid=self.pid)
        for accepts, future in self._waiting:
            if not future.done() and accepts(state):
                future.set_result(state)
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]
        if state is State.READY:
            self._spares.refill()
        elif state in (State.STOPPED, State.FAILED):
            self._spares.drop()
        for callbacks in self._callbacks:
            callbacks.on_state(self.name, state, reason)

    async def _wait_for(self, accepts: Callable[[State], bool], timeout_s: float) -> State:
        if accepts(self.state):
            return self.state
        future: asyncio.Future[State] = self._loop.create_future()
        self._waiting.append((accepts, future))
        async with suspend_clock.timeout(timeout_s):
            return await future
