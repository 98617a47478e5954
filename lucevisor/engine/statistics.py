"""Counts of the engine: totals since the start, and rates over recent seconds. Pure; ``now`` is an argument."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.engine.prefix_reuse import PrefixReuse
from lucevisor.engine.recovery import RecoveryStatistics, RequestHold
from lucevisor.engine.spec_decode.controller import SUSPENDED
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.kv.page_pool import PageUse

if TYPE_CHECKING:
    from lucevisor.engine.scheduler import Scheduler


class RateWindow:
    """Events a second over the last ``window_s`` seconds, in about a hundred buckets whatever the rate."""

    def __init__(self, window_s: float, now: float) -> None:
        self.window_s = window_s
        self._bucket_s = window_s / 100
        self._started_at = now
        self._buckets: deque[tuple[int, int]] = deque()  # (bucket number, events)

    def add(self, n: int, now: float) -> None:
        bucket = int((now - self._started_at) / self._bucket_s)
        if self._buckets and self._buckets[-1][0] == bucket:
            n += self._buckets.pop()[1]
        self._buckets.append((bucket, n))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return events a second, over the window or the time since the start where that is shorter."""
        self._forget(now)
        seconds = min(self.window_s, now - self._started_at)
        return sum(n for _, n in self._buckets) / max(seconds, self._bucket_s)

    def _forget(self, now: float) -> None:
        # A bucket half outside the window goes: the rate is at most a hundredth too low, never too high.
        oldest = math.ceil((now - self._started_at - self.window_s) / self._bucket_s)
        while self._buckets and self._buckets[0][0] < oldest:
            self._buckets.popleft()


@dataclass(slots=True)
class StageTotals:
    """Totals of a stage since the start.  ``wait_s``: seconds that its compute thread was idle."""

    n_steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class BoundaryTotals:
    """Hand-overs from stage i to i + 1. ``n_hops``: of posted steps; ``seconds`` from the doorbell until the rows were
    taken."""

    n_hops: int = 0
    n_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StepTotals:
    """Steps since the start."""

    n_steps: int = 0
    n_tokens: int = 0
    seconds: float = 0.0  # from submit to the last answer; overlapping steps each count
    stages: list[StageTotals] = field(default_factory=list)
    boundaries: list[BoundaryTotals] = field(default_factory=list)

    def add(self, result: PipelineResult) -> None:
        """Count a step that the last stage has answered."""
        last = result.results[-1].stage
        while len(self.stages) <= last:
            self.stages.append(StageTotals())
        while len(self.boundaries) < last:
            self.boundaries.append(BoundaryTotals())
        self.n_steps += 1
        self.n_tokens += result.step.n_tokens
        self.seconds += result.seconds
        for answer in result.results:
            totals = self.stages[answer.stage]
            totals.n_steps += 1
            totals.compute_s += answer.compute_s
            totals.wait_s += answer.wait_s
        for answer in result.results[1:]:
            boundary = self.boundaries[answer.stage - 1]
            boundary.n_hops += answer.hop_s > 0
            boundary.n_tokens += result.step.n_tokens
            boundary.seconds += answer.hop_s


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """``n_bytes``: pages and states that only slots hold. ``n_hits`` of ``n_prompts`` prompts began with a cached
    prefix; ``tokens``: their reused tokens, by where the prefix came from ("device", "host" or "disk")."""

    n_slots: int = 0
    n_pinned: int = 0
    n_bytes: int = 0
    n_prompts: int = 0
    n_hits: int = 0
    n_evictions: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, reuse: PrefixReuse) -> CacheStatistics:
        index, counts = reuse.index, reuse.counts
        slots = index.slots
        return cls(
            n_slots=len(slots),
            n_pinned=sum(slot.pins > 0 for slot in slots),
            n_bytes=index.n_bytes,
            n_prompts=counts.n_prompts,
            n_hits=counts.n_hits,
            n_evictions=index.n_evictions,
            tokens={str(tier): n for tier, n in counts.tokens.items()},
        )


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot for status and metrics. ``tokens_per_s``: generated tokens of the last ``window_s`` seconds, or of the
    engine's age while that is shorter."""

    ready: bool
    reason: str  # why not ready; empty when ready
    running: int
    queued: int
    in_flight: int
    tokens_per_s: float
    window_s: float
    generated_tokens: int
    preemptions: int
    pages: dict[str, PageUse]  # by KV group
    pages_out: int  # pages of running sequences that KV Flash paged out
    host_pages: PageUse  # pages that KV Flash keeps in host memory
    steps: StepTotals
    cache: CacheStatistics = field(default_factory=CacheStatistics)
    drafts: DraftStatistics = field(default_factory=DraftStatistics)
    draft_width: int = 0  # drafts that are asked for at present
    no_drafts: str = ""  # why ``draft_width`` is 0 although a drafter is attached
    recovery: RecoveryStatistics = field(default_factory=RecoveryStatistics)

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        totals: StepTotals,
        generated: RateWindow,
        recovery: RequestHold,
        now: float,
        rebuilding: tuple[int, int],
        *,
        reason: str,
    ) -> EngineStatistics:
        """Return the counts as of now; ``reason``: why the engine is not ready, or empty."""
        return cls(
            ready=not reason,
            reason=reason,
            running=scheduler.n_running,
            queued=scheduler.n_queued,
            in_flight=scheduler.n_in_flight,
            tokens_per_s=generated.rate(now),
            window_s=generated.window_s,
            generated_tokens=scheduler.n_generated_tokens,
            preemptions=scheduler.admission.n_preempted,
            pages={str(kv_group): use for kv_group, use in scheduler.pools.usage().items()},
            host_pages=PageUse(scheduler.pools.host_pages.n_used, scheduler.pools.host_pages.n_total),
            pages_out=sum(record.live.table.n_out for record in scheduler.running if record.live is not None),
            steps=copy.deepcopy(totals),
            cache=CacheStatistics.of(scheduler.reuse),
            drafts=copy.deepcopy(scheduler.drafting.statistics),
            draft_width=scheduler.drafting.speculation.width if scheduler.drafting.active else 0,
            no_drafts=SUSPENDED if scheduler.drafting.suspended else scheduler.drafting.speculation.no_drafts,
            recovery=recovery.statistics(len(scheduler.unfinished), now, scheduler.longest_pause_s, rebuilding),
        )
