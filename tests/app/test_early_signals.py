"""Signals that come before the event loop has taken them over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lucevisor.app.run import EarlySignals


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
