"""Warm processes of one group: torch imported, hello said, a load rehearsed; one takes over where the present one ends.

Knows neither states nor steps: the group asks for a spare where it would start a process.  A failed spare affects no
request; it is replaced after growing delays.  Invariants: a spare belongs to the group or to this pool, never to
both; every process that is dropped is killed and waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from lucevisor.protocol.loading import Load
from lucevisor.protocol.messages import Heartbeat
from lucevisor.supervision import events as ev
from lucevisor.supervision.child import SpawnError
from lucevisor.supervision.daemon import Daemon
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.policy import SupervisionLimits

_log = structlog.get_logger("lucevisor.supervision")

LaunchSpare = Callable[[int, Callable[[ev.Event], None]], Daemon]
"""Starts a process as daemon of that number, which emits its events there.  Raises SpawnError."""


@dataclass(frozen=True, slots=True)
class SpareUse:
    """A spare as `status` shows it.  ``warm``: it has said hello, and rehearsed its load."""

    pid: int
    warm: bool
    rss_bytes: int


@dataclass(slots=True, eq=False)
class _Spare:
    daemon: Daemon
    heard_at: float
    deadline: asyncio.TimerHandle  # of its hello, then of its next heartbeat in its rehearsal
    greeted: bool = False
    rehearses: bool = False
    rehearsed_by: float = 0.0  # by when it must have rehearsed
    warm: bool = False

    def use(self) -> SpareUse:
        heartbeat: Heartbeat | None = self.daemon.heartbeat
        return SpareUse(self.daemon.child.pid, self.warm, heartbeat.rss_bytes if heartbeat is not None else 0)


class Spares:
    """``n``: how many are kept while the group is READY.  ``present_load``: what its daemon was sent; None unless it is
    READY, as a rehearsal would take memory that a load needs.  ``clock``: of supervision.
    """

    def __init__(
        self,
        group: str,
        n: int,
        launch: LaunchSpare,
        present_load: Callable[[], Load | None],
        limits: SupervisionLimits,
        clock: Callable[[], float],
    ) -> None:
        self._group, self._n, self._launch, self._limits, self._clock = group, n, launch, limits, clock
        self._present_load = present_load
        self._loop = asyncio.get_running_loop()
        self._spares: dict[int, _Spare] = {}
        self._ending: dict[int, Daemon] = {}
        self._n_wanted = n  # one that was prepared included
        self._n_launched = self._n_failed = 0  # ever; in a row
        self._later: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def use(self) -> list[SpareUse]:
        """The spares, as `status` shows them."""
        return [spare.use() for spare in self._spares.values()]

    def keep(self) -> None:
        """The group is READY: let those rehearse that said hello while it was not, and start what is missing, a little
        later, for it has work to do first.
        """
        self._n_failed, self._n_wanted = 0, self._n
        for number, spare in [*self._spares.items()]:
            if spare.greeted and not spare.rehearses and not spare.warm:
                self._rehearse(number, spare)
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

    def take(self) -> Daemon | None:
        """Hand over a spare that has sent a heartbeat lately, a warm one if there is one, else one that has said hello;
        None without one.
        """
        for number, spare in sorted(self._spares.items(), key=lambda found: not found[1].warm):
            if not spare.greeted:
                continue
            if self._clock() - spare.heard_at <= self._limits.heartbeat_s:
                del self._spares[number]
                spare.deadline.cancel()
                return spare.daemon
            self._drop(number, "no heartbeat within its limit: the process hangs or is stopped")
        return None

    def drop(self) -> None:
        """Kill all, and start none before ``keep``."""
        self._cancel()
        for number in [*self._spares]:
            self._drop(number)

    async def ended(self) -> None:
        """Wait until what was dropped is reaped, or would be quarantined."""
        try:
            async with asyncio.timeout(self._limits.reap_s):
                while self._ending:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            _log.error(
                "spares do not end on SIGKILL", group=self._group, pids=[d.child.pid for d in self._ending.values()]
            )

    # ---- inside

    def _cancel(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _fill_after(self, delay_s: float) -> None:
        self._cancel()
        self._later = self._loop.call_later(delay_s, self._fill)

    def _fill(self) -> None:
        self._later = None
        for number in [*self._spares][self._n_wanted :]:  # prepared for a restart that did not come
            self._drop(number)
        while len(self._spares) < self._n and self._start():
            pass

    def _start(self) -> bool:
        self._n_launched += 1
        number = -self._n_launched  # no daemon of a group has such a number
        try:
            daemon = self._launch(number, self._take_event)
        except SpawnError as error:
            self._failed(error.reason, configuration=error.configuration)
            return False
        self._spares[number] = _Spare(daemon, self._clock(), self._no_hello(number))
        return True

    def _no_hello(self, number: int) -> asyncio.TimerHandle:
        seconds = self._limits.hello_s
        return self._loop.call_later(seconds, self._drop, number, f"no hello in {seconds:g} s")

    def _await_rehearsal(self, number: int, spare: _Spare) -> None:
        """Drop a spare that sends no heartbeat meanwhile in the time that a hello has, or rehearses for too long."""
        spare.deadline.cancel()
        left_s, silence_s = spare.rehearsed_by - self._clock(), self._limits.hello_s
        why = (
            f"no heartbeat in {silence_s:g} s" if silence_s < left_s else f"not over in {self._limits.rehearsal_s:g} s"
        )
        after_s = max(0.0, min(left_s, silence_s))
        spare.deadline = self._loop.call_later(after_s, self._drop, number, f"its rehearsal: {why}")

    def _take_event(self, event: ev.Event) -> None:
        number = getattr(event, "child", 0)
        spare = self._spares.get(number)
        match event:
            case ev.Exited(_, _, _, _):
                if spare is not None:
                    self._drop(number, event.how(spare.daemon.child.pid))
                self._ending.pop(number, None)
                self._changed.set()
            case ev.HelloReceived() if spare is not None:
                spare.deadline.cancel()
                spare.greeted, spare.heard_at = True, self._clock()
                self._rehearse(number, spare)
            case ev.Beat() if spare is not None:
                spare.heard_at = self._clock()
                if spare.rehearses and not spare.warm:
                    self._await_rehearsal(number, spare)
            case ev.Failure(_, reason, configuration, _) if spare is not None:
                self._drop(number, reason, configuration=configuration)
            case ev.LinkLost(_, reason) if spare is not None:
                self._drop(number, reason)
            case _:
                pass

    def _rehearse(self, number: int, spare: _Spare) -> None:
        """Let a spare rehearse what the present daemon has loaded; later if there is no such daemon now."""
        load = self._present_load()
        if load is not None:
            spare.rehearses = True
            spare.rehearsed_by = self._clock() + self._limits.rehearsal_s
            self._await_rehearsal(number, spare)
            spare.daemon.rehearse(load, lambda: self._warm(spare))

    def _warm(self, spare: _Spare) -> None:
        if spare not in self._spares.values():
            return  # dropped meanwhile
        spare.deadline.cancel()
        spare.warm, self._n_failed = True, 0
        _log.info("spare is warm", group=self._group, pid=spare.daemon.child.pid)
        self._changed.set()

    def _drop(self, number: int, failure: str = "", *, configuration: bool = False) -> None:
        """Kill a spare; ``failure``: why, or empty if it is just not needed any more."""
        spare = self._spares.pop(number, None)
        if spare is None:
            return
        spare.deadline.cancel()
        self._ending[number] = spare.daemon
        spare.daemon.signal(ProcessSignal.KILL)
        self._changed.set()
        if failure:
            self._failed(failure, configuration=configuration)

    def _failed(self, reason: str, *, configuration: bool) -> None:
        """Try again later, unless it would fail again."""
        self._n_failed += 1
        _log.warning("spare failed", group=self._group, reason=reason)
        if self._n and not configuration:
            self._fill_after(min(self._limits.backoff_most_s, self._limits.backoff_first_s * 2.0**self._n_failed))
