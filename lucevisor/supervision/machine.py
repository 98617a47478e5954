"""The supervision state machine of one backend group: events in, instructions out; `now` and random are arguments.

Invariants: at most one daemon exists at a time; no instruction names one that has exited; READY follows only hello and
loaded of the same daemon; every stop ends in STOPPED after the exit, or in FAILED and `quarantined` when SIGKILL does
not end the process, and then no second one is started before it has exited. Any other FAILED is tried again after a
growing pause. No window of `window_s` seconds holds more than `n_restarts` restarts, those after pauses apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from lucevisor.protocol.process import EXIT_CONFIGURATION
from lucevisor.supervision import events as ev
from lucevisor.supervision.events import TRANSITIONS, CancelTimer, ProcessSignal, StartTimer, State, Timer


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Deadlines in seconds, in which the supervisor was not suspended (`lucevisor.suspend_clock`).

    `heartbeat_s`: between heartbeats of an idle daemon; `busy_heartbeat_s`: of one in a step, which may hold the
    interpreter lock; `load_stall_s`: of one in a load or a check.
    """

    hello_s: float = 60.0
    load_stall_s: float = 120.0
    heartbeat_s: float = 10.0
    busy_heartbeat_s: float = 30.0
    recheck_s: float = 0.5  # a supervisor that was delayed reads pending heartbeats before it considers a daemon hung
    stacks_s: float = 1.0  # from the request for stacks to SIGKILL
    exit_grace_s: float = 2.0  # for a daemon that exits by itself
    reap_s: float = 30.0  # from SIGKILL to quarantine; 18 s were seen where 40 processes shared two cores
    step_s: float = 120.0  # a daemon that works on one step or reset for longer is considered hung
    backoff_min_s: float = 0.25
    backoff_max_s: float = 30.0
    served_s: float = 5.0  # a daemon that was READY for this long is replaced at once
    stable_s: float = 60.0  # READY for this long resets the backoff
    shortage_pause_s: float = 1.0  # between tries while the supervisor is out of descriptors, memory or processes
    spare_delay_s: float = 1.0  # from READY until spares are started, which takes a core
    n_restarts: int = 10  # after failures, within any `window_s`; 0: a group that failed stays failed
    window_s: float = 60.0
    n_first_starts: int = 5  # restarts of a group that was never READY
    failed_first_s: float = 60.0  # pause of a group that was given up; doubles each time in a row
    failed_most_s: float = 3600.0

    def heartbeat_timeout_s(self, phase: str, *, loading: bool) -> float:
        """Return how long a daemon may be silent after a heartbeat that reported `phase`, which may be older than its
        load."""
        if loading or phase == "check":
            return self.load_stall_s
        return self.heartbeat_s if phase == "idle" else self.busy_heartbeat_s


@dataclass(slots=True)
class RestartPolicy:
    """Decides after each failure whether and when to retry. `rng` returns a number in [0, 1)."""

    limits: SupervisionLimits
    rng: Callable[[], float]
    _restarts: list[float] = field(default_factory=list)  # times of restarts after failures, within the window
    _in_a_row: int = 0  # failures since the last stable period
    _unready: int = 0  # starts in a row that never became ready
    _ready_at: float | None = None
    _served: bool = False  # it was READY once
    _given_up: int = 0  # times in a row

    def became_ready(self, now: float) -> None:
        self._ready_at = now
        self._unready = 0
        self._served = True

    def delay_s(self, now: float) -> float | None:
        """Return the seconds before the next start after a failure at `now`, or None to give up.

        Zero where a process had served, four times in a row; else exponential backoff with jitter. A start that never
        succeeds is given up after `n_restarts` tries in a row, sooner if none ever succeeded.
        """
        was_ready = self._ready_at is not None
        ready_s = 0.0 if self._ready_at is None else now - self._ready_at
        self._unready += not was_ready
        self._ready_at = None
        if ready_s >= self.limits.stable_s:
            self._in_a_row = self._given_up = 0
        self._in_a_row += 1
        step_s = min(self.limits.backoff_max_s, self.limits.backoff_min_s * 2.0 ** min(self._in_a_row - 1, 60))
        at_once = ready_s >= self.limits.served_s and self._in_a_row <= 4
        delay_s = 0.0 if at_once else step_s * (0.5 + 0.5 * self.rng())
        self._restarts = [at for at in self._restarts if at > now + delay_s - self.limits.window_s]
        n_restarts = self.limits.n_restarts
        n_starts = n_restarts if self._served else min(n_restarts, self.limits.n_first_starts)
        one_try = self._given_up > 0 and not was_ready
        if one_try or len(self._restarts) >= n_restarts or self._unready > n_starts:
            return None
        return delay_s

    def failed_pause_s(self) -> float | None:
        """Return the seconds until a group that is given up is tried once more, doubled each time; None: never."""
        if not self.limits.n_restarts:
            return None
        self._given_up += 1
        return min(self.limits.failed_most_s, self.limits.failed_first_s * 2.0 ** min(self._given_up - 1, 60))

    def restarted(self, now: float) -> None:
        self._restarts.append(now)

    def reset(self) -> None:
        self._restarts.clear()
        self._in_a_row = 0
        self._unready = 0
        self._given_up = 0
        self._ready_at = None


