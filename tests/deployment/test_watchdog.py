"""Work that a daemon has had in hand for too long: seen at every look, on the supervisor's own clock."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from lucevisor.deployment import deployment
from lucevisor.deployment.deployment import DaemonWork, Watchdog, watch

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
