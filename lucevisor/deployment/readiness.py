"""Estimates when groups will be READY again, from how long their last start took.  For Retry-After.

Pure; ``now`` is an argument.  Invariant: no estimate for a group that needs an operator.
"""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.supervision.states import State

MIN_WAIT_S = 1.0
"""The estimate for a start that takes longer than the last one did."""


class Readiness:
    """How long the groups' starts take."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._started_at: dict[str, float] = {}
        self._start_s: dict[str, float] = {}  # the last start, STARTING to READY

    def changed(self, group: str, state: State, now: float) -> None:
        """Record a change of state."""
        self._states[group] = state
        if state is State.STARTING:
            self._started_at[group] = now
        elif state is State.READY:
            self._start_s[group] = now - self._started_at.get(group, now)

    def wait_s(self, retries: Mapping[str, float | None], now: float) -> float | None:
        """Return in how many seconds all groups of ``retries`` are likely to be READY, or None when that is unknown.

        ``retries``: in how many seconds a group in BACKOFF or FAILED is started again.
        """
        # The pause of a group that failed is far longer than a start, so it alone counts.
        failed = {name: retries[name] for name in retries if self._states.get(name) is State.FAILED}
        waits = [self._wait_s(group, retry_in_s, now) for group, retry_in_s in (failed or retries).items()]
        return None if None in waits else max((wait for wait in waits if wait is not None), default=0.0)

    def _wait_s(self, group: str, retry_in_s: float | None, now: float) -> float | None:
        state = self._states.get(group, State.STOPPED)
        start_s = self._start_s.get(group)
        match state:
            case State.READY:
                return 0.0
            case State.STOPPED:
                return None
            case State.FAILED:
                return None if retry_in_s is None else retry_in_s + (start_s or 0.0)
        if start_s is None:
            return None
        if state in (State.STARTING, State.LOADING):
            return max(MIN_WAIT_S, self._started_at[group] + start_s - now)
        return (retry_in_s or 0.0) + start_s
