"""What a scheduler holds: requests, pools, operations that wait, steps in flight.

A part of the scheduler (scheduler.py), which changes it and states the invariants.  Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.prefix_reuse import PrefixReuse
from lucevisor.engine.request import Event
from lucevisor.engine.running import RunningRequests
from lucevisor.engine.scheduling.admission import Admission
from lucevisor.engine.scheduling.backlog import Backlog
from lucevisor.engine.scheduling.chunking import SharedChunks
from lucevisor.engine.scheduling.drafts import Drafting
from lucevisor.engine.scheduling.preemption import Preemption
from lucevisor.engine.scheduling.queue import RequestQueue
from lucevisor.engine.scheduling.shares import ClientShares
from lucevisor.engine.scheduling.waits import WaitEstimate
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.step import ScheduledStep
from lucevisor.protocol.steps import Operation

Events = list[tuple[str, Event]]
"""(request id, event) pairs, in order."""


class SchedulerState:
    """The scheduler's fields, and what others may ask of them."""

    def __init__(self, limits: EngineLimits, n_stages: int = 1) -> None:
        self.limits = limits
        self.n_stages = n_stages
        self.runs_ahead = n_stages == 1  # decodes may be planned before their tokens are known
        self.starving = False  # the only running request needs pages that pins or reservations hold
        self.failed: Events = []  # events of requests that ended while a step was planned
        self.n_generated_tokens = 0
        self.longest_pause_s = 0.0  # from a loss to the next token of a request
        self.last_applied = 0  # the last step whose result was applied
        self.pools = limits.make_pools()
        self.reuse = PrefixReuse(limits, self.pools)
        self.running = RunningRequests(limits, self.pools, self.reuse)
        self.drafting = Drafting(limits, self.pools, self.running, n_stages)
        self._records: dict[str, RequestRecord] = {}
        self._shares = ClientShares(credit=4 * limits.prefill_chunk)
        self._queue = RequestQueue(self._shares)
        self.preemption = Preemption(self.running, self._queue, self.reuse, self._shares, limits.prefill_chunk)
        self.admission = Admission(self._queue, self.running, self.reuse, self._shares, self.preemption)
        self.chunks = SharedChunks(n_stages, limits.prefill_chunk)
        self._waits = WaitEstimate()
        self._operations: list[Operation] = []
        self._unlearned: Callable[[], None] | None = None  # of the last step, for the policy of drafts
        self._flushing = False  # send waiting operations with a step of their own if need be
        self.in_flight: deque[ScheduledStep] = deque()
        self._backlog = Backlog(n_stages)
        self._n_arrivals = 0
        self._last_step = 0

    # ---- what there is

    @property
    def n_queued(self) -> int:
        """Requests that have no sequence in the shards, or lost it to preemption."""
        return len(self._queue)

    @property
    def n_running(self) -> int:
        """Requests that have a sequence in the shards."""
        return len(self.running)

    @property
    def n_in_flight(self) -> int:
        """Steps planned whose result was not applied yet."""
        return len(self.in_flight)

    @property
    def queued(self) -> Iterable[RequestRecord]:
        """Requests that wait, in no order that matters."""
        return self._queue

    @property
    def unfinished(self) -> Collection[str]:
        """Ids of all requests that run or wait."""
        return self._records.keys()

    @property
    def idle(self) -> bool:
        """Whether no request is left and no step is in flight."""
        return not self._records and not self.in_flight

    @property
    def last_finished(self) -> int:
        """The last step that every stage has done, the draft stage included."""
        waiting = self.drafting.outstanding
        return min(self.last_applied, waiting[0].step_id - 1) if waiting else self.last_applied

    @property
    def queue(self) -> RequestQueue:
        """The requests that wait."""
        return self._queue

    def wait_s(self, client: str = "") -> float | None:
        """Return the seconds until a further request of a client would start; None before enough was measured."""
        return self._waits.wait_s(self.running, self._queue.rivals(client, self.running))
