"""The supervision machine from start to failure: what each event leads to."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lucevisor.protocol.process import EXIT_CONFIGURATION
from lucevisor.supervision import events as ev
from lucevisor.supervision.events import TRANSITIONS, ProcessSignal, State, Timer
from lucevisor.supervision.machine import Machine, RestartPolicy, SupervisionLimits

LIMITS = SupervisionLimits(n_restarts=2, window_s=60.0)
WITH_CHILD = {State.STARTING, State.LOADING, State.READY, State.DRAINING, State.STOPPING}


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


def test_while_nothing_is_sent_to_load_the_heartbeat_alone_is_watched():
    """What to load may depend on groups that take minutes to come up."""
    driven = DrivenMachine().to(State.LOADING)
    for _ in range(1000):
        driven.now += 1.0
        driven.send(ev.HeartbeatReceived(1, "idle"))
        assert set(driven.due) == {Timer.HEARTBEAT}
    driven.send(ev.LoadSent(1))
    assert driven.due[Timer.LOAD] == driven.now + LIMITS.load_stall_s


def test_a_heartbeat_between_the_two_looks_saves_the_daemon():
    driven = DrivenMachine().to(State.READY)
    driven.send(ev.HeartbeatReceived(1, "idle"))
    driven.fire(Timer.HEARTBEAT)
    driven.send(ev.HeartbeatReceived(1, "idle"))
    assert driven.due[Timer.HEARTBEAT] == driven.now + LIMITS.heartbeat_s
    assert driven.fire(Timer.HEARTBEAT) == [ev.StartTimer(Timer.HEARTBEAT, LIMITS.recheck_s)]
    assert driven.state is State.READY


def test_a_crash_is_explained_by_the_exit_that_follows_the_closed_link():
    driven = DrivenMachine().to(State.READY)
    said = driven.send(ev.LinkLost(1, "end of file"))
    assert of(ev.AnnounceLost, said) == [ev.AnnounceLost(1, "end of file")]
    driven.send(ev.Exited(1, code=1, hint="RuntimeError: out of memory"))
    assert driven.state is State.BACKOFF
    assert driven.machine.reason == "process 1001 exited with code 1: RuntimeError: out of memory"


def test_words_that_are_read_behind_the_end_of_a_connection_explain_the_exit():
    driven = DrivenMachine().to(State.LOADING)
    driven.send(ev.LinkLost(1, "heartbeat: end of file"))
    driven.send(ev.Failure(1, "load failed: tensor is missing", configuration=True, exiting=True))
    driven.send(ev.Exited(1, code=1))
    assert (driven.state, driven.machine.reason) == (State.FAILED, "load failed: tensor is missing")


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
    driven.send(ev.Spawned(driven.machine.daemon, 5000))
    driven.send(ev.Exited(driven.machine.daemon, code=1))
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
    driven.to(State.READY, driven.machine.daemon)
    driven.now += LIMITS.stable_s
    driven.send(ev.Exited(driven.machine.daemon, signal=11))
    assert driven.state is State.BACKOFF


def test_a_group_that_was_never_ready_is_given_up_sooner():
    limits = SupervisionLimits()
    driven = DrivenMachine(limits)
    driven.send(ev.StartRequested())
    while driven.state is not State.FAILED:
        driven.send(ev.Spawned(driven.machine.daemon, 2000))
        driven.send(ev.Exited(driven.machine.daemon, code=1))
        if driven.state is State.BACKOFF:
            driven.fire(Timer.BACKOFF)
    assert driven.machine.restarts == limits.n_first_starts
    assert driven.machine.retry_in_s(driven.now) == 60.0


def test_a_lack_of_the_supervisor_is_a_pause_and_never_counts():
    driven = DrivenMachine()
    driven.send(ev.StartRequested())
    for child in range(1, 50):
        driven.send(ev.SpawnFailed(child, "too many open files", configuration=False))
        assert (driven.state, driven.machine.shortage) == (State.BACKOFF, True)
        driven.fire(Timer.BACKOFF)
    assert (driven.machine.restarts, driven.machine.shortage) == (0, False)
    driven.to(State.READY, 50)
    driven.send(ev.Exited(50, code=1))
    assert (driven.state, driven.machine.shortage) == (State.BACKOFF, False)
    driven.fire(Timer.BACKOFF)
    assert driven.machine.restarts == 1


# ---- stops


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


# ---- a simulated world that does anything at any time


LIMIT_CHOICES = SupervisionLimits(
    n_restarts=3, window_s=20.0, stable_s=15.0, hello_s=6.0, load_stall_s=8.0, heartbeat_s=3.0, reap_s=2.0
)

seconds = st.floats(0.0, 30.0)
deadlines = st.sampled_from([0.0, 0.5, 4.0, 30.0])
phases = st.sampled_from(["start", "load", "idle", "step", "check"])


class World(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.now = 1000.0
        self.machine = Machine("left", LIMIT_CHOICES, random.Random(seed).random)
        self.state = State.STOPPED
        self.child: int | None = None  # spawn instructed, exit not told
        self.spawned = False
        self.said: set[str] = set()
        self.announced = False
        self.killed = False
        self.due: dict[Timer, float] = {}
        self.restarts: list[float] = []
        self.highest = 0
        self.lacked = False  # the last spawn failed for want of descriptors or memory

    def tell(self, event):
        for instruction in self.machine.handle(event, self.now):
            self.obey(instruction, event)

    def obey(self, instruction, event):
        match instruction:
            case ev.Spawn(number):
                assert self.child is None, "two children"
                assert number > self.highest, "a number was used twice"
                self.child, self.highest = number, number
                self.spawned = self.announced = self.killed = False
                self.said = set()
                if event == ev.TimerFired(Timer.BACKOFF) and not self.lacked:
                    self.restarts.append(self.now)
                self.lacked = False
            case ev.SendLoad(number) | ev.SendShutdown(number) | ev.SendSignal(number):
                assert number == self.child, "an instruction for a dead child"
                assert self.spawned, "an instruction for a child that is not there yet"
                self.killed |= isinstance(instruction, ev.SendSignal) and instruction.signal is ProcessSignal.KILL
            case ev.StartTimer(timer, after_s):
                assert 0.0 <= after_s < 1e6
                self.due[timer] = self.now + after_s
            case ev.CancelTimer(timer):
                del self.due[timer]
            case ev.Publish(state, reason):
                assert reason
                assert state in TRANSITIONS[self.state] or state is self.state is State.FAILED
                self.state = state
            case ev.AnnounceReady(number):
                assert number == self.child
                assert {"hello", "load sent", "loaded"} <= self.said
                assert self.state is State.READY
                self.announced = True
            case ev.AnnounceDraining(number):
                assert number == self.child
                assert self.announced
            case ev.AnnounceLost(number):
                assert self.announced, "lost without having been ready, or twice"
                self.announced = False

    # ---- operators

    @rule()
    def start(self):
        if self.state is State.STOPPED:
            self.restarts = []
        self.tell(ev.StartRequested())

    @rule(deadline_s=deadlines, drain_s=deadlines)
    def stop(self, deadline_s, drain_s):
        self.tell(ev.StopRequested(deadline_s, drain_s))

    @rule(deadline_s=deadlines, drain_s=deadlines)
    def restart(self, deadline_s, drain_s):
        instructions = self.machine.handle(ev.RestartRequested(deadline_s, drain_s), self.now)
        if not any(isinstance(instruction, ev.Refuse) for instruction in instructions):
            self.restarts = []
        for instruction in instructions:
            self.obey(instruction, None)

    # ---- the process

    @precondition(lambda self: self.child is not None and not self.spawned)
    @rule(fails=st.booleans(), configuration=st.booleans())
    def spawn_ends(self, fails, configuration):
        child = self.child
        if fails:
            self.child = None
            self.lacked = not configuration
            self.tell(ev.SpawnFailed(child, "no memory", configuration))
        else:
            self.spawned = True
            self.tell(ev.Spawned(child, 5000 + child))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule(how=st.sampled_from([(0, None), (1, None), (78, None), (None, 9), (None, 11), (None, None)]))
    def exits(self, how):
        child, self.child = self.child, None
        self.tell(ev.Exited(child, *how))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule(what=st.sampled_from(["hello", "load sent", "loaded"]))
    def says(self, what):
        self.said.add(what)
        kinds = {"hello": ev.HelloReceived, "load sent": ev.LoadSent, "loaded": ev.LoadedReceived}
        self.tell(kinds[what](self.child))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule()
    def starts_well(self):
        for what in ("hello", "load sent", "loaded"):
            if self.child is not None:
                self.says(what)

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule(phase=phases)
    def beats(self, phase):
        self.tell(ev.HeartbeatReceived(self.child, phase))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule(configuration=st.booleans(), exiting=st.booleans())
    def fails(self, configuration, exiting):
        self.tell(ev.Failure(self.child, "failed", configuration, exiting))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule(event=st.sampled_from([ev.ProgressReceived, ev.Drained]))
    def small_news(self, event):
        self.tell(event(self.child))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule()
    def hangs_in_a_step(self):
        self.tell(ev.Overdue(self.child, "step 3", 40.0))

    @precondition(lambda self: self.child is not None and self.spawned)
    @rule()
    def closes_its_link(self):
        self.tell(ev.LinkLost(self.child, "end of file"))

    @precondition(lambda self: self.highest > 0)
    @rule(back=st.integers(0, 3))
    def stale_news(self, back):
        number = self.highest - back
        if number != self.child:
            before = self.machine.state
            for event in (
                ev.Exited(number, 1),
                ev.LinkLost(number, "late"),
                ev.HelloReceived(number),
                ev.Drained(number),
            ):
                assert self.machine.handle(event, self.now) == []
            assert self.machine.state is before

    # ---- time

    @rule(dt=seconds)
    def time_passes(self, dt):
        self.pass_time(dt)

    def pass_time(self, dt):
        end = self.now + dt
        while self.due and min(self.due.values()) <= end:
            timer = min(self.due, key=self.due.__getitem__)
            self.now = max(self.now, self.due.pop(timer))
            self.tell(ev.TimerFired(timer))
        self.now = end

    @rule()
    def supervisor_is_stopped_for_long(self):
        """The event loop's timers are all due, the machine's clock stood still: nothing happens but that they go
        on.
        """
        for timer, due in list(self.due.items()):
            if due > self.now + 0.1:
                before = self.machine.state
                self.tell(ev.TimerFired(timer))
                assert self.machine.state is before
                assert abs(self.due[timer] - due) < 1e-6

    @rule(timer=st.sampled_from(list(Timer)))
    def foreign_timer(self, timer):
        if timer not in self.due:
            assert self.machine.handle(ev.TimerFired(timer), self.now) == []

    # ---- what must always hold

    @invariant()
    def agrees_about_the_child(self):
        if not hasattr(self, "machine"):
            return
        assert self.machine.state is self.state
        assert self.machine.daemon == self.child
        assert (self.child is not None) == (self.state in WITH_CHILD or self.machine.quarantined)
        assert self.announced == (self.state in (State.READY, State.DRAINING))

    @invariant()
    def never_past_the_restart_limit(self):
        if not hasattr(self, "machine"):
            return
        for at in self.restarts:
            assert sum(at <= other < at + LIMIT_CHOICES.window_s for other in self.restarts) <= LIMIT_CHOICES.n_restarts

    @invariant()
    def never_waits_for_nothing(self):
        """In every state that is not an end, something will happen by itself: no group hangs for ever."""
        if not hasattr(self, "machine"):
            return
        waits_for_spawn = self.child is not None and not self.spawned
        if self.state in (State.STARTING, State.LOADING, State.STOPPING, State.BACKOFF, State.READY, State.DRAINING):
            assert self.due or waits_for_spawn

    def teardown(self):
        """Whatever happened: a stop ends in time, when kills work and when they do not."""
        if not hasattr(self, "machine"):
            return
        self.tell(ev.StopRequested(4.0, 1.0))
        if self.child is not None and not self.spawned:
            self.spawned = True
            self.tell(ev.Spawned(self.child, 1))
        self.pass_time(4.0 + LIMIT_CHOICES.reap_s + 0.001)
        if self.state is not State.STOPPED:
            assert self.killed, "a stop gave up without SIGKILL"
            assert self.machine.quarantined
            child, self.child = self.child, None
            self.tell(ev.Exited(child, None, 9))
        assert self.state is State.STOPPED
        assert self.due == {}


World.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestWorld = World.TestCase


# ---- docs/states.md
