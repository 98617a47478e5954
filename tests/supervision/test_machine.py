"""The supervision machine from start to failure: what each event leads to."""

from __future__ import annotations

import pytest

from lucevisor.protocol.process import EXIT_CONFIGURATION
from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.policy import RestartPolicy, SupervisionLimits
from lucevisor.supervision.states import State
from tests.supervision.driven_machine import LIMITS, DrivenMachine, of, signals


def test_while_nothing_is_sent_to_load_the_pulse_alone_is_watched():
    """What to load may depend on groups that take minutes to come up."""
    driven = DrivenMachine().to(State.LOADING)
    for _ in range(1000):
        driven.now += 1.0
        driven.send(ev.HeartbeatReceived(1, "idle"))
        assert set(driven.due) == {Timer.PULSE}
    driven.send(ev.LoadSent(1))
    assert driven.due[Timer.LOAD] == driven.now + LIMITS.load_stall_s


def test_a_heartbeat_between_the_two_looks_saves_the_daemon():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.HeartbeatReceived(1, "idle"))
    driven.fire(Timer.PULSE)
    driven.send(ev.HeartbeatReceived(1, "idle"))
    assert driven.due[Timer.PULSE] == driven.now + LIMITS.heartbeat_s
    assert driven.fire(Timer.PULSE) == [ev.StartTimer(Timer.PULSE, LIMITS.recheck_s)]
    assert driven.state is State.READY


def test_during_a_load_an_idle_heartbeat_does_not_shorten_the_limit():
    driven = DrivenMachine().to(State.LOADING)
    driven.send(ev.HeartbeatReceived(1, "idle"))
    assert driven.due[Timer.PULSE] == driven.now + LIMITS.load_stall_s
    driven.send(ev.LoadSent(1))
    driven.send(ev.LoadedReceived(1))
    assert driven.due[Timer.PULSE] == driven.now + LIMITS.busy_heartbeat_s


def test_a_crash_is_explained_by_the_exit_that_follows_the_closed_link():
    driven = DrivenMachine().to(State.READY)
    said = driven.send(ev.LinkLost(1, "end of file"))
    assert of(ev.AnnounceLost, said) == [ev.AnnounceLost(1, "end of file")]
    driven.send(ev.Exited(1, code=1, hint="RuntimeError: out of memory"))
    assert driven.state is State.BACKOFF
    assert driven.machine.reason == "process 1001 exited with code 1: RuntimeError: out of memory"


