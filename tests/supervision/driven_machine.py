"""A supervision machine driven by hand, for tests."""

from __future__ import annotations

from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.machine import Machine
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import State

LIMITS = SupervisionLimits(n_restarts=2, window_s=60.0)


class DrivenMachine:
    """A machine with a clock of its own. `send(event)` returns the instructions; `fire(timer)` first moves the clock to
    when the timer is due.
    """

    def __init__(self, limits: SupervisionLimits = LIMITS) -> None:
        self.machine = Machine("left", limits, lambda: 0.5)
        self.now = 100.0
        self.due: dict[Timer, float] = {}

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        instructions = self.machine.handle(event, self.now)
        for instruction in instructions:
            if isinstance(instruction, ev.StartTimer):
                self.due[instruction.timer] = self.now + instruction.after_s
            elif isinstance(instruction, ev.CancelTimer):
                del self.due[instruction.timer]
        return instructions

    def fire(self, timer: Timer) -> list[ev.Instruction]:
        self.now = max(self.now, self.due.pop(timer))
        return self.send(ev.TimerFired(timer))

    def to(self, state: State, child: int = 1) -> DrivenMachine:
        """Bring child `child` to STARTING, LOADING or READY, from STOPPED or after a Spawn instruction."""
        if self.state is State.STOPPED:
            self.send(ev.StartRequested())
        self.send(ev.Spawned(child, 1000 + child))
        if state is not State.STARTING:
            self.send(ev.HelloReceived(child))
        if state is State.READY:
            self.send(ev.LoadSent(child))
            self.send(ev.LoadedReceived(child))
        assert self.state is state
        return self

    @property
    def state(self) -> State:
        return self.machine.state


def of(kind: type, instructions: list[ev.Instruction]) -> list[ev.Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def signals(instructions: list[ev.Instruction]) -> list[ProcessSignal]:
    return [instruction.signal for instruction in instructions if isinstance(instruction, ev.SendSignal)]
