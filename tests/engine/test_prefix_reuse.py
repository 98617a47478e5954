"""Where sequences start, what they share, who waits, who gives way: the scheduler with prefix slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lucevisor.engine.checkpoints import find_checkpoints
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import FinishedEvent, GenerationRequest, Usage
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.step import StepPlan
from lucevisor.kv.page_pool import PageUse
from lucevisor.kv.prefix_records import PrefixMatch, PrefixSettings
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    OpenSequence,
    Sampled,
    Sampling,
    SetPages,
    StepResult,
    ZeroState,
)
from tests.engine.toy_engine import ALL_SPACES, HYBRID, LOST, ToyEngine, events_of, limits, request, told
from tests.engine.toy_pipeline import ToyStage

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


# ---- where prompts are cut


def test_a_prompt_is_remembered_at_its_first_and_last_turns_and_its_end() -> None:
    settings = PrefixSettings(min_tokens=64)
    for block_granular in (True, False):
        found = find_checkpoints(2000, [300, 700, 900, 1200, 1500], settings, block_granular=block_granular)
        assert found == {300: "turn", 1200: "turn", 1500: "turn", 2000: "prompt"}
        assert list(found) == sorted(found)


def test_the_first_and_the_last_turn_stand_and_others_are_a_page_apart_from_them() -> None:
    settings = PrefixSettings(min_tokens=64)
    assert find_checkpoints(510, [450, 470, 500], settings, block_granular=False) == {450: "turn", 500: "turn"}
    assert find_checkpoints(510, [40, 436, 500], settings, block_granular=False) == {436: "turn", 500: "turn"}
    assert find_checkpoints(500, [300, 500], settings, block_granular=False) == {300: "turn", 500: "prompt"}


def test_without_turns_a_multiple_of_pages_is_remembered_where_a_model_cannot_start_anywhere() -> None:
    settings = PrefixSettings(min_tokens=64, checkpoint_pages=2)
    assert find_checkpoints(350, [], settings, block_granular=False) == {256: "pages", 350: "prompt"}
    assert find_checkpoints(400, [], settings, block_granular=False) == {384: "pages"}
    assert find_checkpoints(256, [], settings, block_granular=False) == {128: "pages", 256: "prompt"}
    assert find_checkpoints(400, [], settings, block_granular=True) == {400: "prompt"}
    assert find_checkpoints(400, [], replace(settings, checkpoint_pages=0), block_granular=False) == {400: "prompt"}
    assert find_checkpoints(63, [50], settings, block_granular=False) == {}


@pytest.mark.parametrize("spaces", [HYBRID, FULL])
@pytest.mark.parametrize("chunk", [64, 100])
def test_cache_off_cold_and_warm_make_equal_slices(spaces: frozenset[Space], chunk: int) -> None:
    """Behind the place where the warm one starts, slice for slice."""
    one = request("a", range(700), n=3, turn_boundaries=(150, 400, 590, 690))
    base = warm(spaces=spaces, prefill_chunk=chunk, max_step_tokens=1024)
    off = slices(run_one(Scheduler(replace(base, prefix=replace(ON, max_slots=0))), one), "a")
    scheduler = Scheduler(base)
    cold = slices(run_one(scheduler, one), "a")
    hot = slices(run_one(scheduler, replace(one, prompt=(*one.prompt[:690], 5, 6))), "a")
    assert off == cold
    assert {stop for _, stop in cold} >= {150, 590, 690, 700}
    assert hot[0][0] == 690
    part = slices(run_one(scheduler, replace(one, prompt=(*one.prompt[:600], *[5] * 90, 6, 6))), "a")
    assert part[0][0] == 590
    assert [s for s in part if s[1] <= 690] == [s for s in cold if s[0] >= 590 and s[1] <= 690]


def run_one(scheduler: Scheduler, one: GenerationRequest) -> list[StepPlan]:
    scheduler.submit(one, 0.0)
    return run(scheduler)


# ---- what a sequence starts with


def test_a_prompt_that_goes_on_starts_behind_what_is_remembered() -> None:
    scheduler = Scheduler(warm())
    run_one(scheduler, request("a", range(100), n=1, turn_boundaries=(80,)))
    penalised = Sampling(presence_penalty=1.0)
    one = request("b", [*range(80), *range(500, 600)], n=1, turn_boundaries=(80,))
    [first, *rest] = run_one(scheduler, replace(one, sampling=penalised))
    slot = scheduler.reuse.index.find(range(80), 80)
    assert slot is not None
    opened, copied, shared, fresh, page = first.step.operations[-5:]
    assert opened == OpenSequence(0, copied.target, penalised, list(range(80)))
    assert copied == CopyState(slot.state, copied.target)
    assert shared == SetPages(0, Space.FULL, 0, slot.pages(Space.FULL)[:1])
    assert fresh == SetPages(0, Space.FULL, 1, [page.target])
    assert page == CopyPage(Space.FULL, slot.pages(Space.FULL)[1], page.target, 16)
    assert page.target != page.source
    assert slices([first, *rest], "b") == [(80, 128), (128, 180)]


def test_a_slot_at_the_end_of_a_page_is_shared_without_a_copy() -> None:
    scheduler = Scheduler(warm(spaces=FULL))
    run_one(scheduler, request("a", range(128), n=1))
    one = request("b", [*range(128), 1, 2], n=1)
    [plan] = run_one(scheduler, one)
    closed, opened, shared, fresh = plan.step.operations
    assert isinstance(closed, CloseSequence)
    assert opened == OpenSequence(0, -1, one.sampling)  # nothing is penalised: the tail needs no history
    assert shared.pages == [0, 1]
    assert fresh.first == 2


def test_an_attention_model_reuses_any_page_and_a_hybrid_only_checkpoints() -> None:
    for spaces, start in ((FULL, 192), (HYBRID, 0)):
        scheduler = Scheduler(warm(spaces=spaces, prefix=replace(ON, checkpoint_pages=0)))
        run_one(scheduler, request("a", range(300), n=1))
        plans = run_one(scheduler, request("b", [*range(200), 9, 9, 9], n=1))
        assert slices(plans, "b")[0][0] == start


def test_an_equal_prompt_computes_at_least_its_last_token() -> None:
    scheduler = Scheduler(warm(spaces=FULL))
    one = request("a", range(128), n=1)
    run_one(scheduler, one)
    assert slices(run_one(scheduler, one), "a") == [(64, 128)]


def test_where_prompts_part_a_checkpoint_is_left_for_the_next_one() -> None:
    """At the last border that the prompts have in common anyway: no border is made for it."""
    scheduler = Scheduler(warm(prefix=replace(ON, checkpoint_pages=4)))
    prompts = [[*range(250), *[tail] * 60] for tail in (1, 2, 3)]
    starts = [slices(run_one(scheduler, request(f"r{i}", p, n=1)), f"r{i}") for i, p in enumerate(prompts)]
    assert [found[0][0] for found in starts] == [0, 0, 192]
    assert starts[0] == starts[1]
    assert starts[2] == [s for s in starts[0] if s[0] >= 192]


def test_the_answer_is_remembered_for_the_next_turn() -> None:
    scheduler = Scheduler(warm())
    run_one(scheduler, request("a", range(70), n=30))
    slot = scheduler.reuse.index.find([*range(70), *[7] * 29], 99)
    assert slot is not None  # the last token was drawn and not computed
    assert slot.origin == "generation"
    plans = run_one(scheduler, request("b", [*range(70), *[7] * 30, 1, 2], n=1))
    assert slices(plans, "b") == [(99, 102)]


def test_the_states_of_an_ended_sequence_become_the_slot_without_a_copy() -> None:
    scheduler = Scheduler(warm(max_sequences=1, max_step_tokens=65, pools=PoolSizes(8, 0, 1)))
    plans = run_one(scheduler, request("a", range(70), n=3))
    assert not any(isinstance(o, CopyState) for plan in plans for o in plan.step.operations)
    assert scheduler.pools.use()[Space.RECURRENT] == PageUse(1, 1, evictable=1)
    # the only state there is: the next request takes it back
    plans = run_one(scheduler, request("b", range(200, 210), n=1))
    assert any(isinstance(o, ZeroState) for o in plans[0].step.operations)
    assert scheduler.reuse.index.slots == []


IN_HOST = PoolSizes(64, 64, 2 + 3, 3)
"""States 0 and 1 on the devices, 2 to 4 in host memory."""


def copies(plans: Sequence[StepPlan]) -> list[tuple[int, int]]:
    return [(o.source, o.target) for plan in plans for o in plan.step.operations if isinstance(o, CopyState)]


def test_the_end_of_a_request_is_copied_to_host_memory_before_its_state_goes_to_another() -> None:
    scheduler = Scheduler(warm(max_sequences=1, max_step_tokens=65, pools=PoolSizes(64, 0, 1 + 3, 3)))
    plans = run_one(scheduler, request("a", range(70), n=3))
    assert copies(plans) == [(0, 1)]  # behind the prompt
    assert scheduler.pools.use()[Space.RECURRENT] == PageUse(2, 4, evictable=2)  # another behind the answer
    [first, *rest] = run_one(scheduler, request("b", [*range(70), 7, 7, 3], n=1))
    names = [type(o).__name__ for o in first.step.operations]
    assert names.index("CopyState") < names.index("CloseSequence") < names.index("OpenSequence")
    assert copies([first]) == [(0, 2), (2, 0)]  # the end of a, from which b starts
    assert slices([first, *rest], "b")[0] == (72, 73)
    assert scheduler.reuse.counts.tokens["memory"] == 72


def test_a_request_never_costs_a_slot_whose_state_it_cannot_have() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=IN_HOST))
    for first in (0, 1000, 2000):
        run_one(scheduler, request(f"r{first}", range(first, first + 64), n=1))
    index = scheduler.reuse.index
    assert [slot.state for slot in index.slots] == [2, 3, 4]
    needs = {Space.RECURRENT: 3}
    assert not index.can_reclaim(needs, {})
    assert not index.reclaim(needs)
    assert index.can_reclaim({Space.RECURRENT: 2}, {})
    assert len(index.slots) == 3
    reservation = index.reserve(200)  # a prefix from disk takes the place of one
    assert reservation is not None
    assert reservation.state in (2, 3, 4)
    assert len(index.slots) == 2


def test_states_in_host_memory_are_taken_from_slots_that_are_worth_less() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=IN_HOST))
    for first in (0, 1000, 2000):
        run_one(scheduler, request(f"r{first}", range(first, first + 100), n=1))
    run_one(scheduler, request("long", range(3000, 3200), n=1))
    slots = scheduler.reuse.index.slots
    assert sorted(slot.n_tokens for slot in slots) == [64, 64, 192]  # its 8 tokens behind that are worth too little
    assert {slot.state for slot in slots} == {2, 3, 4}
    assert scheduler.reuse.index.n_evictions > 0


def test_rows_that_shall_come_back_are_computed_whatever_is_remembered() -> None:
    scheduler = Scheduler(warm())
    run_one(scheduler, request("a", range(128), n=1))
    before = scheduler.reuse.index.slots
    scheduler.submit(request("rows", range(128), n=1), 0.0, WantedRows(hidden=False, rows=64))
    assert slices(run(scheduler), "rows") == [(0, 64), (64, 128)]
    assert scheduler.reuse.index.slots == before
    assert scheduler.reuse.counts.n_prompts == 1


# ---- sharing in memory


def test_200_sequences_of_one_prefix_need_one_prefix_and_200_tails() -> None:
    n, prefix = 200, list(range(2000))
    bounds = warm(
        max_sequences=n, prefill_chunk=512, max_step_tokens=1024, max_context=4096, pools=PoolSizes(12_000, 0, n + 4)
    )
    scheduler = Scheduler(bounds)
    for i in range(n):
        prompt = [*prefix, 3000 + i, *range(10)]
        scheduler.submit(request(f"r{i}", prompt, n=100, turn_boundaries=(2000,)), 0.0)
    n_computed, decoding = 0, set()
    while len(decoding) < n:
        plan = scheduler.next_plan(0.0)
        assert plan is not None
        n_computed += plan.step.n_tokens
        drawn = [Sampled(s.sequence, 7) for s in plan.step.slices if s.sample]
        decoding |= {name for name, _ in scheduler.apply(StepResult(plan.step.step_id, 0, drawn), 0.0)}
    assert scheduler.n_running == n
    # 31 whole pages for all; 16 tokens of the prefix, 11 of the tail and what was generated lie in a page of each one's
    # own: the first one's holds the 16 for the slot as well
    assert scheduler.pools.use()[Space.FULL].used == 2000 // PAGE_TOKENS + n
    assert n_computed == 2000 + n * 11 + scheduler.n_generated_tokens - n


def test_prompts_that_begin_alike_wait_for_the_first_and_compute_nothing_twice() -> None:
    scheduler = Scheduler(warm(max_sequences=4), n_stages=2)
    for i in range(4):
        scheduler.submit(request(f"r{i}", [*range(300), i], n=1, turn_boundaries=(300,)), 0.0)
    scheduler.submit(request("other", range(900, 910), n=1), 0.0)
    plans = run(scheduler)
    assert plans[0].request_ids == ("other",)  # nobody else is kept waiting
    assert [slices(plans, f"r{i}")[0][0] for i in range(4)] == [0, 300, 300, 300]
    assert sum(plan.step.n_tokens for plan in plans) == 300 + 4 + 10


def test_those_that_waited_go_on_when_the_first_is_cancelled() -> None:
    scheduler = Scheduler(warm(prefill_chunk=64, max_step_tokens=128))
    for name in "ab":
        scheduler.submit(request(name, [*range(300), ord(name)], n=1, turn_boundaries=(300,)), 0.0)
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    assert plan.request_ids == ("a",)
    scheduler.cancel("a", 0.0)
    following = scheduler.next_plan(0.0)
    assert following is not None
    assert following.request_ids == ("b",)
    assert following.step.slices[0].start == 64  # what the cancelled one had planned is not lost
    scheduler.apply(StepResult(plan.step.step_id, 0), 0.0)
    scheduler.apply(StepResult(following.step.step_id, 0), 0.0)
    run(scheduler)
    assert scheduler.idle


def test_nobody_waits_for_a_place_that_was_passed_and_not_remembered() -> None:
    scheduler = Scheduler(warm(max_sequences=2, prefix=replace(ON, max_slots=1)))
    run_one(scheduler, request("z", range(900, 1000), n=1))
    [slot] = scheduler.reuse.index.slots
    scheduler.reuse.index.pin(slot)  # so no other is kept
    for name in "ab":
        scheduler.submit(
            request(name, [*range(150), *range(ord(name), 700 + ord(name))], n=1, turn_boundaries=(150,)), 0.0
        )
    plans = []
    while "b" not in (plans[-1].request_ids if plans else ()):
        plan = scheduler.next_plan(0.0)
        assert plan is not None
        plans.append(plan)
        scheduler.apply(StepResult(plan.step.step_id, 0), 0.0)
    assert slices(plans, "a")[-1][1] < 300


def test_equal_slots_share_their_pages_when_both_were_computed() -> None:
    """Two sequences that computed the same from the start: the slots point to one copy of it."""
    scheduler = Scheduler(warm(spaces=FULL, prefix=replace(ON, min_tokens=100)))
    for name in "ab":  # too short to be waited for
        scheduler.submit(request(name, [*range(64), ord(name)], n=100), 0.0)
    run(scheduler)
    slots = scheduler.reuse.index.slots
    assert len(slots) == 2
    assert slots[0].pages(Space.FULL)[0] == slots[1].pages(Space.FULL)[0]
    assert scheduler.pools.use()[Space.FULL].used == 5


# ---- giving way


def test_slots_give_way_before_a_request_waits_or_is_preempted() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=PoolSizes(6, 0, 6)))
    for name in "ab":
        run_one(scheduler, request(name, range(1000 * ord(name), 1000 * ord(name) + 100), n=1))
    assert scheduler.pools.use()[Space.FULL] == PageUse(4, 6, evictable=4)
    run_one(scheduler, request("c", range(250), n=100))
    assert scheduler.n_preemptions == 0
    assert scheduler.pools.use()[Space.FULL].used <= 6


def test_a_lone_request_may_take_everything_even_from_what_it_started_with() -> None:
    bounds = warm(max_sequences=1, max_step_tokens=65, pools=PoolSizes(4, 0, 3))
    for n_known in (65, 100, 128, 190):
        scheduler = Scheduler(bounds)
        run_one(scheduler, request("a", range(n_known), n=1))
        plans = run_one(scheduler, request("b", [*range(n_known), *range(500, 520)], n=400))
        assert scheduler.n_preemptions == 0
        assert slices(plans, "b")[0][0] >= 64
        assert slices(plans, "b")[-1][1] == 255  # 256 positions, of which the last token is never computed


def test_a_lone_request_waits_for_pages_that_a_snapshot_holds() -> None:
    scheduler = Scheduler(warm(max_sequences=1, max_step_tokens=65, pools=PoolSizes(4, 0, 3)))
    run_one(scheduler, request("a", range(65), n=1))
    [slot] = [s for s in scheduler.reuse.index.slots if s.n_tokens == 65]
    scheduler.reuse.index.pin(slot)
    scheduler.submit(request("b", [*range(65), 5, 5], n=400), 0.0)
    n_steps = len(run(scheduler))
    assert (scheduler.n_running, scheduler.n_preemptions) == (1, 0)
    assert n_steps > 60
    scheduler.reuse.index.unpin(slot)
    assert run(scheduler)
    assert scheduler.idle


def test_lost_shards_forget_everything() -> None:
    scheduler = Scheduler(warm())
    run_one(scheduler, request("a", range(200), n=1))
    scheduler.submit(request("b", range(200), n=50), 0.0)
    scheduler.next_plan(0.0)
    scheduler.fail_all(LOST, 0.0)
    assert scheduler.reuse.index.slots == []
    assert {use.used for use in scheduler.pools.use().values()} == {0}
    assert slices(run_one(scheduler, request("c", range(200), n=1)), "c")[0][0] == 0


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
        record.tokens.append(7)
    for position, cached in ((120, 100), (64, 64), (100, 64), (0, 0)):  # never more than the prompt, the least counts
        scheduler.reuse.started(record, PrefixMatch(position), 0.0)
        assert record.finished_event("length", 1.0, None, None).usage == Usage(100, cached, 30)


# ---- to disk and back: what moves the bytes is played by hand


def read(stage: ToyStage, place: object) -> dict[str, object]:
    """What Save would write of a stage."""
    pages = {Space.FULL: place.full, Space.WINDOW: place.window}  # type: ignore[attr-defined]
    state = place.state  # type: ignore[attr-defined]
    return {
        "pages": {space: [list(stage.pages[space][p]) for p in ids] for space, ids in pages.items()},
        "state": stage.states[state] if state >= 0 else None,
    }


@pytest.mark.parametrize("spaces", [FULL, HYBRID, ALL_SPACES])
async def test_a_slot_goes_to_disk_and_back_after_the_shards_lost_it(spaces: frozenset[Space]) -> None:
    bounds = warm(
        spaces=spaces,
        pools=PoolSizes(24, 24 if Space.WINDOW in spaces else 0, 8),
        window_tokens=100 if Space.WINDOW in spaces else None,
    )
    toy = ToyEngine(bounds, n_stages=2)
    toy.attach()
    first = toy.engine.submit(request("a", range(150), n=1, turn_boundaries=(140,)))
    await toy.play()
    assert first.finished is not None
    [slot] = [s for s in toy.engine.prefixes.slots if s.n_tokens == 140]
    exporting = asyncio.ensure_future(toy.engine.export(slot))
    await asyncio.sleep(0)
    assert not exporting.done() or spaces == FULL  # the checkpoint is copied by a step that is still to come
    await toy.play()
    place = await exporting
    assert place is not None
    tokens = slot.tokens
    stages = {index: stage for d in toy.daemons for index, stage in d.stages.items()}
    saved = {index: read(stage, place) for index, stage in stages.items()}
    assert not toy.engine.prefixes.drop(slot)
    toy.engine.release(slot)

    toy.lose()
    toy.attach()
    assert toy.engine.prefixes.slots == []
    busy = toy.engine.submit(request("busy", range(300, 330), n=9))
    reserving = asyncio.ensure_future(toy.engine.reserve(140))
    await toy.play()
    reservation = await reserving
    assert reservation is not None
    for d in toy.daemons:
        for index, stage in d.stages.items():
            for space, pages in saved[index]["pages"].items():  # type: ignore[attr-defined]
                for i, page in enumerate(pages, place.first_window if space is Space.WINDOW else 0):
                    [target] = reservation.entries(space, i, i + 1)
                    stage.pages[space][target] = list(page)
            if reservation.state >= 0:
                stage.states[reservation.state] = saved[index]["state"]
    restored = toy.engine.adopt(tokens, reservation)
    assert restored is not None
    assert restored.origin == "disk"
    assert restored.pins == 1
    toy.engine.release(restored)
    assert toy.engine.adopt(tokens, reservation) is None  # once
    one = request("b", [*range(140), 5, 5, 5], n=20)
    again = toy.engine.submit(one)
    await toy.play()
    ids, finished = told(await events_of(again))
    assert ids == toy.alone(one)
    assert finished.usage.cached_tokens == 140
    assert toy.engine.statistics().cache.tokens == {"memory": 0, "disk": 140}
    assert busy.finished is not None
    third = toy.engine.submit(replace(one, request_id="c"))
    await toy.play()
    assert third.finished is not None
    assert toy.engine.statistics().cache.tokens == {"memory": 140, "disk": 140}


async def test_a_held_request_waits_for_what_is_restored_and_others_pass() -> None:
    toy = ToyEngine(warm())
    toy.attach()
    toy.engine.on_submit = lambda asked: asked.request_id in ("a", "c")
    held = toy.engine.submit(request("a", range(150), n=1))
    cancelled = toy.engine.submit(request("c", range(150), n=1))
    other = toy.engine.submit(request("b", range(500, 510), n=1))
    await toy.play()
    assert other.finished is not None
    assert held.finished is None
    cancelled.cancel()
    toy.engine.resume("c")  # over already
    toy.engine.resume("a")
    await toy.play()
    ids, _ = told(await events_of(held))
    assert ids == toy.alone(request("a", range(150), n=1))


async def test_an_export_ends_when_the_pipeline_breaks_and_holds_nothing() -> None:
    toy = ToyEngine(warm(), n_stages=2)
    toy.attach()
    toy.engine.submit(request("a", range(150), n=5, turn_boundaries=(140,)))
    while not toy.engine.prefixes.slots:
        toy.work(0)
    [slot] = toy.engine.prefixes.slots[:1]
    exporting = asyncio.ensure_future(toy.engine.export(slot))
    reserving = asyncio.ensure_future(toy.engine.reserve(100))
    await asyncio.sleep(0)
    toy.lose()
    assert await exporting is None
    assert await reserving is None
    toy.attach()
    assert {use.used for use in toy.engine.statistics().pages.values()} == {0}


async def test_a_slot_pinned_while_it_is_given_up_goes_afterwards() -> None:
    toy = ToyEngine(warm(prefix=replace(ON, max_slots=1)))
    toy.attach()
    evicted: list[PrefixSlot] = []

    def save(slot: PrefixSlot) -> None:
        evicted.append(slot)
        if slot is old:
            toy.engine.prefixes.pin(slot)

    toy.engine.submit(request("a", range(100), n=1))
    toy.run()
    [old] = toy.engine.prefixes.slots
    toy.engine.prefixes.hooks.on_evict = save
    toy.engine.submit(request("b", range(500, 600), n=1))
    toy.run()
    assert evicted[0] is old
    assert toy.engine.prefixes.slots == [old]
    toy.engine.release(old)
    assert toy.engine.prefixes.slots == []
