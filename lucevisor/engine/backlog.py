"""When the chain will be done with the steps it has, by their estimated times: what a step sent now would wait for.

Pure; ``now`` is an argument.  Stages are taken to need equal time, that of the slowest one; every answer of the head
and of the tail puts the estimate right again.  Knows neither requests nor pages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Sent:
    seconds: float  # of a stage
    began_at: float | None  # at the head; None while it waits there


class Backlog:
    """Steps in flight, oldest first."""

    def __init__(self, n_stages: int) -> None:
        self._n_hops = n_stages - 1
        self._steps: deque[_Sent] = deque()
        self._n_at_first_stage = 0  # the last ones, those that the head has not answered, as far as it was told
        self._answered_at = 0.0  # by the tail, last

    @property
    def empty(self) -> bool:
        """Whether no step is in flight."""
        return not self._steps

    @property
    def first_stage_free(self) -> bool:
        """Whether the head has no step."""
        return not self._n_at_first_stage

    def sent(self, seconds: float, now: float) -> None:
        """A step was sent that will take a stage so long."""
        self._steps.append(_Sent(seconds, None if self._n_at_first_stage else now))
        self._n_at_first_stage += 1

    def first_stage_done(self, now: float) -> None:
        """The head is done with the oldest step it had."""
        self._n_at_first_stage -= 1
        if self._n_at_first_stage:
            self._steps[-self._n_at_first_stage].began_at = now

    def answered(self, now: float) -> None:
        """The tail is done with the oldest step."""
        self._steps.popleft()
        self._n_at_first_stage = min(self._n_at_first_stage, len(self._steps))
        self._answered_at = now

    def clear(self) -> None:
        """The steps are lost."""
        self._steps.clear()
        self._n_at_first_stage = 0

    def wait_s(self, seconds: float, now: float) -> float:
        """Return how long a step of ``seconds`` a stage, sent now to a free head, would wait at the tail; negative:
        how long the tail would wait for it.
        """
        free_at = self._answered_at
        for i, step in enumerate(self._steps):
            began_at = now if step.began_at is None else step.began_at
            free_at = max(free_at, began_at + self._n_hops * step.seconds) + step.seconds
            if not i:
                free_at = max(free_at, now)
        return free_at - (now + self._n_hops * seconds)

    def idle_s(self, seconds: float) -> float:
        """Return how long the tail would have nothing to do if such a step were sent at its next answer."""
        return self._n_hops * seconds - sum(step.seconds for i, step in enumerate(self._steps) if i)
