"""Events and instructions of the supervision machine.

Knows nothing of how either is carried out. Invariant: every event and instruction about a process carries its child
number, which is never reused in a group, so events of a dead child are never taken for those of the living one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lucevisor.supervision.states import State

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


class Timer(StrEnum):
    """Deadlines of a group; at most one of each runs."""

    HELLO = "hello"
    LOAD = "load"  # no load progress
    PULSE = "pulse"  # no heartbeat
    DRAIN = "drain"
    ESCALATION = "escalation"  # the present step of stopping a child
    BACKOFF = "backoff"


class ProcessSignal(StrEnum):
    """Signals by what they are for."""

    STACKS = "stacks"  # write every thread's stack to stderr
    TERMINATE = "terminate"
    KILL = "kill"


# ---- events


@dataclass(frozen=True, slots=True)
class StartAsked:
    """An operator or the supervisor starts the group."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Stop the group: no more steps after `drain_s`, SIGKILL after `deadline_s` in all."""

    deadline_s: float
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """Replace the process; its deadlines are those of StopAsked."""

    deadline_s: float
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drained:
    """The engine has no work left at this child."""

    child: int


@dataclass(frozen=True, slots=True)
class Spawned:
    child: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """There is no process. `configuration`: another try would fail too; otherwise the supervisor lacked something."""

    child: int
    reason: str
    configuration: bool


@dataclass(frozen=True, slots=True)
class HelloReceived:
    child: int


@dataclass(frozen=True, slots=True)
class LoadSent:
    child: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The load made progress."""

    child: int


@dataclass(frozen=True, slots=True)
class LoadedReceived:
    child: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat; `phase` is that of the Heartbeat message."""

    child: int
    phase: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is unusable: end of file, reset, or bytes that are not a frame."""

    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The child has worked on `what` ("step 17", "a reset") for too long."""

    child: int
    what: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The child cannot go on. `configuration`: a new one could not either. `exiting`: it exits by itself."""

    child: int
    reason: str
    configuration: bool = False
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is reaped. Both `code` and `signal` None: its status was lost. `hint`: the cause, as its stderr or
    the kernel gives it.
    """

    child: int
    code: int | None = None
    signal: int | None = None
    hint: str = ""

    def how(self, pid: int) -> str:
        """Describe how process `pid` ended, with its cause when known."""
        if self.signal is not None:
            how = f"process {pid} was killed by signal {self.signal}"
            how += f" ({_SIGNALS[self.signal]})" if self.signal in _SIGNALS else ""
        elif self.code is not None:
            how = f"process {pid} exited with code {self.code}"
        else:
            how = f"process {pid} ended; other code in this process took its exit status"
        return f"{how}: {self.hint}" if self.hint else how


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: Timer


Event = (
    StartAsked
    | StopAsked
    | RestartAsked
    | Drained
    | Spawned
    | SpawnFailed
    | HelloReceived
    | LoadSent
    | Progressed
    | LoadedReceived
    | Beat
    | LinkLost
    | Overdue
    | Failure
    | Exited
    | TimerFired
)


# ---- instructions


@dataclass(frozen=True, slots=True)
class Spawn:
    child: int


@dataclass(frozen=True, slots=True)
class SendLoad:
    child: int


@dataclass(frozen=True, slots=True)
class SendShutdown:
    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    child: int
    signal: ProcessSignal


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Emit `TimerFired(timer)` in `after_s` seconds; replaces a running timer of that name."""

    timer: Timer
    after_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    timer: Timer


@dataclass(frozen=True, slots=True)
class Publish:
    """The group entered `state`."""

    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    child: int


@dataclass(frozen=True, slots=True)
class AnnounceDraining:
    child: int


@dataclass(frozen=True, slots=True)
class AnnounceLost:
    """A child that was announced ready takes no more steps; its process may still be alive."""

    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is not carried out."""

    reason: str


Instruction = (
    Spawn
    | SendLoad
    | SendShutdown
    | SendSignal
    | StartTimer
    | CancelTimer
    | Publish
    | AnnounceReady
    | AnnounceDraining
    | AnnounceLost
    | Refuse
)
