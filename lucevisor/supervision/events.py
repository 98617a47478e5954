"""What the supervision machine is told and what it answers.

Knows nothing of how either is carried out. Invariant: every event and instruction that concerns a process names the
child by its number, which is never used twice in one group, so news of a dead child can be told from news of the
living one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lucevisor.supervision.states import State

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


class Timer(StrEnum):
    """The deadlines a group can wait for; at most one of each runs."""

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
    """An operator or the supervisor wants the group up."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The group shall end: after at most `drain_s` no more steps, after at most `deadline_s` in all a SIGKILL."""

    deadline_s: float
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """The group shall run in a new process; deadlines of the old one as in StopAsked."""

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
    """There is no process. `configuration`: another try would fail as well; else the supervisor lacked something."""

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
    """The load moved on."""

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
    """The link can carry no more frames: end of file, reset, or bytes that are no frame."""

    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The child has worked on one thing for longer than it may: "step 17", "a reset"."""

    child: int
    what: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The child cannot go on. `configuration`: a new one could not either. `exiting`: it said that it ends by
    itself.
    """

    child: int
    reason: str
    configuration: bool = False
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone and reaped. Both `code` and `signal` None: its status was lost. `hint`: what its
    stderr or the kernel says of the cause.
    """

    child: int
    code: int | None = None
    signal: int | None = None
    hint: str = ""

    def how(self, pid: int) -> str:
        """Say how process `pid` ended, with the cause when there is a word of it."""
        if self.signal is not None:
            how = f"process {pid} was killed by signal {self.signal}"
            how += f" ({_SIGNALS[self.signal]})" if self.signal in _SIGNALS else ""
        elif self.code is not None:
            how = f"process {pid} exited with code {self.code}"
        else:
            how = f"process {pid} ended; its exit status was taken by somebody else"
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
    """Tell `TimerFired(timer)` in `after_s` seconds; replaces a running one of the same name."""

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
    """A child that was announced ready takes no more steps; its process may still be there."""

    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """What was asked is not done."""

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
