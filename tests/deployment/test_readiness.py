"""When groups are back: told from how long their last start took."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from lucevisor.deployment import deployment
from lucevisor.deployment.deployment import DaemonWork, Watchdog, watch
from lucevisor.deployment.service import MIN_WAIT_S, Readiness
from lucevisor.supervision.states import State


def ready_after(start_s: float, *groups: str) -> Readiness:
    found = Readiness()
    for group in groups:
        found.changed(group, State.STARTING, 0.0)
        found.changed(group, State.LOADING, 1.0)
        found.changed(group, State.READY, start_s)
    return found


BOTH = {"left": None, "right": None}


def test_a_start_takes_as_long_as_the_last_one() -> None:
    found = ready_after(30.0, "left", "right")
    assert found.wait_s(BOTH, 40.0) == 0.0
    found.changed("left", State.STARTING, 100.0)
    assert found.wait_s(BOTH, 110.0) == 20.0
    found.changed("left", State.LOADING, 105.0)
    assert found.wait_s(BOTH, 120.0) == 10.0
    assert found.wait_s(BOTH, 500.0) == MIN_WAIT_S


def test_a_failed_group_is_waited_for_until_its_next_try_and_unknown_without_one() -> None:
    found = ready_after(10.0, "left")
    found.changed("left", State.FAILED, 100.0)
    assert found.wait_s({"left": 60.0}, 100.0) == 70.0
    assert found.wait_s({"left": None}, 100.0) is None
    found.changed("right", State.STARTING, 100.0)
    assert found.wait_s({"left": 60.0, "right": None}, 100.0) == 70.0
    never_ready = Readiness()
    never_ready.changed("left", State.FAILED, 5.0)
    assert never_ready.wait_s({"left": 60.0}, 5.0) == 60.0


def test_the_slowest_group_counts_and_one_that_failed_is_not_waited_for() -> None:
    found = ready_after(10.0, "left", "right")
    found.changed("left", State.STARTING, 100.0)
    found.changed("right", State.STOPPING, 104.0)
    assert found.wait_s(BOTH, 104.0) == 10.0
    found.changed("right", State.FAILED, 105.0)
    assert found.wait_s(BOTH, 105.0) is None


# ---- work that takes too long


LEFT, RIGHT = DaemonWork("left", "step 1"), DaemonWork("right", "step 1")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_work_is_overdue_from_the_limit_on_and_every_time_it_is_seen(clock: Clock) -> None:
    dog = Watchdog(3.0, clock)
    found = []
    for clock.now in (10.0, 12.0, 13.0, 13.5, 20.0):
        found.append(dog.check([LEFT]))
    assert found == [{}, {}, {}, {LEFT: 3.5}, {LEFT: 10.0}]


def test_work_that_a_look_did_not_see_is_new(clock: Clock) -> None:
    dog = Watchdog(3.0, clock)
    for clock.now, seen in ((0.0, [LEFT, RIGHT]), (2.0, [RIGHT]), (4.0, [LEFT, RIGHT])):
        found = dog.check(seen)
    assert found == {RIGHT: 4.0}


async def test_the_watch_goes_on_after_a_defect_of_what_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "WATCH_S", 0.005)
    looks, told = [], asyncio.Event()

    def work_in_progress() -> list[DaemonWork]:
        looks.append(len(looks))
        if len(looks) == 2:
            raise RuntimeError("a defect")
        return [LEFT]

    def overdue(work: DaemonWork, waited_s: float) -> None:
        assert (work, waited_s > 0.0, len(looks) > 2) == (LEFT, True, True)
        told.set()

    with capture_logs() as logs:
        task = asyncio.create_task(watch(0.02, work_in_progress, overdue))
        async with asyncio.timeout(20):
            await told.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert [line["log_level"] for line in logs] == ["error"]
