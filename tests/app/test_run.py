"""Signals before the event loop has taken them over, and the switch of fault hooks that a production start refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lucevisor.app.run import EarlySignals, parse_fault_limits, refuse_fault_hooks
from lucevisor.app.status import LoadProgress
from lucevisor.config import load
from lucevisor.errors import ConfigError
from lucevisor.protocol.messages import Progress
from lucevisor.supervision.events import State
from tests.e2e.process import DEMO


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_outside_of_the_loop_they_interrupt(number: int) -> None:
    early = EarlySignals()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert early.asked == signal.Signals(number).name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_ignored_is_raised_later() -> None:
    early = EarlySignals()

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Finalised()
    assert early.asked == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        early.stop_raising()


def test_later_signals_are_noted_for_the_loop() -> None:
    early = EarlySignals()
    early.stop_raising()
    os.kill(os.getpid(), signal.SIGINT)
    assert early.asked == "SIGINT"


@pytest.mark.parametrize(
    ("environ", "overrides", "key"),
    [
        ({"LUCEVISOR_FAULTS": "/tmp/x"}, [], "LUCEVISOR_FAULTS"),
        ({}, ["groups.left.env.LUCEVISOR_FAULTS=/tmp/x"], "groups.left.env.LUCEVISOR_FAULTS"),
    ],
)
def test_hooks_are_refused(environ, overrides, key):
    with pytest.raises(ConfigError, match="lucevisor chaos") as refused:
        refuse_fault_hooks(load(DEMO, overrides), environ)
    assert refused.value.key == key


def test_deadlines():
    limits = parse_fault_limits("heartbeat_s=0.5,step_s=3")
    assert (limits.heartbeat_s, limits.step_s, limits.reap_s) == (0.5, 3.0, 30.0)
    assert parse_fault_limits("").heartbeat_s == 10.0


@pytest.mark.parametrize("text", ["heartbeat_s", "heartbeat_s=soon", "heartbeat_s=0", "n_restarts=3", "x_s=1"])
def test_something_else_is_refused(text):
    with pytest.raises(ConfigError, match="--allow-faults"):
        parse_fault_limits(text)


# ---- progress of a start


def test_the_bytes_of_all_shards_while_a_group_loads_and_none_after():
    kept = LoadProgress()
    assert kept.loading("left") is None
    assert kept.state_s("left") == 0.0
    kept.state("left", State.LOADING, "")
    kept.progress("left", Progress(stage=0, device=0, done_bytes=10, total_bytes=10, phase="warm up"))
    kept.progress("left", Progress(stage=0, device=1, done_bytes=2, total_bytes=20, phase="read"))
    kept.progress("left", Progress(stage=0, device=1, done_bytes=5, total_bytes=20, phase="convert"))
    assert kept.loading("left") == {"phase": "convert", "done_bytes": 15, "total_bytes": 30}
    assert kept.loading("right") is None
    kept.state("left", State.READY, "")
    assert kept.loading("left") is None
    kept.progress("left", Progress(stage=0, device=1, done_bytes=20, total_bytes=20, phase="warm up"))
    assert kept.loading("left") is None, "a report that came late"
    assert kept.state_s("left") >= 0.0
