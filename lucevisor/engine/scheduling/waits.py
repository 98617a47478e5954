"""Estimates how long a new request would wait, from measured rates and the work ahead of it.

A rate is tokens divided by the seconds in which such work was in progress, recent ones weighted more: prompt tokens
while any prompt was computed, generated tokens of one sequence while it decoded.  The wait is found by simulating the
queue with these rates: a sequence is free when its request ends, and prompts are computed one after the other.
Pure; ``now`` is an argument.  Invariant: without a measured rate there is no estimate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from lucevisor.engine.request import Reason, RequestState
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.step import ScheduledStep
from lucevisor.protocol.steps import Sampled

HALF_LIFE_S: Final = 30.0
"""Seconds of work after which a measurement counts half."""
_MAX_SIMULATED: Final = 1024  # requests; the wait of a longer queue is proportional
_RETRY_S: Final = (1, 600)  # bounds of Retry-After: a client that asks more often gains nothing
_RETRY_UNKNOWN_S: Final = 5  # before anything was measured
_RETRY_VALID_S: Final = 1.0


class _Rate:
    """Tokens and the seconds of work they took."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, n_tokens: int, seconds: float, keep: float) -> None:
        self._tokens = self._tokens * keep + n_tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def seconds_per_token(self) -> float | None:
        return self._seconds / self._tokens if self._tokens and self._seconds else None


class RetryAfter:
    """Retry-After of a client's refused requests, from an estimate of the wait; reused for a while, so that refusing is
    cheap.
    """

    def __init__(self) -> None:
        self._estimated_at = -math.inf
        self._seconds: dict[str, int] = {}  # by client

    def seconds(self, client: str, wait_s: Callable[[str], float | None], now: float) -> int:
        """Return when the client's requests that wait now will have started, in whole seconds."""
        if now - self._estimated_at >= _RETRY_VALID_S:
            self._seconds.clear()
            self._estimated_at = now
        if client not in self._seconds:
            estimate, (least, most) = wait_s(client), _RETRY_S
            retry_s = _RETRY_UNKNOWN_S if estimate is None else min(most, max(least, math.ceil(estimate)))
            self._seconds[client] = retry_s
        return self._seconds[client]


class WaitEstimate:
    """Measures rates, and estimates waits."""

    def __init__(self) -> None:
        self._prompts, self._answers = _Rate(), _Rate()
        self._counted_until: float | None = None  # None: no step is under way
        self._to_the_limit = [0.0, 0.0]  # max_tokens of requests that used them all, and of all requests
        self._stopped = [0.0, 0.0]  # tokens of those that ended earlier, and their number

    def planned(self, now: float) -> None:
        """Note that a step was sent; time counts from the first in flight."""
        if self._counted_until is None:
            self._counted_until = now

    def stopped(self) -> None:
        """Note that the steps in flight are lost."""
        self._counted_until = None

    def applied(
        self,
        scheduled: ScheduledStep,
        drawn: Mapping[int, Sequence[Sampled]],
        states: Sequence[RequestState],
        now: float,
        *,
        idle: bool,
    ) -> None:
        """Note a step's result before it is applied: ``drawn`` tokens by sequence.  ``states``: of what runs.
        ``idle``: no other step is in flight.
        """
        seconds = now - (now if self._counted_until is None else self._counted_until)
        self._counted_until = None if idle else now
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        n_tokens = sum(map(len, drawn.values()))
        if RequestState.PREFILL in states:
            prompts = [(s, part) for s, part in scheduled.parts.items() if part.record.state is RequestState.PREFILL]
            self._prompts.add(sum(len(part.slice.tokens) for _, part in prompts), seconds, keep)
            n_tokens -= sum(len(drawn.get(sequence, ())) for sequence, _ in prompts)
        if n_decoding := states.count(RequestState.DECODE):
            self._answers.add(n_tokens, seconds * n_decoding, keep)

    def finished(self, record: RequestRecord, reason: Reason) -> None:
        """Note how long the answer of a finished request was; errors say nothing about it."""
        if reason == "error" or record.uncached:
            return
        at_limit = reason == "length"
        for sums, more in (
            (self._to_the_limit, (record.max_tokens * at_limit, record.max_tokens)),
            (self._stopped, (record.n_generated * (not at_limit), float(not at_limit))),
        ):
            sums[:] = (0.97 * old + new for old, new in zip(sums, more, strict=True))  # the last thirty or so

    def wait_s(self, running: Iterable[RequestRecord], queued: Sequence[RequestRecord]) -> float | None:
        """Return the seconds until a request after all ``queued`` ones, given in order, would start."""
        per_prompt, per_answer = self._prompts.seconds_per_token, self._answers.seconds_per_token
        if per_answer is None and self._to_the_limit[1]:
            per_answer = 0.0  # requests ended and none decoded: answers of one token
        if per_prompt is None or per_answer is None:
            return None
        computed_s, places = 0.0, []
        for record in sorted(running, key=lambda record: record.state is RequestState.PREFILL):
            if record.state is RequestState.PREFILL and record.live is not None:
                computed_s += (len(record.tokens) - record.live.n_scheduled) * per_prompt
                places.append(computed_s + self._left(record) * per_answer)
            else:
                places.append(self._left(record) * per_answer)
        if not places:
            places.append(0.0)
        heapq.heapify(places)
        played = queued[:_MAX_SIMULATED]
        for record in played:
            computed_s = max(computed_s, places[0]) + record.size * per_prompt
            heapq.heapreplace(places, computed_s + self._left(record) * per_answer)
        return places[0] * (len(queued) / len(played) if played else 1.0)

    def _left(self, record: RequestRecord) -> float:
        """Return how many more tokens a request is expected to generate."""
        most = record.max_tokens - record.n_generated
        of_limit, all_limits = self._to_the_limit
        tokens, n = self._stopped
        share = of_limit / all_limits if all_limits else 1.0
        mean = tokens / n if n else most
        expected = mean - record.n_generated if record.n_generated < mean else mean
        return share * most + (1 - share) * min(most, expected)
