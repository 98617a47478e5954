"""When groups are back: told from how long their last start took."""

from __future__ import annotations

from lucevisor.deployment.readiness import MIN_WAIT_S, Readiness
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import State


def ready_after(start_s: float, *groups: str) -> Readiness:
    found = Readiness(SupervisionLimits(backoff_first_s=0.5, backoff_most_s=8.0))
    for group in groups:
        found.changed(group, State.STARTING, 0.0)
        found.changed(group, State.LOADING, 1.0)
        found.changed(group, State.READY, start_s)
    return found


def test_a_first_start_is_not_known() -> None:
    found = Readiness(SupervisionLimits())
    found.changed("left", State.STARTING, 0.0)
    assert found.wait_s(["left"], 5.0) is None


def test_a_start_takes_as_long_as_the_last_one() -> None:
    found = ready_after(30.0, "left", "right")
    assert found.wait_s(["left", "right"], 40.0) == 0.0
    found.changed("left", State.STARTING, 100.0)
    assert found.wait_s(["left", "right"], 110.0) == 20.0
    found.changed("left", State.LOADING, 105.0)
    assert found.wait_s(["left", "right"], 120.0) == 10.0
    assert found.wait_s(["left", "right"], 500.0) == MIN_WAIT_S


def test_a_back_off_comes_on_top_and_doubles() -> None:
    found = ready_after(10.0, "left")
    for n, delay_s in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 8.0)):
        now = 100.0 + 50 * n
        found.changed("left", State.BACKOFF, now)
        assert found.wait_s(["left"], now) == delay_s + 10.0
        assert found.wait_s(["left"], now + 20) == 10.0
        found.changed("left", State.STARTING, now + 20)
    found.changed("left", State.READY, 500.0)
    found.changed("left", State.BACKOFF, 600.0)
    assert found.wait_s(["left"], 600.0) == 0.5 + 500.0 - 370.0


def test_the_slowest_group_counts_and_one_that_failed_is_not_waited_for() -> None:
    found = ready_after(10.0, "left", "right")
    found.changed("left", State.STARTING, 100.0)
    found.changed("right", State.STOPPING, 104.0)
    assert found.wait_s(["left", "right"], 104.0) == 10.0
    found.changed("right", State.FAILED, 105.0)
    assert found.wait_s(["left", "right"], 105.0) is None
