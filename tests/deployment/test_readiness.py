"""When groups are back: told from how long their last start took."""

from __future__ import annotations

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
