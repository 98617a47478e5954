"""What gives way when pages are short, and what is told of cached tokens."""

from __future__ import annotations

from lucevisor.engine.request import FinishedEvent, Usage
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import RequestRecord
from lucevisor.kv.page_pool import PageUse
from lucevisor.kv.prefix_cache import PrefixMatch
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    Sampled,
    StepResult,
)
from tests.engine.prefix_scheduler import run_one, slices, warm
from tests.engine.toy_engine import request


def test_slots_give_way_before_a_request_waits_or_is_preempted() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=PoolSizes(6, 0, 6)))
    for name in "ab":
        run_one(scheduler, request(name, range(1000 * ord(name), 1000 * ord(name) + 100), n=1))
    assert scheduler.pools.usage()[Space.FULL] == PageUse(4, 6, evictable=4)
    run_one(scheduler, request("c", range(250), n=100))
    assert scheduler.preemption.n_preempted == 0
    assert scheduler.pools.usage()[Space.FULL].used <= 6


def test_a_lone_request_may_take_everything_even_from_what_it_started_with() -> None:
    bounds = warm(max_sequences=1, max_step_tokens=65, pools=PoolSizes(4, 0, 3))
    for n_known in (65, 100, 128, 190):
        scheduler = Scheduler(bounds)
        run_one(scheduler, request("a", range(n_known), n=1))
        plans = run_one(scheduler, request("b", [*range(n_known), *range(500, 520)], n=400))
        assert scheduler.preemption.n_preempted == 0
        assert slices(plans, "b")[0][0] >= 64
        assert slices(plans, "b")[-1][1] == 255  # 256 positions, of which the last token is never computed


def test_what_is_told_of_cached_tokens() -> None:
    scheduler = Scheduler(warm())
    told_of: dict[str, int] = {}
    for name, prompt in (("a", range(150)), ("b", [*range(150), 1]), ("c", range(700, 780))):
        scheduler.submit(request(name, prompt, n=2, turn_boundaries=(140,)), 0.0)
        while not scheduler.idle:
            plan = scheduler.next_plan(0.0)
            assert plan is not None
            drawn = [Sampled(s.sequence, 7) for s in plan.step.slices if s.sample]
            for owner, event in scheduler.apply(StepResult(plan.step.step_id, 0, drawn), 0.0):
                if isinstance(event, FinishedEvent):
                    told_of[owner] = event.usage.cached_tokens
    assert told_of == {"a": 0, "b": 140, "c": 0}
    counts = scheduler.reuse.counts
    assert (counts.n_prompts, counts.n_hits, counts.tokens) == (3, 1, {"memory": 140, "disk": 0})


def test_what_a_preempted_request_had_computed_after_all_was_not_cached() -> None:
    scheduler = Scheduler(warm())
    record = RequestRecord(request("a", range(100), n=50), 0, 50, 0.0)
    for _ in range(30):
        record.append(Sampled(0, 7))
    for position, cached in ((120, 100), (64, 64), (100, 64), (0, 0)):  # never more than the prompt, the least counts
        scheduler.reuse.on_started(record, PrefixMatch(position), 0.0)
        assert record.finished_event("length", 1.0, None, None).usage == Usage(100, cached, 30)
