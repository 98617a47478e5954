"""Admission and pages: who starts, who gives its pages up, and how it goes on."""

from __future__ import annotations

from lucevisor.engine.request import (
    TokenEvent,
)
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan
from lucevisor.kv.page_pool import PageUse
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    OpenSequence,
)
from tests.engine.scheduler_steps import answer, plans
from tests.engine.toy_engine import ALL_SPACES, limits, request


def test_the_shortest_starts_first_and_one_without_room_is_not_overtaken_by_longer_ones() -> None:
    scheduler = Scheduler(limits(pools=PoolSizes(4, 0, 4)))
    for name, n_prompt in (("a", 200), ("b", 100), ("c", 3), ("d", 230)):
        scheduler.submit(request(name, range(n_prompt), n=1), 0.0)
    found, order = plans(scheduler), []
    assert (scheduler.n_running, scheduler.n_queued) == (2, 2)
    while found:
        order += [name for name in found[0].request_ids if name not in order]
        scheduler.apply(answer(found.pop(0)), 0.0)
        found += plans(scheduler)
    assert order == ["c", "b", "a", "d"]


def test_the_youngest_gives_its_pages_to_an_older_one_and_goes_on_later() -> None:
    scheduler = Scheduler(limits(max_sequences=3, pools=PoolSizes(4, 0, 3)))
    for name in "ab":
        scheduler.submit(request(name, range(62), n=90), 0.0)
    told: dict[str, int] = {"a": 0, "b": 0}
    order: list[str] = []
    preempted_at = None
    while not scheduler.idle:
        found = plans(scheduler)
        for p in found:
            for name, event in scheduler.apply(answer(p), 0.0):
                if isinstance(event, TokenEvent):
                    told[name] += 1
                else:
                    order.append(name)
        if scheduler.preemption.n_preempted and preempted_at is None:
            preempted_at = dict(told)
            assert scheduler.pools.usage()[Space.FULL] == PageUse(3, 4)
            assert (scheduler.n_running, scheduler.n_queued) == (1, 1)
    assert preempted_at == {
        "a": 69,
        "b": 67,
    }  # two pages each hold 62 + 66; a ran ahead
    assert order == ["a", "b"]
    assert told == {"a": 90, "b": 90}
    assert scheduler.preemption.n_preempted == 1


def preempted(stop_ids: frozenset[int] = frozenset(), waiting: str = "") -> tuple[Scheduler, list[StepPlan]]:
    """a has just taken a page of b while a token of b was under way: steps of b and of a are in flight."""
    scheduler = Scheduler(limits(max_sequences=2, pools=PoolSizes(4, 0, 2)), n_stages=2)
    for name, n_prompt in (("a", 61), ("b", 30)):
        scheduler.submit(request(name, range(n_prompt), n=90, stop_ids=stop_ids), 0.0)
    flight = plans(scheduler)
    for name in waiting:
        scheduler.submit(request(name, n=900), 0.0)  # too long to start in another's place
    while not scheduler.preemption.n_preempted:
        scheduler.apply(answer(flight.pop(0)), 0.0)
        flight += plans(scheduler)
    assert [p.request_ids for p in flight] == [("b",), ("a",)]
    assert (scheduler.n_running, scheduler.n_queued) == (1, 1 + len(waiting))
    return scheduler, flight


def test_a_preempted_request_waits_for_its_token_under_way() -> None:
    scheduler, flight = preempted()
    scheduler.cancel("a", 0.0)  # all pages are free, but the token of b would be drawn twice
    assert plans(scheduler) == []
    scheduler.apply(answer(flight.pop(0)), 0.0)
    assert [p.request_ids for p in plans(scheduler)] == [("b",), ("b",)]


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    scheduler, flight = preempted(waiting="c")
    scheduler.cancel("a", 0.0)
    assert plans(scheduler) == []  # b waits for its token under way, and c behind it
    scheduler.apply(answer(flight.pop(0)), 0.0)
    found = plans(scheduler)
    opened = [o.sampling for p in found for o in p.step.operations if isinstance(o, OpenSequence)]
    assert opened == [request("b").sampling, request("c").sampling]


def test_window_pages_of_the_past_are_given_back_while_decoding() -> None:
    bounds = limits(spaces=ALL_SPACES, window_tokens=64, pools=PoolSizes(16, 3, 4))
    scheduler = Scheduler(bounds)
    scheduler.submit(request("a", range(100), n=400), 0.0)
    most = 0
    while not scheduler.idle:
        for p in plans(scheduler):
            most = max(most, scheduler.pools.usage()[Space.WINDOW].used)
            scheduler.apply(answer(p), 0.0)
    assert most == 2
    assert {use.used for use in scheduler.pools.usage().values()} == {0}
