"""The supervision machine, told one story at a time: what each event leads to."""

from __future__ import annotations

import pytest

from lucevisor.protocol.exit_codes import EXIT_CONFIGURATION
from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.machine import InvalidGroupTransition, Machine
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import TRANSITIONS, State

LIMITS = SupervisionLimits(n_restarts=2, window_s=60.0)


class Told:
    """A machine with a clock of its own: `tell(event)` returns the instructions, `fire(timer)` goes to the timer's
    due time first.
    """

    def __init__(self, limits: SupervisionLimits = LIMITS) -> None:
        self.machine = Machine("left", limits, lambda: 0.5)
        self.now = 100.0
        self.due: dict[Timer, float] = {}

    def tell(self, event: ev.Event) -> list[ev.Instruction]:
        instructions = self.machine.handle(event, self.now)
        for instruction in instructions:
            if isinstance(instruction, ev.StartTimer):
                self.due[instruction.timer] = self.now + instruction.after_s
            elif isinstance(instruction, ev.CancelTimer):
                del self.due[instruction.timer]
        return instructions

    def fire(self, timer: Timer) -> list[ev.Instruction]:
        self.now = max(self.now, self.due.pop(timer))
        return self.tell(ev.TimerFired(timer))

    def to(self, state: State, child: int = 1) -> Told:
        """Bring child `child` to STARTING, LOADING or READY from a state with a Spawn already given, or from
        STOPPED.
        """
        if self.state is State.STOPPED:
            self.tell(ev.StartAsked())
        self.tell(ev.Spawned(child, 1000 + child))
        if state is not State.STARTING:
            self.tell(ev.HelloReceived(child))
        if state is State.READY:
            self.tell(ev.LoadSent(child))
            self.tell(ev.LoadedReceived(child))
        assert self.state is state
        return self

    @property
    def state(self) -> State:
        return self.machine.state


