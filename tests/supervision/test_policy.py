"""Backoff and restart intensity."""

from __future__ import annotations

from lucevisor.supervision.policy import RestartPolicy, SupervisionLimits


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
