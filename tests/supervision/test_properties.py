"""The supervision machine against a simulated world that does anything at any time.

The world knows what it holds (children, timers); the machine must never ask it for something impossible.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lucevisor.supervision import events as ev
from lucevisor.supervision.events import ProcessSignal, Timer
from lucevisor.supervision.machine import Machine
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import TRANSITIONS, WITH_CHILD, State

LIMITS = SupervisionLimits(
    n_restarts=3, window_s=20.0, stable_s=15.0, hello_s=6.0, load_stall_s=8.0, heartbeat_s=3.0, reap_s=2.0
)
seconds = st.floats(0.0, 30.0)
deadlines = st.sampled_from([0.0, 0.5, 4.0, 30.0])
phases = st.sampled_from(["start", "load", "idle", "step", "check"])


class World(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.now = 1000.0
        self.machine = Machine("left", LIMITS, random.Random(seed).random)
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
        assert self.machine.child == self.child
        assert (self.child is not None) == (self.state in WITH_CHILD or self.machine.quarantined)
        assert self.announced == (self.state in (State.READY, State.DRAINING))

    @invariant()
    def never_past_the_restart_limit(self):
        if not hasattr(self, "machine"):
            return
        for at in self.restarts:
            assert sum(at <= other < at + LIMITS.window_s for other in self.restarts) <= LIMITS.n_restarts

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
        self.pass_time(4.0 + LIMITS.reap_s + 0.001)
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