_IDLE = (State.STOPPED, State.BACKOFF, State.FAILED)
_WATCHED = (State.LOADING, State.READY, State.DRAINING)


class InvalidGroupTransition(Exception):
    """A move that the table does not list: a bug in this program."""


class _AfterExit(Enum):
    """The move after the exit of the present daemon."""

    RETRY = auto()
    STOP = auto()
    START = auto()


class _Escalation(Enum):
    """Stage of the escalation that stops the daemon."""

    MESSAGE = auto()  # a shutdown message was sent
    GRACE = auto()  # nothing is sent: the daemon exits by itself
    TERM = auto()
    STACKS = auto()  # it hangs: its stacks are being written
    KILL = auto()


class Timers:
    """Each change returns the instructions that carry it out."""

    def __init__(self) -> None:
        self._due: dict[Timer, float] = {}
        self._rechecked: set[Timer] = set()

    def due(self, timer: Timer) -> float | None:
        return self._due.get(timer)

    def due_after(self, timer: Timer, at: float) -> bool:
        return timer in self._due and at < self._due[timer]

    def arm(self, timer: Timer, now: float, after_s: float) -> StartTimer:
        self._rechecked.discard(timer)
        self._due[timer] = now + after_s
        return StartTimer(timer, after_s)

    def disarm(self, *timers: Timer) -> Iterator[CancelTimer]:
        for timer in timers:
            self._rechecked.discard(timer)
            if self._due.pop(timer, None) is not None:
                yield CancelTimer(timer)

    def fired(self, timer: Timer, now: float) -> StartTimer | bool:
        """Handle a timer that fired.  True: it expired; False: none runs; else the instruction that restarts it."""
        due = self._due.get(timer)
        if due is None:
            return False
        if now < due - 0.01:  # event loops count milliseconds
            return StartTimer(timer, due - now)
        del self._due[timer]
        return True

    def recheck(self, timer: Timer, now: float, after_s: float) -> StartTimer | None:
        """Start an expired timer once more; None the second time."""
        if timer in self._rechecked:
            return None
        started = self.arm(timer, now, after_s)
        self._rechecked.add(timer)
        return started


