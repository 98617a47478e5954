"""The supervision machine while it stops or restarts a child: what each event leads to."""

from __future__ import annotations

import pytest

from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.states import State
from tests.supervision.driven_machine import DrivenMachine, of, signals


def test_a_stop_escalates_from_message_to_term_to_kill_to_quarantine():
    driven = DrivenMachine().to(State.READY)
    began = driven.now
    said = driven.send(ev.StopRequested(4.0))
    assert of(ev.SendShutdown, said) == [ev.SendShutdown(1, "stop requested")]
    assert signals(driven.fire(Timer.ESCALATION)) == [ProcessSignal.TERMINATE]
    assert driven.now - began == 2.0
    assert signals(driven.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    assert driven.now - began == 4.0
    driven.fire(Timer.ESCALATION)
    assert driven.state is State.FAILED
    assert driven.machine.quarantined
    assert "quarantine" in driven.machine.reason
    assert of(ev.Refuse, driven.send(ev.RestartRequested(4.0)))
    assert not of(ev.Spawn, driven.send(ev.StartRequested()))
    driven.send(ev.Exited(1, signal=9))
    assert driven.state is State.STOPPED
    assert not driven.machine.quarantined


def test_a_failed_daemon_that_does_not_die_is_quarantined_until_its_exit_and_a_restart():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.LinkLost(1, "end of file"))
    driven.fire(Timer.ESCALATION)
    driven.fire(Timer.ESCALATION)
    assert driven.machine.quarantined
    driven.send(ev.Exited(1, signal=9))
    assert driven.state is State.FAILED
    assert of(ev.Spawn, driven.send(ev.RestartRequested(4.0))) == [ev.Spawn(2)]


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING])
def test_a_stop_during_the_start_terminates_at_once(state):
    driven = DrivenMachine().to(state)
    assert signals(driven.send(ev.StopRequested(4.0, drain_s=2.0))) == [ProcessSignal.TERMINATE]
    driven.send(ev.Exited(1, code=0))
    assert driven.state is State.STOPPED
    assert driven.due == {}


def test_a_stop_before_the_spawn_waits_for_the_process():
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    assert not signals(driven.send(ev.StopRequested(4.0)))
    assert signals(driven.send(ev.Spawned(1, 1001))) == [ProcessSignal.TERMINATE]
    driven.send(ev.Exited(1, signal=15))
    assert driven.state is State.STOPPED


def test_later_stops_only_shorten():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.StopRequested(4.0))
    assert driven.send(ev.StopRequested(60.0)) == []
    driven.send(ev.StopRequested(1.0))
    assert driven.due[Timer.ESCALATION] == driven.now + 0.5
    assert signals(driven.send(ev.StopRequested(0.0))) == [ProcessSignal.KILL]
    assert driven.send(ev.StopRequested(0.0)) == []


def test_a_stop_takes_the_place_of_a_restart_and_not_the_other_way_round():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.RestartRequested(4.0))
    driven.send(ev.StopRequested(4.0))
    assert of(ev.Refuse, driven.send(ev.RestartRequested(4.0)))
    assert of(ev.Refuse, driven.send(ev.StartRequested()))
    driven.send(ev.Exited(1, code=0))
    assert driven.state is State.STOPPED


def test_a_restart_drains_first_and_starts_when_the_old_process_is_gone():
    driven = DrivenMachine().to(State.READY)
    assert of(ev.AnnounceDraining, driven.send(ev.RestartRequested(10.0, drain_s=5.0)))
    assert driven.state is State.DRAINING
    said = driven.send(ev.Drained(1))
    assert of(ev.AnnounceLost, said)
    assert of(ev.SendShutdown, said)
    assert not of(ev.Spawn, said)
    assert of(ev.Spawn, driven.send(ev.Exited(1, code=0))) == [ev.Spawn(2)]
    assert driven.machine.restarts == 1


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
