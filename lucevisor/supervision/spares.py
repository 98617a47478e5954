"""Warm standby processes of one group, which have imported torch and sent hello; one replaces a daemon that ends.

A failed spare affects no request.  Invariant: every process that is dropped is killed and waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from lucevisor.supervision import events as ev
from lucevisor.supervision.child import SpawnError
from lucevisor.supervision.daemon import Daemon
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.machine import SupervisionLimits

_log = structlog.get_logger("lucevisor.supervision")

LaunchSpare = Callable[[int, Callable[[ev.Event], None]], Daemon]
"""Starts a process as the daemon with a number, and passes its events on.  Raises SpawnError."""


@dataclass(slots=True, eq=False)
class _Spare:
    daemon: Daemon
    heartbeat_at: float
    hello_deadline: asyncio.TimerHandle
    warm: bool = False


class Spares:
    """``n``: their number while the group is READY."""

    def __init__(
        self, group: str, n: int, launch: LaunchSpare, limits: SupervisionLimits, clock: Callable[[], float]
    ) -> None:
        self._group, self._n, self._launch, self._limits, self._clock = group, n, launch, limits, clock
        self._loop = asyncio.get_running_loop()
        self._spares: dict[int, _Spare] = {}
        self._ending: dict[int, Daemon] = {}
        self._n_wanted = n  # one that was prepared included
        self._n_launched = self._n_failed = 0  # ever; in a row
        self._fill_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def statuses(self) -> list[dict[str, Any]]:
        heartbeats = [(spare, spare.daemon.heartbeat) for spare in self._spares.values()]
        return [
            {"pid": spare.daemon.child.pid, "warm": spare.warm, "rss_bytes": beat.rss_bytes if beat else 0}
            for spare, beat in heartbeats
        ]

    def refill(self) -> None:
        """Start missing spares after a delay: a group that has become READY has work to do first."""
        self._n_failed, self._n_wanted = 0, self._n
        self._fill_after(self._limits.spare_delay_s)

    async def prepare(self) -> bool:
        """Start a spare unless there is one; return whether it is warm, at the latest when it is overdue."""
        self._n_wanted = max(1, self._n)
        if not self._spares:
            self._start()
        while self._spares and not any(spare.warm for spare in self._spares.values()):
            self._changed.clear()
            await self._changed.wait()
        return bool(self._spares)

    def take_warm(self) -> Daemon | None:
        """Remove and return a warm spare with a recent heartbeat, if any."""
        for number, spare in [*self._spares.items()]:
            if not spare.warm:
                continue
            if self._clock() - spare.heartbeat_at <= self._limits.heartbeat_s:
                del self._spares[number]
                return spare.daemon
            seconds = self._limits.heartbeat_s
            self._drop(number, f"no heartbeat in {seconds:g} s: the process hangs or is stopped")
        return None

    def drop(self) -> None:
        self._cancel_fill()
        for number in [*self._spares]:
            self._drop(number)

    async def wait_until_reaped(self) -> None:
        """Wait until dropped spares are reaped, or log those that SIGKILL does not end."""
        try:
            async with asyncio.timeout(self._limits.reap_s):
                while self._ending:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pids = [daemon.child.pid for daemon in self._ending.values()]
            _log.error("spares do not end on SIGKILL", group=self._group, pids=pids)

    # ---- inside

    def _cancel_fill(self) -> None:
        if self._fill_timer is not None:
            self._fill_timer.cancel()
            self._fill_timer = None

    def _fill_after(self, delay_s: float) -> None:
        self._cancel_fill()
        self._fill_timer = self._loop.call_later(delay_s, self._fill)

    def _fill(self) -> None:
        self._fill_timer = None
        for number in [*self._spares][self._n_wanted :]:  # prepared for a restart that did not come
            self._drop(number)
        while len(self._spares) < self._n and self._start():
            pass

    def _start(self) -> bool:
        self._n_launched += 1
        number = -self._n_launched  # no daemon of a group has such a number
        try:
            daemon = self._launch(number, self._on_event)
        except SpawnError as error:
            self._failed(error.reason, configuration=error.configuration)
            return False
        seconds = self._limits.hello_s
        deadline = self._loop.call_later(seconds, self._drop, number, f"no hello in {seconds:g} s")
        self._spares[number] = _Spare(daemon, self._clock(), deadline)
        return True

    def _on_event(self, event: ev.Event) -> None:
        number = getattr(event, "daemon", 0)
        spare = self._spares.get(number)
        match event:
            case ev.Exited():
                if spare is not None:
                    self._drop(number, event.describe(spare.daemon.child.pid))
                self._ending.pop(number, None)
                self._changed.set()
            case ev.HelloReceived() if spare is not None:
                spare.hello_deadline.cancel()
                spare.warm, spare.heartbeat_at, self._n_failed = True, self._clock(), 0
                _log.info("spare is warm", group=self._group, pid=spare.daemon.child.pid)
                self._changed.set()
            case ev.HeartbeatReceived() if spare is not None:
                spare.heartbeat_at = self._clock()
            case ev.Failure(_, reason, configuration, _) if spare is not None:
                self._drop(number, reason, configuration=configuration)
            case ev.LinkLost(_, reason) if spare is not None:
                self._drop(number, reason)
            case _:
                pass

    def _drop(self, number: int, failure: str = "", *, configuration: bool = False) -> None:
        """Kill a spare; ``failure``: why, or empty if it is just not needed any more."""
        spare = self._spares.pop(number, None)
        if spare is None:
            return
        spare.hello_deadline.cancel()
        self._ending[number] = spare.daemon
        spare.daemon.signal(ProcessSignal.KILL)
        self._changed.set()
        if failure:
            self._failed(failure, configuration=configuration)

    def _failed(self, reason: str, *, configuration: bool) -> None:
        self._n_failed += 1
        _log.warning("spare failed", group=self._group, reason=reason)
        if self._n and not configuration:
            self._fill_after(min(self._limits.backoff_max_s, self._limits.backoff_min_s * 2.0**self._n_failed))