def of(kind: type, instructions: list[ev.Instruction]) -> list[ev.Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def signals(instructions: list[ev.Instruction]) -> list[ProcessSignal]:
    return [instruction.signal for instruction in instructions if isinstance(instruction, ev.SendSignal)]


def test_a_start_goes_through_hello_and_loaded_to_ready():
    told = Told()
    assert of(ev.Spawn, told.tell(ev.StartAsked())) == [ev.Spawn(1)]
    told.tell(ev.Spawned(1, 4711))
    assert told.due == {Timer.HELLO: 160.0}
    assert ev.SendLoad(1) in told.tell(ev.HelloReceived(1))
    assert told.state is State.LOADING
    told.tell(ev.LoadSent(1))
    said = told.tell(ev.LoadedReceived(1))
    assert said[-1] == ev.AnnounceReady(1)
    assert ev.Publish(State.READY, "loaded") in said
    assert told.machine.pid == 4711
    assert told.machine.restarts == 0
    assert set(told.due) == {Timer.PULSE}


def test_progress_moves_the_stall_deadline_and_silence_ends_the_load():
    told = Told().to(State.LOADING)
    told.tell(ev.LoadSent(1))
    told.now += 100.0
    told.tell(ev.Progressed(1))
    assert told.due[Timer.LOAD] == told.now + LIMITS.load_stall_s
    assert told.fire(Timer.LOAD) == [
        ev.StartTimer(Timer.LOAD, LIMITS.second_look_s)
    ]  # the supervisor may be the late one
    assert signals(told.fire(Timer.LOAD)) == [ProcessSignal.STACKS]
    assert told.machine.reason == "no load progress in 120 s"


def test_while_nothing_is_sent_to_load_the_pulse_alone_is_watched():
    """What to load may depend on groups that take minutes to come up."""
    told = Told().to(State.LOADING)
    for _ in range(1000):
        told.now += 1.0
        told.tell(ev.Beat(1, "idle"))
        assert set(told.due) == {Timer.PULSE}
    told.tell(ev.LoadSent(1))
    assert told.due[Timer.LOAD] == told.now + LIMITS.load_stall_s


def test_a_timer_that_fires_after_a_pause_of_the_supervisor_goes_on_for_the_rest():
    """The clock stood still, the timers of the event loop did not."""
    told = Told().to(State.READY)
    told.now += 2.0
    del told.due[Timer.PULSE]
    assert told.tell(ev.TimerFired(Timer.PULSE)) == [ev.StartTimer(Timer.PULSE, LIMITS.busy_heartbeat_s - 2.0)]
    assert told.due[Timer.PULSE] == 100.0 + LIMITS.busy_heartbeat_s
    told.fire(Timer.PULSE)
    assert signals(told.fire(Timer.PULSE)) == [ProcessSignal.STACKS]


def test_a_pause_after_sigkill_is_no_quarantine():
    told = Told().to(State.READY)
    told.tell(ev.StopAsked(0.0))
    del told.due[Timer.ESCALATION]
    assert told.tell(ev.TimerFired(Timer.ESCALATION)) == [ev.StartTimer(Timer.ESCALATION, LIMITS.reap_s)]
    told.tell(ev.Exited(1, signal=9))
    assert told.state is State.STOPPED


def test_the_cause_of_the_last_failure_is_told_until_ready_again():
    told = Told().to(State.READY)
    told.tell(ev.Exited(1, signal=11))
    cause = "process 1001 was killed by signal 11 (SIGSEGV)"
    assert told.machine.reason == cause
    said = told.fire(Timer.BACKOFF)
    assert of(ev.Publish, said) == [ev.Publish(State.STARTING, f"restarting after: {cause}")]
    told.to(State.LOADING, 2)
    assert told.machine.reason == f"restarting after: {cause}"
    told.tell(ev.Exited(2, code=1, hint="no memory"))
    told.fire(Timer.BACKOFF)
    assert told.machine.reason == "restarting after: process 1002 exited with code 1: no memory"
    told.to(State.READY, 3)
    assert told.machine.reason == "loaded"
    assert told.machine.failure == ""


@pytest.mark.parametrize("asked", [ev.RestartAsked(4.0), ev.StopAsked(4.0)])
def test_what_an_operator_asks_ends_the_story_of_a_failure(asked):
    told = Told().to(State.READY)
    told.tell(ev.Exited(1, signal=11))
    told.tell(asked)
    told.tell(ev.StartAsked())
    assert told.state is State.STARTING
    assert told.machine.reason in ("restart asked", "start asked")


def test_a_heartbeat_between_the_two_looks_saves_the_daemon():
    told = Told().to(State.READY)
    told.tell(ev.Beat(1, "idle"))
    told.fire(Timer.PULSE)
    told.tell(ev.Beat(1, "idle"))
    assert told.due[Timer.PULSE] == told.now + LIMITS.heartbeat_s
    assert told.fire(Timer.PULSE) == [ev.StartTimer(Timer.PULSE, LIMITS.second_look_s)]
    assert told.state is State.READY


@pytest.mark.parametrize(("phase", "limit_s"), [("idle", 10.0), ("step", 30.0), ("load", 30.0), ("check", 120.0)])
def test_the_reported_phase_says_how_long_silence_is_no_fault(phase, limit_s):
    told = Told().to(State.READY)
    told.tell(ev.Beat(1, phase))
    assert told.due[Timer.PULSE] == told.now + limit_s


def test_during_a_load_an_idle_heartbeat_does_not_shorten_the_limit():
    told = Told().to(State.LOADING)
    told.tell(ev.Beat(1, "idle"))
    assert told.due[Timer.PULSE] == told.now + LIMITS.load_stall_s
    told.tell(ev.LoadSent(1))
    told.tell(ev.LoadedReceived(1))
    assert told.due[Timer.PULSE] == told.now + LIMITS.busy_heartbeat_s


def test_a_missed_pulse_dumps_stacks_then_kills_then_restarts():
    told = Told().to(State.READY)
    told.fire(Timer.PULSE)
    said = told.fire(Timer.PULSE)
    assert signals(said) == [ProcessSignal.STACKS]
    assert [lost.child for lost in of(ev.AnnounceLost, said)] == [1]
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    said = told.tell(ev.Exited(1, signal=9))
    assert told.state is State.BACKOFF
    assert "no heartbeat" in told.machine.reason  # why we killed it, not that we did
    assert of(ev.Spawn, told.fire(Timer.BACKOFF)) == [ev.Spawn(2)]
    assert told.machine.restarts == 1


def test_an_overdue_step_is_a_hang():
    told = Told().to(State.READY)
    assert signals(told.tell(ev.Overdue(1, "step 17", 31.5))) == [ProcessSignal.STACKS]
    assert told.machine.reason == "step 17 gave no result in 31.5 s"


def test_a_crash_is_explained_by_the_exit_that_follows_the_closed_link():
    told = Told().to(State.READY)
    said = told.tell(ev.LinkLost(1, "end of file"))
    assert of(ev.AnnounceLost, said) == [ev.AnnounceLost(1, "end of file")]
    told.tell(ev.Exited(1, code=1, hint="RuntimeError: out of memory"))
    assert told.state is State.BACKOFF
    assert told.machine.reason == "process 1001 exited with code 1: RuntimeError: out of memory"


def test_a_daemon_that_closes_its_link_and_lives_on_is_killed():
    told = Told().to(State.READY)
    told.tell(ev.LinkLost(1, "end of file"))
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    told.tell(ev.Exited(1, signal=9))
    assert told.machine.reason == "end of file"
    assert told.state is State.BACKOFF


def test_the_message_of_a_failed_daemon_outlives_its_exit():
    told = Told().to(State.LOADING)
    told.tell(ev.Failure(1, "load failed at cpu:0: tensor blk.0.attn_q.weight is missing", exiting=True))
    told.tell(ev.LinkLost(1, "end of file"))
    told.tell(ev.Exited(1, code=1, hint="Traceback"))
    assert told.machine.reason == "load failed at cpu:0: tensor blk.0.attn_q.weight is missing"


def test_the_restart_limit_ends_in_failed_and_restart_clears_it():
    told = Told().to(State.READY)
    for child in (1, 2):
        told.tell(ev.Exited(child, signal=11))
        assert told.state is State.BACKOFF
        told.fire(Timer.BACKOFF)
        told.to(State.READY, child + 1)
    told.tell(ev.Exited(3, signal=11))
    assert told.state is State.FAILED
    assert told.machine.reason == "process 1003 was killed by signal 11 (SIGSEGV); restart limit 2/60s reached"
    assert of(ev.Refuse, told.tell(ev.StartAsked()))
    assert of(ev.Spawn, told.tell(ev.RestartAsked(4.0))) == [ev.Spawn(4)]
    told.to(State.READY, 4)
    told.tell(ev.Exited(4, signal=11))
    assert told.state is State.BACKOFF


def test_slow_failures_outside_the_window_go_on_restarting_but_starts_that_never_succeed_do_not():
    told = Told().to(State.READY)
    for child in range(1, 8):
        told.now += 61.0
        told.tell(ev.Exited(child, code=1))
        told.fire(Timer.BACKOFF)
        told.to(State.READY, child + 1)
    told.tell(ev.Exited(8, code=1))
    for child in (9, 10):
        told.fire(Timer.BACKOFF)
        told.to(State.STARTING, child)
        told.now += 61.0
        told.tell(ev.Exited(child, code=1))
    assert told.state is State.BACKOFF
    told.fire(Timer.BACKOFF)
    told.to(State.STARTING, 11)
    told.now += 61.0
    told.tell(ev.Exited(11, code=1))
    assert told.state is State.FAILED


@pytest.mark.parametrize(
    "event",
    [ev.Exited(1, code=EXIT_CONFIGURATION, hint="no torch"), ev.SpawnFailed(1, "no such file", configuration=True)],
)
def test_a_configuration_error_is_not_retried(event):
    told = Told()
    told.tell(ev.StartAsked())
    told.tell(event)
    assert told.state is State.FAILED
    assert Timer.BACKOFF not in told.due


def test_a_lack_of_the_supervisor_is_a_pause_and_never_counts():
    told = Told()
    told.tell(ev.StartAsked())
    for child in range(1, 50):
        told.tell(ev.SpawnFailed(child, "too many open files", configuration=False))
        assert (told.state, told.machine.lacking) == (State.BACKOFF, True)
        told.fire(Timer.BACKOFF)
    assert (told.machine.restarts, told.machine.lacking) == (0, False)
    told.to(State.READY, 50)
    told.tell(ev.Exited(50, code=1))
    assert (told.state, told.machine.lacking) == (State.BACKOFF, False)
    told.fire(Timer.BACKOFF)
    assert told.machine.restarts == 1


def test_a_refused_hello_is_terminated_and_not_retried():
    told = Told().to(State.STARTING)
    assert signals(told.tell(ev.Failure(1, "protocol 2, not 1", configuration=True))) == [ProcessSignal.TERMINATE]
    told.tell(ev.Exited(1, code=0))
    assert told.state is State.FAILED
    assert told.machine.reason == "protocol 2, not 1"


def test_the_stop_ladder_message_term_kill_quarantine():
    told = Told().to(State.READY)
    began = told.now
    said = told.tell(ev.StopAsked(4.0))
    assert of(ev.SendShutdown, said) == [ev.SendShutdown(1, "stop asked")]
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.TERMINATE]
    assert told.now - began == 2.0
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    assert told.now - began == 4.0
    told.fire(Timer.ESCALATION)
    assert told.state is State.FAILED
    assert told.machine.quarantined
    assert "quarantine" in told.machine.reason
    assert of(ev.Refuse, told.tell(ev.RestartAsked(4.0)))
    assert not of(ev.Spawn, told.tell(ev.StartAsked()))
    told.tell(ev.Exited(1, signal=9))
    assert told.state is State.STOPPED
    assert not told.machine.quarantined


