"""The supervision machine while it stops or restarts a child: what each event leads to."""

from __future__ import annotations

import pytest

from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.states import State
from tests.supervision.driven_machine import DrivenMachine, of, signals


def test_a_stop_before_the_spawn_waits_for_the_process():
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    assert not signals(driven.send(ev.StopRequested(4.0)))
    assert signals(driven.send(ev.Spawned(1, 1001))) == [ProcessSignal.TERMINATE]
    driven.send(ev.Exited(1, signal=15))
    assert driven.state is State.STOPPED


def test_a_stop_takes_the_place_of_a_restart_and_not_the_other_way_round():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.RestartRequested(4.0))
    driven.send(ev.StopRequested(4.0))
    assert of(ev.Refuse, driven.send(ev.RestartRequested(4.0)))
    assert of(ev.Refuse, driven.send(ev.StartRequested()))
    driven.send(ev.Exited(1, code=0))
    assert driven.state is State.STOPPED


def test_a_drain_ends_at_its_deadline():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.StopRequested(10.0, drain_s=5.0))
    assert of(ev.SendShutdown, driven.fire(Timer.DRAIN))
    assert driven.state is State.STOPPING


@pytest.mark.parametrize("timer", [Timer.BACKOFF])
def test_a_stop_in_backoff_cancels_the_next_start(timer):
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.Exited(1, signal=9))
    assert ev.CancelTimer(timer) in driven.send(ev.StopRequested(4.0))
    assert driven.state is State.STOPPED
    assert driven.machine.handle(ev.TimerFired(timer), driven.now) == []
