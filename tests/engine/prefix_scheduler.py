"""A scheduler with a prefix cache, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    Sampled,
    StepResult,
)
from tests.engine.toy_engine import limits

FULL = frozenset({Space.FULL})
ON = PrefixSettings(
    max_slots=100,
    memory_bytes=10**9,
    min_tokens=64,
    checkpoint_pages=1,
    unit_bytes={Space.FULL: 1000, Space.WINDOW: 1000, Space.RECURRENT: 5000},
)


def warm(**changes: object) -> EngineLimits:
    """Small limits with a cache."""
    return limits(**{"prefix": ON, "pools": PoolSizes(64, 64, 12), **changes})


def run(scheduler: Scheduler, token: int = 7) -> list[StepPlan]:
    """Let a pipeline answer every step until nothing is left; return the plans."""
    found: list[StepPlan] = []
    while True:
        flight = []
        while (plan := scheduler.next_plan(0.0)) is not None:
            flight.append(plan)
        if not flight:
            return found
        for one in flight:
            drawn = [Sampled(s.sequence, token) for s in one.step.slices if s.sample]
            scheduler.apply(StepResult(one.step.step_id, 0, drawn), 0.0)
        found += flight


def slices(plans: Sequence[StepPlan], name: str) -> list[tuple[int, int]]:
    """(start, stop) of each slice of a request."""
    return [
        (s.start, s.start + len(s.tokens))
        for plan in plans
        for owner, s in zip(plan.request_ids, plan.step.slices, strict=True)
        if owner == name
    ]


def run_one(scheduler: Scheduler, one: GenerationRequest) -> list[StepPlan]:
    scheduler.submit(one, 0.0)
    return run(scheduler)
