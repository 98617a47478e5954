"""States of a backend group, and events and instructions of the supervision machine.

docs/states.md is printed from `TRANSITIONS`. A daemon number is never reused in a group, so events of a dead daemon are
never taken for those of the living one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class State(StrEnum):
    """State of a backend group. There is a process from STARTING to STOPPING, and in FAILED when quarantined."""

    STOPPED = "stopped"  # nothing runs, and no start is requested
    STARTING = "starting"  # a daemon was spawned; it imports torch and has not sent hello
    LOADING = "loading"  # it sent hello and loads its layers
    READY = "ready"  # it runs steps
    DRAINING = "draining"  # it finishes the steps it has and gets no new ones
    STOPPING = "stopping"  # it was told to exit, or signalled
    BACKOFF = "backoff"  # it exited; the next start is delayed
    FAILED = "failed"  # given up until a long pause is over or a restart is requested


TRANSITIONS: dict[State, dict[State, str]] = {
    State.STOPPED: {
        State.STARTING: "start or restart requested",
    },
    State.STARTING: {
        State.LOADING: "hello",
        State.STOPPING: "stop or restart requested; hello late or refused; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "cannot spawn; configuration error; restart limit",
    },
    State.LOADING: {
        State.READY: "loaded",
        State.STOPPING: "stop or restart requested; load stalled or failed; heartbeat missed; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "exited with a configuration error; restart limit",
    },
    State.READY: {
        State.DRAINING: "stop or restart requested",
        State.STOPPING: "immediate stop or restart; heartbeat missed; step or reset overdue; failed; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "exited with a configuration error; restart limit",
    },
    State.DRAINING: {
        State.STOPPING: "drained; drain deadline; heartbeat missed; step or reset overdue; failed; link closed",
        State.STOPPED: "exited, stop requested",
        State.STARTING: "exited, restart requested",
    },
    State.STOPPING: {
        State.STOPPED: "exited, stop requested",
        State.STARTING: "exited, restart requested",
        State.BACKOFF: "exited after a failure",
        State.FAILED: "configuration error; restart limit; does not die (quarantine)",
    },
    State.BACKOFF: {
        State.STARTING: "backoff over; restart requested",
        State.STOPPED: "stop requested",
    },
    State.FAILED: {
        State.STARTING: "pause over; restart requested",
        State.STOPPED: "stop requested",
    },
}


_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


class Timer(StrEnum):
    """Deadlines of a group; at most one of each runs."""

    HELLO = "hello"
    LOAD = "load"  # no load progress
    HEARTBEAT = "heartbeat"  # no heartbeat
    DRAIN = "drain"
    ESCALATION = "escalation"  # the present step of stopping a daemon
    BACKOFF = "backoff"


class ProcessSignal(StrEnum):
    """Signals by what they are for."""

    STACKS = "stacks"  # write every thread's stack to stderr
    TERMINATE = "terminate"
    KILL = "kill"


# ---- events


class Event(msgspec.Struct, frozen=True):
    """What the machine is told."""


class StartRequested(Event, frozen=True):
    """An operator or the supervisor starts the group."""


class StopRequested(Event, frozen=True):
    """Stop the group: no more steps after `drain_s`, SIGKILL after `deadline_s`."""

    deadline_s: float
    drain_s: float = 0.0


class RestartRequested(Event, frozen=True):
    """Replace the process; its deadlines are those of StopRequested."""

    deadline_s: float
    drain_s: float = 0.0


class Drained(Event, frozen=True):
    """The engine has no work left at this daemon."""

    daemon: int


class Spawned(Event, frozen=True):
    daemon: int
    pid: int


class SpawnFailed(Event, frozen=True):
    """No process was started. `configuration`: another try would fail too."""

    daemon: int
    reason: str
    configuration: bool


class HelloReceived(Event, frozen=True):
    daemon: int


class LoadSent(Event, frozen=True):
    daemon: int


class ProgressReceived(Event, frozen=True):
    """The load made progress."""

    daemon: int


class LoadedReceived(Event, frozen=True):
    daemon: int


class HeartbeatReceived(Event, frozen=True):
    daemon: int
    phase: str


class LinkLost(Event, frozen=True):
    """The link is unusable: end of file, reset, or bytes that are not a frame."""

    daemon: int
    reason: str


class Overdue(Event, frozen=True):
    """The daemon has worked on `what` ("step 17", "a reset") for too long."""

    daemon: int
    what: str
    waited_s: float


class Failure(Event, frozen=True):
    """The daemon cannot go on. `configuration`: a new one could not either. `exiting`: it exits by itself."""

    daemon: int
    reason: str
    configuration: bool = False
    exiting: bool = False


class Exited(Event, frozen=True):
    """The process is reaped. Both `code` and `signal` None: its status was lost. `hint`: the cause."""

    daemon: int
    code: int | None = None
    signal: int | None = None
    hint: str = ""

    def describe(self, pid: int) -> str:
        if self.signal is not None:
            how = f"process {pid} was killed by signal {self.signal}"
            how += f" ({_SIGNALS[self.signal]})" if self.signal in _SIGNALS else ""
        elif self.code is not None:
            how = f"process {pid} exited with code {self.code}"
        else:
            how = f"process {pid} ended; other code in this process took its exit status"
        return f"{how}: {self.hint}" if self.hint else how


class TimerFired(Event, frozen=True):
    timer: Timer


# ---- instructions


class Instruction(msgspec.Struct, frozen=True):
    """What the machine asks for."""


class Spawn(Instruction, frozen=True):
    daemon: int


class SendLoad(Instruction, frozen=True):
    daemon: int


class SendShutdown(Instruction, frozen=True):
    daemon: int
    reason: str


class SendSignal(Instruction, frozen=True):
    daemon: int
    signal: ProcessSignal


class StartTimer(Instruction, frozen=True):
    """Emit `TimerFired(timer)` in `after_s` seconds, in place of a running timer of that name."""

    timer: Timer
    after_s: float


class CancelTimer(Instruction, frozen=True):
    timer: Timer


class Publish(Instruction, frozen=True):
    """The group entered `state`."""

    state: State
    reason: str


class AnnounceReady(Instruction, frozen=True):
    daemon: int


class AnnounceDraining(Instruction, frozen=True):
    daemon: int


class AnnounceLost(Instruction, frozen=True):
    """A daemon that was ready takes no more steps; its process may still be alive."""

    daemon: int
    reason: str


class Refuse(Instruction, frozen=True):
    """The request is not carried out."""

    reason: str
