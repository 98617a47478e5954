"""Estimates when groups will be READY again, from how long their last start took.  For Retry-After.

Pure; ``now`` is an argument.  Invariant: no estimate for a group that was never READY or that needs an operator.
"""

from __future__ import annotations

from collections.abc import Iterable

from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import State

MIN_WAIT_S = 1.0
"""The estimate for a start that takes longer than the last one did."""


class Readiness:
    """How long the groups' starts take."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._states: dict[str, tuple[State, float]] = {}  # with the time since when
        self._started_at: dict[str, float] = {}
        self._start_s: dict[str, float] = {}  # the last start, STARTING to READY
        self._n_backoffs: dict[str, int] = {}  # in a row

    def changed(self, group: str, state: State, now: float) -> None:
        """Record a change of state."""
        self._states[group] = (state, now)
        if state is State.STARTING:
            self._started_at[group] = now
        elif state is State.READY:
            self._start_s[group] = now - self._started_at.get(group, now)
            self._n_backoffs[group] = 0
        elif state is State.BACKOFF:
            self._n_backoffs[group] = self._n_backoffs.get(group, 0) + 1

    def wait_s(self, groups: Iterable[str], now: float) -> float | None:
        """Return in how many seconds all groups are likely to be READY, or None when that is unknown."""
        waits = [self._wait_s(group, now) for group in groups]
        return None if None in waits else max((wait for wait in waits if wait is not None), default=0.0)

    def _wait_s(self, group: str, now: float) -> float | None:
        state, since = self._states.get(group, (State.STOPPED, now))
        start_s = self._start_s.get(group)
        if state is State.READY:
            return 0.0
        if start_s is None or state in (State.FAILED, State.STOPPED):
            return None
        if state in (State.STARTING, State.LOADING):
            return max(MIN_WAIT_S, self._started_at[group] + start_s - now)
        backoff_s = 0.0
        if state is State.BACKOFF:
            first_s, most_s = self._limits.backoff_first_s, self._limits.backoff_most_s
            backoff_s = min(most_s, first_s * 2.0 ** min(self._n_backoffs[group] - 1, 60))
        return max(0.0, since + backoff_s - now) + start_s