class Machine:
    """One group. `restarts` counts starts after the first, by failure or request; `pid` is 0 without a process."""

    def __init__(self, name: str, limits: SupervisionLimits, rng: Callable[[], float]) -> None:
        self.name = name
        self.limits = limits
        self.policy = RestartPolicy(limits, rng)
        self.state = State.STOPPED
        self.reason = ""
        self.failure = ""  # why the last process ended; until a new one is READY or an operator intervenes
        self.daemon: int | None = None
        self.pid = 0
        self.restarts = 0
        self.quarantined = False
        self._heartbeat_s = self.limits.heartbeat_s  # the present limit
        self.shortage = False  # in BACKOFF: because there were no descriptors, memory or processes left
        self._n_daemons = 0
        self._spawned = False
        self._load_sent = False
        self._announced = False
        self._after_exit = _AfterExit.RETRY
        self._fault = ""
        self._configuration = False
        self._level = _Escalation.GRACE
        self._kill_by: float | None = None
        self._timers = Timers()
        self._log: deque[str] = deque(maxlen=64)  # for the message of an InvalidGroupTransition
        self._out: list[ev.Instruction] = []
        self._now = 0.0

    def retry_in_s(self, now: float) -> float | None:
        due = self._timers.due(Timer.BACKOFF)
        return None if due is None else max(0.0, due - now)

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event at `now`, seconds of a clock that stands still while this process is stopped.

        Events of a daemon that is gone are ignored. Raises InvalidGroupTransition on a bug in the machine.
        """
        self._now = now
        self._out = []
        self._log.append(f"{now:.3f} {self.state} {event}")
        daemon = getattr(event, "daemon", self.daemon)
        if daemon == self.daemon:
            self._dispatch(event)
        return self._out

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.TimerFired(timer):
                self._on_timer(timer)
            case ev.HeartbeatReceived(_, phase):
                if self.state in _WATCHED:
                    self._arm_heartbeat(phase)
            case ev.ProgressReceived():
                if self.state is State.LOADING and self._load_sent:
                    self._arm(Timer.LOAD, self.limits.load_stall_s)
            case ev.StartRequested():
                self._on_start_requested()
            case ev.StopRequested(deadline_s, drain_s):
                self._on_stop_requested(deadline_s, drain_s)
            case ev.RestartRequested(deadline_s, drain_s):
                self._on_restart_requested(deadline_s, drain_s)
            case ev.Drained():
                if self.state is State.DRAINING:
                    self._begin_stopping("drained", _Escalation.MESSAGE)
            case ev.Spawned(_, pid):
                self._on_spawned(pid)
            case ev.HelloReceived() | ev.LoadSent() | ev.LoadedReceived():
                self._on_start_event(event)
            case ev.LinkLost(_, reason):
                if self.state is not State.STOPPING:
                    self._give_up_daemon(reason, _Escalation.GRACE)
                    self._fault = ""  # the exit that follows, if one does, explains it better
            case ev.Overdue(_, what, waited_s):
                self._give_up_daemon(f"{what} gave no result in {waited_s:.1f} s", _Escalation.STACKS)
            case ev.Failure(_, reason, configuration, exiting):
                if self.state is State.STOPPING and not self._fault:  # read after another connection had ended
                    self._fault, self._configuration = reason, configuration
                self._give_up_daemon(reason, _Escalation.GRACE if exiting else _Escalation.TERM, configuration)
            case ev.SpawnFailed(_, reason, configuration):
                self._on_daemon_gone(reason, configuration, shortage=not configuration)
            case ev.Exited(_, code, _, _):
                self._on_daemon_gone(event.describe(self.pid), code == EXIT_CONFIGURATION)

    # ---- requests from outside

    def _on_start_requested(self) -> None:
        if self.state is State.STOPPED:
            self._reset()
            self._start("start requested")
        elif self.state is State.FAILED:
            self._out.append(
                ev.Refuse(f"group {self.name} failed: {self.reason}; `lucevisor restart {self.name}` tries at once")
            )
        elif self._is_stopping():
            self._out.append(ev.Refuse(f"group {self.name} is being stopped; start it when it is stopped"))

    def _on_stop_requested(self, deadline_s: float, drain_s: float) -> None:
        if self.quarantined:
            self._after_exit = _AfterExit.STOP
        elif self.state in (State.BACKOFF, State.FAILED):
            self._disarm(Timer.BACKOFF)
            self._transition(State.STOPPED, "stop requested")
        elif self.state is not State.STOPPED:
            self._after_exit = _AfterExit.STOP
            self._request_stop("stop requested", deadline_s, drain_s)

    def _on_restart_requested(self, deadline_s: float, drain_s: float) -> None:
        if self.quarantined:
            self._out.append(ev.Refuse(f"group {self.name}: {self.reason}"))
        elif self._is_stopping():
            self._out.append(ev.Refuse(f"group {self.name} is being stopped; start it when it is stopped"))
        elif self.state in _IDLE:
            self._reset()
            self._disarm(Timer.BACKOFF)
            self.restarts += self._n_daemons > 0
            self._start("restart requested")
        else:
            self._reset()
            self._after_exit = _AfterExit.START
            self._request_stop("restart requested", deadline_s, drain_s)

    def _reset(self) -> None:
        self.policy.reset()
        self.failure = ""

    def _is_stopping(self) -> bool:
        return self._after_exit is _AfterExit.STOP and self.state in (State.DRAINING, State.STOPPING)

    def _request_stop(self, reason: str, deadline_s: float, drain_s: float) -> None:
        """Begin to stop the daemon; a further request can only shorten the deadline."""
        requested_s = self._now + max(deadline_s, 0.0)
        self._kill_by = requested_s if self._kill_by is None else min(self._kill_by, requested_s)
        drain_s = min(drain_s, deadline_s)
        if self.state is State.STOPPING:
            self._shorten_deadline()
        elif deadline_s <= 0:
            self._begin_stopping(reason, _Escalation.KILL)
        elif self.state in (State.STARTING, State.LOADING):
            self._begin_stopping(reason, _Escalation.TERM)  # it does not read its link while importing and loading
        elif drain_s <= 0:
            self._begin_stopping(reason, _Escalation.MESSAGE)
        elif self.state is State.READY:
            self._transition(State.DRAINING, reason)
            self._arm(Timer.DRAIN, drain_s)
            assert self.daemon is not None
            self._out.append(ev.AnnounceDraining(self.daemon))
        elif self._timers.due_after(Timer.DRAIN, self._now + drain_s):
            self._arm(Timer.DRAIN, drain_s)

    def _shorten_deadline(self) -> None:
        left_s = self._left_s() / (2 if self._level is _Escalation.MESSAGE else 1)
        if self._level is _Escalation.KILL:
            return
        if left_s <= 0:
            self._escalate(_Escalation.KILL)
        elif self._timers.due_after(Timer.ESCALATION, self._now + left_s):  # no timer runs without a process
            self._arm(Timer.ESCALATION, left_s)

    # ---- events of the daemon

    def _start(self, reason: str) -> None:
        self._n_daemons += 1
        self.daemon = self._n_daemons
        self._spawned = self._load_sent = self._announced = self._configuration = False
        self._after_exit = _AfterExit.RETRY
        self._fault = ""
        self.shortage = False
        self._kill_by = None
        self._transition(State.STARTING, reason)
        self._out.append(ev.Spawn(self.daemon))

    def _on_spawned(self, pid: int) -> None:
        self.pid = pid
        self._spawned = True
        if self.state is State.STARTING:
            self._arm(Timer.HELLO, self.limits.hello_s)
        else:
            self._escalate(self._level)  # a stop was requested before the process was spawned

    def _on_start_event(self, event: ev.HelloReceived | ev.LoadSent | ev.LoadedReceived) -> None:
        if self.state is State.STOPPING:
            return
        match event:
            case ev.HelloReceived(daemon) if self.state is State.STARTING and self._spawned:
                self._disarm(Timer.HELLO)
                self._transition(State.LOADING, "hello")
                self._arm_heartbeat("start")  # only this: the load may wait for groups that are not up yet
                self._out.append(ev.SendLoad(daemon))
            case ev.LoadSent() if self.state is State.LOADING:
                self._load_sent = True
                self._arm(Timer.LOAD, self.limits.load_stall_s)
            case ev.LoadedReceived(daemon) if self.state is State.LOADING and self._load_sent:
                self._disarm(Timer.LOAD)
                self.failure = ""
                self._transition(State.READY, "loaded")
                self._arm_heartbeat("load")
                self.policy.became_ready(self._now)
                self._announced = True
                self._out.append(ev.AnnounceReady(daemon))
            case ev.HelloReceived() | ev.LoadedReceived():
                what = "hello" if isinstance(event, ev.HelloReceived) else "loaded"
                self._give_up_daemon(f"it sent {what} out of turn, while {self.state}", _Escalation.TERM)

    def _give_up_daemon(self, reason: str, level: _Escalation, configuration: bool = False) -> None:
        if self.state in (State.STARTING, *_WATCHED):
            self._fault = reason
            self._configuration = configuration
            self._begin_stopping(reason, level)

    def _on_daemon_gone(self, how: str, configuration: bool, *, shortage: bool = False) -> None:
        """Handle the end of the process, or a failed spawn; `shortage`: not by a fault of the group."""
        reason = self._fault or how
        configuration = configuration or self._configuration
        self._disarm(*Timer)
        self._announce_lost(reason)
        self.daemon = None
        self.pid = 0
        self._spawned = False
        was_quarantined, self.quarantined = self.quarantined, False
        if self._after_exit is _AfterExit.STOP:
            self._transition(State.STOPPED, "stop requested")
        elif was_quarantined:
            self.reason = f"{how}, long after SIGKILL; `lucevisor restart {self.name}` tries at once"
            self._out.append(ev.Publish(self.state, self.reason))
            self._pause_failed()
        elif self._after_exit is _AfterExit.START:
            self.restarts += 1
            self._start("restart requested")
        else:
            self._retry(reason, configuration, shortage)

    def _retry(self, reason: str, configuration: bool, shortage: bool) -> None:
        self.failure = reason
        if configuration:
            self._transition(State.FAILED, reason)
            self._pause_failed()
        elif (delay_s := self.limits.shortage_pause_s if shortage else self.policy.delay_s(self._now)) is None:
            self._transition(
                State.FAILED, f"{reason}; restart limit {self.limits.n_restarts}/{self.limits.window_s:g}s reached"
            )
            self._pause_failed()
        else:
            self.shortage = shortage
            self._transition(State.BACKOFF, reason)
            self._arm(Timer.BACKOFF, delay_s)

    def _pause_failed(self) -> None:
        if (pause_s := self.policy.failed_pause_s()) is not None:
            self._arm(Timer.BACKOFF, pause_s)

    # ---- timers and escalation

    def _on_timer(self, timer: Timer) -> None:
        over = self._timers.fired(timer, self._now)
        if isinstance(over, ev.StartTimer):
            self._out.append(over)
        if over is not True:
            return
        match timer:
            case Timer.BACKOFF:
                if not self.shortage:
                    self.restarts += 1
                    self.policy.restarted(self._now)
                self._start("backoff over" if self.state is State.BACKOFF else "tried again after it was given up")
            case Timer.DRAIN:
                self._begin_stopping("drain deadline", _Escalation.MESSAGE)
            case Timer.ESCALATION:
                self._on_escalation()
            case Timer.HELLO | Timer.LOAD | Timer.HEARTBEAT:
                again = self._timers.recheck(timer, self._now, self.limits.recheck_s)
                if again is None:
                    self._give_up_daemon(self._silence(timer), _Escalation.STACKS)
                else:
                    self._out.append(again)

    def _silence(self, timer: Timer) -> str:
        return {
            Timer.HELLO: f"no hello in {self.limits.hello_s:g} s",
            Timer.LOAD: f"no load progress in {self.limits.load_stall_s:g} s",
        }.get(timer, f"no heartbeat in {self._heartbeat_s:g} s: the process hangs or is stopped")

    def _on_escalation(self) -> None:
        if self._level is _Escalation.MESSAGE:
            self._escalate(_Escalation.TERM)
        elif self._level is not _Escalation.KILL:
            self._fault = self._fault or self.reason
            self._escalate(_Escalation.KILL)
        else:
            self.quarantined = True
            self._transition(
                State.FAILED,
                f"process {self.pid} does not end on SIGKILL (uninterruptible sleep in a driver?); its devices are in "
                "quarantine and no second daemon is started on them; see dmesg, a reboot may be needed",
            )

    def _begin_stopping(self, reason: str, level: _Escalation) -> None:
        self._disarm(Timer.HELLO, Timer.LOAD, Timer.HEARTBEAT, Timer.DRAIN)
        self._announce_lost(reason)
        self._transition(State.STOPPING, reason)
        self._escalate(level)

    def _escalate(self, level: _Escalation) -> None:
        """Send the signal or message of `level` and start its timer; without a process yet, only store it."""
        self._level = level
        if not self._spawned or self.daemon is None:
            return
        match level:
            case _Escalation.MESSAGE:
                self._out.append(ev.SendShutdown(self.daemon, self.reason))
                self._arm(Timer.ESCALATION, self._left_s() / 2)
            case _Escalation.GRACE:
                self._arm(Timer.ESCALATION, min(self.limits.exit_grace_s, self._left_s()))
            case _Escalation.TERM:
                self._out.append(ev.SendSignal(self.daemon, ProcessSignal.TERMINATE))
                self._arm(Timer.ESCALATION, self.limits.exit_grace_s if self._kill_by is None else self._left_s())
            case _Escalation.STACKS:
                self._out.append(ev.SendSignal(self.daemon, ProcessSignal.STACKS))
                self._arm(Timer.ESCALATION, min(self.limits.stacks_s, self._left_s()))
            case _Escalation.KILL:
                self._out.append(ev.SendSignal(self.daemon, ProcessSignal.KILL))
                self._arm(Timer.ESCALATION, self.limits.reap_s)

    def _left_s(self) -> float:
        return float("inf") if self._kill_by is None else max(self._kill_by - self._now, 0.0)

    # ---- bookkeeping

    def _transition(self, state: State, reason: str) -> None:
        if state in (State.STARTING, State.LOADING) and self.failure:
            reason = f"restarting after: {self.failure}"  # still the answer to why the group is not READY
        if state not in TRANSITIONS[self.state]:
            events = "\n  ".join(self._log)
            raise InvalidGroupTransition(
                f"group {self.name}: no move from {self.state} to {state} ({reason}); last events:\n  {events}"
            )
        self.state = state
        self.reason = reason
        self._out.append(ev.Publish(state, reason))

    def _announce_lost(self, reason: str) -> None:
        if self._announced and self.daemon is not None:
            self._announced = False
            self._out.append(ev.AnnounceLost(self.daemon, reason))

    def _arm(self, timer: Timer, after_s: float) -> None:
        self._out.append(self._timers.arm(timer, self._now, after_s))

    def _arm_heartbeat(self, phase: str) -> None:
        self._heartbeat_s = self.limits.heartbeat_timeout_s(phase, loading=self.state is State.LOADING)
        self._arm(Timer.HEARTBEAT, self._heartbeat_s)

    def _disarm(self, *timers: Timer) -> None:
        self._out += self._timers.disarm(*timers)