def test_a_daemon_that_closes_its_link_and_lives_on_is_killed():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.LinkLost(1, "end of file"))
    assert signals(driven.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    driven.send(ev.Exited(1, signal=9))
    assert driven.machine.reason == "end of file"
    assert driven.state is State.BACKOFF


def test_slow_failures_outside_the_window_go_on_restarting_but_starts_that_never_succeed_do_not():
    driven = DrivenMachine().to(State.READY)
    for child in range(1, 8):
        driven.now += 61.0
        driven.send(ev.Exited(child, code=1))
        driven.fire(Timer.BACKOFF)
        driven.to(State.READY, child + 1)
    driven.send(ev.Exited(8, code=1))
    for child in (9, 10):
        driven.fire(Timer.BACKOFF)
        driven.to(State.STARTING, child)
        driven.now += 61.0
        driven.send(ev.Exited(child, code=1))
    assert driven.state is State.BACKOFF
    driven.fire(Timer.BACKOFF)
    driven.to(State.STARTING, 11)
    driven.now += 61.0
    driven.send(ev.Exited(11, code=1))
    assert driven.state is State.FAILED


@pytest.mark.parametrize(
    "event",
    [ev.Exited(1, code=EXIT_CONFIGURATION, hint="no torch"), ev.SpawnFailed(1, "no such file", configuration=True)],
)
def test_a_configuration_error_fails_at_once_and_is_tried_again_after_a_long_pause(event):
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    driven.send(event)
    assert driven.state is State.FAILED
    assert driven.machine.retry_in_s(driven.now) == LIMITS.failed_first_s
    assert of(ev.Spawn, driven.fire(Timer.BACKOFF)) == [ev.Spawn(2)]


def fail(driven: DrivenMachine) -> float:
    """End the present start of a failed group; return the pause that follows."""
    driven.send(ev.Spawned(driven.machine.child, 5000))
    driven.send(ev.Exited(driven.machine.child, code=1))
    assert driven.state is State.FAILED
    return driven.due[Timer.BACKOFF] - driven.now


def test_a_failed_group_tries_again_after_pauses_that_grow_to_an_hour_until_it_is_stable():
    driven = DrivenMachine().to(State.READY)
    for child in (1, 2, 3):
        driven.send(ev.Exited(child, signal=11))
        if driven.state is State.BACKOFF:
            driven.fire(Timer.BACKOFF)
            driven.to(State.READY, child + 1)
    assert driven.state is State.FAILED
    pauses = [driven.due[Timer.BACKOFF] - driven.now]
    for _ in range(7):
        driven.fire(Timer.BACKOFF)
        pauses.append(fail(driven))
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert of(ev.Spawn, driven.send(ev.RestartRequested(4.0)))  # an operator's restart does not wait
    driven.to(State.READY, driven.machine.child)
    driven.now += LIMITS.stable_s
    driven.send(ev.Exited(driven.machine.child, signal=11))
    assert driven.state is State.BACKOFF


def test_a_group_that_was_never_ready_is_given_up_sooner():
    limits = SupervisionLimits()
    driven = DrivenMachine(limits)
    driven.send(ev.StartRequested())
    while driven.state is not State.FAILED:
        driven.send(ev.Spawned(driven.machine.child, 2000))
        driven.send(ev.Exited(driven.machine.child, code=1))
        if driven.state is State.BACKOFF:
            driven.fire(Timer.BACKOFF)
    assert driven.machine.restarts == limits.n_first_starts
    assert driven.machine.retry_in_s(driven.now) == 60.0


def test_no_restarts_allowed_means_that_a_failed_group_stays_failed():
    driven = DrivenMachine(SupervisionLimits(n_restarts=0)).to(State.READY)
    driven.send(ev.Exited(1, signal=11))
    assert driven.state is State.FAILED
    assert Timer.BACKOFF not in driven.due


def test_a_lack_of_the_supervisor_is_a_pause_and_never_counts():
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    for child in range(1, 50):
        driven.send(ev.SpawnFailed(child, "too many open files", configuration=False))
        assert (driven.state, driven.machine.short_of_resources) == (State.BACKOFF, True)
        driven.fire(Timer.BACKOFF)
    assert (driven.machine.restarts, driven.machine.short_of_resources) == (0, False)
    driven.to(State.READY, 50)
    driven.send(ev.Exited(50, code=1))
    assert (driven.state, driven.machine.short_of_resources) == (State.BACKOFF, False)
    driven.fire(Timer.BACKOFF)
    assert driven.machine.restarts == 1


def test_messages_out_of_turn_end_the_daemon():
    driven = DrivenMachine().to(State.LOADING)
    assert signals(driven.send(ev.LoadedReceived(1))) == [ProcessSignal.TERMINATE]  # nothing was asked to be loaded
    assert driven.state is State.STOPPING


# ---- stops


def test_a_stop_before_the_spawn_waits_for_the_process():
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    assert not signals(driven.send(ev.StopRequested(4.0)))
    assert signals(driven.send(ev.Spawned(1, 1001))) == [ProcessSignal.TERMINATE]
    driven.send(ev.Exited(1, signal=15))
    assert driven.state is State.STOPPED


def test_later_stops_and_hangs_do_not_put_off_the_kill():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.StopRequested(4.0))
    assert driven.send(ev.StopRequested(60.0)) == []
    assert signals(driven.fire(Timer.ESCALATION)) == [ProcessSignal.TERMINATE]
    assert driven.due[Timer.ESCALATION] == driven.now + 2.0
    driven.send(ev.StopRequested(1.0))
    assert driven.due[Timer.ESCALATION] == driven.now + 1.0
    assert signals(driven.send(ev.StopRequested(0.0))) == [ProcessSignal.KILL]
    assert driven.send(ev.StopRequested(0.0)) == []
    hung = DrivenMachine().to(State.READY)
    hung.send(ev.StopRequested(0.5, drain_s=0.5))
    assert signals(hung.send(ev.Overdue(1, "step 17", 31.5))) == [ProcessSignal.STACKS]
    assert hung.due[Timer.ESCALATION] == hung.now + 0.5


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


# ---- pauses and restarts


def test_backoff_doubles_to_its_most_and_a_stable_period_resets_it():
    limits = SupervisionLimits(n_restarts=1000, window_s=1.0, served_s=5.0, stable_s=60.0)
    policy = RestartPolicy(limits, lambda: 1.0)
    delays = []
    now = 0.0
    for _ in range(12):
        policy.became_ready(now)
        delays.append(policy.delay_s(now))
        now += 100.0
        policy.restarted(now)
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0]
    policy.became_ready(now)
    assert policy.delay_s(now + 4.9) == 30.0
    policy.became_ready(now + 10.0)
    assert policy.delay_s(now + 69.9) == 30.0
    policy.became_ready(now + 200.0)
    assert policy.delay_s(now + 260.0) == 0.0


def test_what_has_served_is_replaced_at_once_four_times_in_a_row():
    policy, now, delays = RestartPolicy(SupervisionLimits(n_restarts=1000), lambda: 1.0), 0.0, []
    for ready_s in (60.0, 5.0, 5.0, 5.0, 5.0, 60.0, 4.9):
        policy.became_ready(now)
        now += ready_s
        delays.append(policy.delay_s(now))
    assert delays == [0.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.5]
