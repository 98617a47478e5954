"""Steps of a scheduler without a pipeline: all plans there are, and answers to them."""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampled, StepResult
from tests.engine.toy_engine import limits, request


def plans(scheduler: Scheduler, now: float = 0.0) -> list[StepPlan]:
    """All steps that can be sent now, down a pipeline whose head is always done at once."""
    found = []
    while (plan := scheduler.next_plan(now)) is not None:
        found.append(plan)
        if scheduler.n_stages > 1:
            scheduler.on_first_stage_done()
    return found


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(request, start, tokens, sample) of each slice."""
    return [
        (name, s.start, len(s.tokens), s.sample) for name, s in zip(plan.request_ids, plan.step.slices, strict=True)
    ]


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    """The tail's result: the same token for each slice that asks for one."""
    sampled = [Sampled(s.sequence, token) for s in plan.step.slices if s.sample]
    return StepResult(plan.step.step_id, 0, sampled)


def decoding(bounds: EngineLimits, names: str, n: int = 50, n_stages: int = 1) -> Scheduler:
    """A scheduler whose requests, of three tokens each, all have their first token and no step in flight."""
    scheduler = Scheduler(bounds, n_stages)
    for name in names:
        scheduler.submit(request(name, n=n), 0.0)
    while any(plan := plans(scheduler)) and plan[0].step.operations:
        for one in plan:
            scheduler.apply(answer(one), 0.0)
        if scheduler.n_running == len(names) and not scheduler.n_queued:
            break
    assert scheduler.n_in_flight == 0
    return scheduler


FULL = frozenset({KvGroup.FULL})
ON = PrefixSettings(
    max_slots=100,
    memory_bytes=10**9,
    min_tokens=64,
    checkpoint_pages=1,
    unit_bytes={KvGroup.FULL: 1000, KvGroup.WINDOW: 1000, KvGroup.RECURRENT: 5000},
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
