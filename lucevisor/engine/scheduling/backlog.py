"""Estimates when the pipeline finishes the steps it has, and so how long a step sent now would wait.

Pure; ``now`` is an argument.  Assumes that every stage takes as long as the slowest; each answer of the first and of
the last stage corrects the estimate.  Knows neither requests nor pages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Sent:
    seconds: float  # per stage
    began_at: float | None  # at the first stage; None while it waits there


class Backlog:
    """Steps in flight, oldest first."""

    def __init__(self, n_stages: int) -> None:
        self._n_hops = n_stages - 1
        self._steps: deque[_Sent] = deque()
        self._n_at_first_stage = 0  # of the newest, those it has not answered as far as we know
        self._answered_at = 0.0  # by the last stage

    @property
    def empty(self) -> bool:
        """Whether no step is in flight."""
        return not self._steps

    @property
    def first_stage_free(self) -> bool:
        """Whether the first stage has no step."""
        return not self._n_at_first_stage

    def sent(self, seconds: float, now: float) -> None:
        """Note that a step was sent, which takes each stage ``seconds``."""
        self._steps.append(_Sent(seconds, None if self._n_at_first_stage else now))
        self._n_at_first_stage += 1

    def first_stage_done(self, now: float) -> None:
        """Note that the first stage finished its oldest step."""
        self._n_at_first_stage -= 1
        if self._n_at_first_stage:
            self._steps[-self._n_at_first_stage].began_at = now

    def answered(self, now: float) -> None:
        """Note that the last stage finished the oldest step."""
        self._steps.popleft()
        self._n_at_first_stage = min(self._n_at_first_stage, len(self._steps))
        self._answered_at = now

    def clear(self) -> None:
        """Forget all steps: they are lost."""
        self._steps.clear()
        self._n_at_first_stage = 0

    def wait_s(self, seconds: float, now: float) -> float:
        """Return how long a step of ``seconds`` per stage, sent now to a free first stage, would wait at the last one.

        Negative if the last stage would wait for the step instead.
        """
        free_at = self._answered_at
        for i, step in enumerate(self._steps):
            began_at = now if step.began_at is None else step.began_at
            free_at = max(free_at, began_at + self._n_hops * step.seconds) + step.seconds
            if not i:
                free_at = max(free_at, now)
        return free_at - (now + self._n_hops * seconds)

    def idle_s(self, seconds: float) -> float:
        """Return how long the last stage would idle if such a step were sent at its next answer."""
        return self._n_hops * seconds - sum(step.seconds for i, step in enumerate(self._steps) if i)
