"""Deadlines, restarts and their limits.

`now` is any clock that only goes forward, in seconds, and randomness is an
argument. Invariant: between two calls of `reset`, no window of `SupervisionLimits.window_s` seconds holds more than
`SupervisionLimits.n_restarts` restarts, apart from those after the pauses of a group that was given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

AT_ONCE: Final = 4
"""Failures in a row after which a process that had served is still replaced without backoff."""


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Deadlines of supervision in seconds; time in which the supervisor was suspended does not count
    (`lucevisor.suspend_clock`).

    `heartbeat_s`: maximum time between heartbeats of an idle daemon; `busy_heartbeat_s`: of one that reported a step,
    whose heartbeat thread cannot run while another holds the interpreter lock; `load_stall_s`: of one that reported a
    load or a check.
    """

    hello_s: float = 60.0
    load_stall_s: float = 120.0
    heartbeat_s: float = 10.0
    busy_heartbeat_s: float = 30.0
    recheck_s: float = 0.5  # a supervisor that was delayed reads pending heartbeats before it considers a daemon hung
    stacks_s: float = 1.0  # from the request for stacks to SIGKILL
    exit_grace_s: float = 2.0  # for a daemon that exits by itself
    reap_s: float = 30.0  # from SIGKILL to quarantine; 18 s were seen where 40 processes shared two cores
    step_s: float = 120.0  # a daemon that works on one step or reset for longer is considered hung
    backoff_min_s: float = 0.25
    backoff_max_s: float = 30.0
    served_s: float = 5.0  # a daemon that was READY for this long is replaced at once
    stable_s: float = 60.0  # READY for this long resets the backoff
    lack_pause_s: float = 1.0  # between tries while the supervisor is out of descriptors, memory or processes
    spare_delay_s: float = 1.0  # from READY until spares are started, which takes a core
    n_restarts: int = 10  # after failures, within any `window_s`; 0: a group that failed stays failed
    window_s: float = 60.0
    n_first_starts: int = 5  # restarts of a group that was never READY
    failed_first_s: float = 60.0  # pause of a group that was given up; doubles each time in a row
    failed_most_s: float = 3600.0

    def pulse_timeout_s(self, phase: str, *, loading: bool) -> float:
        """Return how long a daemon may be silent after a heartbeat that reported `phase`.

        `loading`: it was sent its load and has not answered, and `phase` may be older than that. After the answer, a
        late report of the load counts as work.
        """
        if loading or phase == "check":
            return self.load_stall_s
        return self.heartbeat_s if phase == "idle" else self.busy_heartbeat_s


@dataclass(slots=True)
class RestartPolicy:
    """Decides after each failure whether and when to retry. `rng` returns a number in [0, 1)."""

    limits: SupervisionLimits
    rng: Callable[[], float]
    _restarts: list[float] = field(default_factory=list)  # times of restarts after failures, within the window
    _in_a_row: int = 0  # failures since the last stable period
    _unready: int = 0  # starts in a row that never became ready
    _ready_at: float | None = None
    _served: bool = False  # it was READY once
    _given_up: int = 0  # times in a row

    def became_ready(self, now: float) -> None:
        """Record that a start succeeded."""
        self._ready_at = now
        self._unready = 0
        self._served = True

    def delay_s(self, now: float) -> float | None:
        """Return the seconds to wait before the next start after a failure at `now`, or None to give up.

        Zero where a process had served, the first four times in a row: requests wait for the next one. Else
        exponential backoff, with jitter between half of the step and all of it. A start that never succeeds is given up
        after `n_restarts` tries in a row, however slowly it fails; sooner if none ever succeeded.
        """
        was_ready = self._ready_at is not None
        ready_s = 0.0 if self._ready_at is None else now - self._ready_at
        self._unready += not was_ready
        self._ready_at = None
        if ready_s >= self.limits.stable_s:
            self._in_a_row = self._given_up = 0
        self._in_a_row += 1
        step_s = min(self.limits.backoff_max_s, self.limits.backoff_min_s * 2.0 ** min(self._in_a_row - 1, 60))
        at_once = ready_s >= self.limits.served_s and self._in_a_row <= AT_ONCE
        delay_s = 0.0 if at_once else step_s * (0.5 + 0.5 * self.rng())
        self._restarts = [at for at in self._restarts if at > now + delay_s - self.limits.window_s]
        n_restarts = self.limits.n_restarts
        n_starts = n_restarts if self._served else min(n_restarts, self.limits.n_first_starts)
        one_try = self._given_up > 0 and not was_ready
        if one_try or len(self._restarts) >= n_restarts or self._unready > n_starts:
            return None
        return delay_s

    def failed_pause_s(self) -> float | None:
        """Return the seconds after which a group that is given up is tried again, or None for never.

        One try follows each pause. If that does not become ready, the next pause is twice as long.
        """
        if not self.limits.n_restarts:
            return None
        self._given_up += 1
        return min(self.limits.failed_most_s, self.limits.failed_first_s * 2.0 ** min(self._given_up - 1, 60))

    def restarted(self, now: float) -> None:
        """Count a restart after a failure, when it happens."""
        self._restarts.append(now)

    def reset(self) -> None:
        """Reset all counters, for a restart by an operator."""
        self._restarts.clear()
        self._in_a_row = 0
        self._unready = 0
        self._given_up = 0
        self._ready_at = None