def test_a_failed_daemon_that_does_not_die_is_quarantined_until_its_exit_and_a_restart():
    told = Told().to(State.READY)
    told.tell(ev.LinkLost(1, "end of file"))
    told.fire(Timer.ESCALATION)
    told.fire(Timer.ESCALATION)
    assert told.machine.quarantined
    told.tell(ev.Exited(1, signal=9))
    assert told.state is State.FAILED
    assert of(ev.Spawn, told.tell(ev.RestartAsked(4.0))) == [ev.Spawn(2)]


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING])
def test_a_stop_during_the_start_terminates_at_once(state):
    told = Told().to(state)
    assert signals(told.tell(ev.StopAsked(4.0, drain_s=2.0))) == [ProcessSignal.TERMINATE]
    told.tell(ev.Exited(1, code=0))
    assert told.state is State.STOPPED
    assert told.due == {}


def test_a_stop_before_the_spawn_is_told_waits_for_the_process():
    told = Told()
    told.tell(ev.StartAsked())
    assert not signals(told.tell(ev.StopAsked(4.0)))
    assert signals(told.tell(ev.Spawned(1, 1001))) == [ProcessSignal.TERMINATE]
    told.tell(ev.Exited(1, signal=15))
    assert told.state is State.STOPPED


def test_later_stops_only_shorten():
    told = Told().to(State.READY)
    told.tell(ev.StopAsked(4.0))
    assert told.tell(ev.StopAsked(60.0)) == []
    told.tell(ev.StopAsked(1.0))
    assert told.due[Timer.ESCALATION] == told.now + 0.5
    assert signals(told.tell(ev.StopAsked(0.0))) == [ProcessSignal.KILL]
    assert told.tell(ev.StopAsked(0.0)) == []


def test_a_later_longer_stop_does_not_move_the_kill():
    told = Told().to(State.READY)
    began = told.now
    told.tell(ev.StopAsked(4.0))
    told.tell(ev.StopAsked(60.0))
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.TERMINATE]
    told.tell(ev.StopAsked(60.0))
    assert signals(told.fire(Timer.ESCALATION)) == [ProcessSignal.KILL]
    assert told.now - began == 4.0


def test_a_stop_takes_the_place_of_a_restart_and_not_the_other_way_round():
    told = Told().to(State.READY)
    told.tell(ev.RestartAsked(4.0))
    told.tell(ev.StopAsked(4.0))
    assert of(ev.Refuse, told.tell(ev.RestartAsked(4.0)))
    assert of(ev.Refuse, told.tell(ev.StartAsked()))
    told.tell(ev.Exited(1, code=0))
    assert told.state is State.STOPPED


def test_a_restart_drains_first_and_starts_when_the_old_process_is_gone():
    told = Told().to(State.READY)
    assert of(ev.AnnounceDraining, told.tell(ev.RestartAsked(10.0, drain_s=5.0)))
    assert told.state is State.DRAINING
    said = told.tell(ev.Drained(1))
    assert of(ev.AnnounceLost, said)
    assert of(ev.SendShutdown, said)
    assert not of(ev.Spawn, said)
    assert of(ev.Spawn, told.tell(ev.Exited(1, code=0))) == [ev.Spawn(2)]
    assert told.machine.restarts == 1


def test_a_drain_ends_at_its_deadline():
    told = Told().to(State.READY)
    told.tell(ev.StopAsked(10.0, drain_s=5.0))
    assert of(ev.SendShutdown, told.fire(Timer.DRAIN))
    assert told.state is State.STOPPING


@pytest.mark.parametrize("timer", [Timer.BACKOFF])
def test_a_stop_in_backoff_cancels_the_next_start(timer):
    told = Told().to(State.READY)
    told.tell(ev.Exited(1, signal=9))
    assert ev.CancelTimer(timer) in told.tell(ev.StopAsked(4.0))
    assert told.state is State.STOPPED
    assert told.machine.handle(ev.TimerFired(timer), told.now) == []


def test_news_of_a_dead_child_is_ignored():
    told = Told().to(State.READY)
    told.tell(ev.Exited(1, signal=9))
    told.fire(Timer.BACKOFF)
    told.to(State.LOADING, 2)
    for event in (ev.LinkLost(1, "end of file"), ev.Exited(1, signal=9), ev.LoadedReceived(1), ev.Failure(1, "late")):
        assert told.tell(event) == []
    assert told.state is State.LOADING


def test_messages_out_of_turn_end_the_daemon():
    told = Told().to(State.LOADING)
    assert signals(told.tell(ev.LoadedReceived(1))) == [ProcessSignal.TERMINATE]  # nothing was asked to be loaded
    assert told.state is State.STOPPING


def test_an_invalid_transition_lists_the_last_events():
    told = Told().to(State.READY)
    with pytest.raises(InvalidGroupTransition) as caught:
        told.machine._transition(State.LOADING, "a fault of the program")
    assert "no move from ready to loading" in str(caught.value)
    assert "HelloReceived(child=1)" in str(caught.value)


def test_every_state_can_be_reached_and_left():
    assert set(TRANSITIONS) == set(State)
    reached = {target for targets in TRANSITIONS.values() for target in targets}
    assert reached == set(State)
    assert all(TRANSITIONS.values())
