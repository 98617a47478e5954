"""Where sequences start, what they share, who waits, who gives way: the scheduler with prefix slots."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lucevisor.engine.prefix_reuse import find_checkpoints
from lucevisor.engine.request import PromptImage, Usage
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.spec_decode.ngram import NgramLookup
from lucevisor.kv.page_pool import PageUse
from lucevisor.kv.prefix_cache import PrefixMatch, PrefixSettings
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.model.vision import IMAGE_ID
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    ImageSpan,
    OpenSequence,
    Sampled,
    StepResult,
)
from tests.engine.scheduler_steps import FULL, ON, answer, plans, run, run_one, shape, slices, warm
from tests.engine.toy_engine import HYBRID, attached, events_of, request, told

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


@pytest.mark.parametrize("kv_groups", [HYBRID, FULL])
@pytest.mark.parametrize("chunk", [64, 100])
def test_cache_off_cold_and_warm_make_equal_slices(kv_groups: frozenset[KvGroup], chunk: int) -> None:
    """Behind the place where the warm one starts, slice for slice."""
    one = request("a", range(700), n=3, turn_boundaries=(150, 400, 590, 690))
    base = warm(kv_groups=kv_groups, prefill_chunk=chunk, max_step_tokens=1024)
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


# ---- what a sequence starts with


def test_an_attention_model_reuses_any_page_and_a_hybrid_only_checkpoints() -> None:
    for kv_groups, start in ((FULL, 192), (HYBRID, 0)):
        scheduler = Scheduler(warm(kv_groups=kv_groups, prefix=replace(ON, checkpoint_pages=0)))
        run_one(scheduler, request("a", range(300), n=1))
        plans = run_one(scheduler, request("b", [*range(200), 9, 9, 9], n=1))
        assert slices(plans, "b")[0][0] == start


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
    slot = scheduler.reuse.index.find_slot([*range(70), *[7] * 29], 99)
    assert slot is not None  # the last token was drawn and not computed
    assert slot.origin == "generation"
    plans = run_one(scheduler, request("b", [*range(70), *[7] * 30, 1, 2], n=1))
    assert slices(plans, "b") == [(99, 102)]


IN_HOST = PoolSizes(64, 64, 2 + 3, 3)
"""States 0 and 1 on the devices, 2 to 4 in host memory."""


def test_a_request_never_costs_a_slot_whose_state_it_cannot_have() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=IN_HOST))
    for first in (0, 1000, 2000):
        run_one(scheduler, request(f"r{first}", range(first, first + 64), n=1))
    index = scheduler.reuse.index
    assert [slot.state for slot in index.slots] == [2, 3, 4]
    needs = {KvGroup.RECURRENT: 3}
    assert not index.can_reclaim(needs, {})
    assert not index.reclaim(needs)
    assert index.can_reclaim({KvGroup.RECURRENT: 2}, {})
    assert len(index.slots) == 3
    reservation = index.reserve(200)  # a prefix from disk takes the place of one
    assert reservation is not None
    assert reservation.state in (2, 3, 4)
    assert len(index.slots) == 2


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
    assert scheduler.pools.usage()[KvGroup.FULL].used == 2000 // PAGE_TOKENS + n
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


def test_equal_slots_share_their_pages_when_both_were_computed() -> None:
    """Two sequences that computed the same from the start: the slots point to one copy of it."""
    scheduler = Scheduler(warm(kv_groups=FULL, prefix=replace(ON, min_tokens=100)))
    for name in "ab":  # too short to be waited for
        scheduler.submit(request(name, [*range(64), ord(name)], n=100), 0.0)
    run(scheduler)
    slots = scheduler.reuse.index.slots
    assert len(slots) == 2
    assert slots[0].pages(KvGroup.FULL)[0] == slots[1].pages(KvGroup.FULL)[0]
    assert scheduler.pools.usage()[KvGroup.FULL].used == 5


def test_slots_of_a_request_whose_logits_are_no_numbers_are_dropped() -> None:
    scheduler = Scheduler(warm(kv_groups=FULL))
    run_one(scheduler, request("other", [90, *range(200)], n=2))
    kept = {slot.n_tokens for slot in scheduler.reuse.index.slots}
    scheduler.submit(request("bad", range(200), n=9), 0.0)
    ended = []
    while not ended:
        plan = scheduler.next_plan(0.0)
        assert plan is not None
        drawn = [Sampled(s.sequence, 7) for s in plan.step.slices if s.sample]
        invalid = [one.sequence for one in drawn]
        ended = scheduler.apply(StepResult(plan.step.step_id, 0, drawn, invalid=invalid), 0.0, "stage 0")
    assert [event.error.code for _, event in ended] == ["invalid_logits"]  # type: ignore[union-attr]
    assert {slot.n_tokens for slot in scheduler.reuse.index.slots} == kept
    assert scheduler.idle


# ---- what gives way when pages are short


def test_slots_give_way_before_a_request_waits_or_is_preempted() -> None:
    scheduler = Scheduler(warm(max_sequences=2, pools=PoolSizes(6, 0, 6)))
    for name in "ab":
        run_one(scheduler, request(name, range(1000 * ord(name), 1000 * ord(name) + 100), n=1))
    assert scheduler.pools.usage()[KvGroup.FULL] == PageUse(4, 6, evictable=4)
    run_one(scheduler, request("c", range(250), n=100))
    assert scheduler.admission.n_preempted == 0
    assert scheduler.pools.usage()[KvGroup.FULL].used <= 6


def test_what_a_preempted_request_had_computed_after_all_was_not_cached() -> None:
    scheduler = Scheduler(warm())
    record = RequestRecord(request("a", range(100), n=50), 0, 50, 0.0)
    for _ in range(30):
        record.append(Sampled(0, 7))
    for position, cached in ((120, 100), (64, 64), (100, 64), (0, 0)):  # never more than the prompt, the least counts
        scheduler.reuse.on_started(record, PrefixMatch(position), 0.0)
        assert record.finished_event("length", 1.0, None, None).usage == Usage(100, cached, 30)


async def test_a_request_that_starts_from_the_slot_of_a_preempted_one_leaves_it() -> None:
    toy = attached(warm())
    prompt = list(range(150))
    toy.engine.submit(request("a", prompt, n=1))
    await toy.play()
    [slot] = [slot for slot in toy.engine.prefixes.slots if slot.n_tokens == 150]
    slot.origin = "preempted"
    handle = toy.engine.submit(request("b", [*prompt, 5, 5], n=1))
    await toy.play()
    _, finished = told(await events_of(handle))
    assert finished.usage.cached_tokens == 150
    assert slot.alive


# ---- prefix slots on disk; the test moves the bytes by hand


async def test_a_held_request_waits_for_what_is_restored_and_others_pass() -> None:
    toy = attached(warm())
    toy.engine.prefixes.hooks.fetch = lambda request_id, tokens, n_cached: request_id in ("a", "c")
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
    toy = attached(warm(), n_stages=2)
    toy.engine.submit(request("a", range(150), n=5, turn_boundaries=(140,)))
    while not toy.engine.prefixes.slots:
        toy.work(0)
    [slot] = toy.engine.prefixes.slots[:1]
    exporting = asyncio.ensure_future(toy.engine.slots.export(slot))
    reserving = asyncio.ensure_future(toy.engine.slots.reserve(100))
    await asyncio.sleep(0)
    toy.lose()
    assert await exporting is None
    assert await reserving is None
    toy.attach()
    assert {use.used for use in toy.engine.statistics().pages.values()} == {0}


async def test_a_slot_pinned_while_it_is_given_up_goes_afterwards() -> None:
    toy = attached(warm(prefix=replace(ON, max_slots=1)))
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
    toy.engine.slots.release(old)
    assert toy.engine.prefixes.slots == []


# ---- tokens with any slots and any memory


# ---- images


def image(start: int, ids: list[int]) -> tuple[PromptImage, list[int]]:
    """An image of 8 x 8 tokens, with the rows 0 to 63 of a byte each."""
    return PromptImage(ImageSpan(start, 8, 8), memoryview(bytes(range(64))), 1), ids


def test_an_image_is_reused_whole_or_not_at_all() -> None:
    """Also where the first ids of another one are the same."""
    text, ids = [*range(100)], [IMAGE_ID + i for i in range(64)]
    for kv_groups, start in ((FULL, 64), (HYBRID, 0)):
        scheduler = Scheduler(warm(kv_groups=kv_groups, prefix=replace(ON, checkpoint_pages=1), prefill_chunk=64))
        placed, _ = image(100, ids)
        first = request("a", [*text, *ids, *range(60)], n=1, images=(placed,))
        run_one(scheduler, first)
        again = run_one(scheduler, replace(first, request_id="b", prompt=(*first.prompt, 7)))
        assert slices(again, "b")[0][0] >= 192
        other = [*ids[:40], *(i + 64 for i in ids[40:])]
        plans = run_one(scheduler, request("c", [*text, *other, *range(60)], n=1, images=(placed,)))
        assert slices(plans, "c")[0][0] == start


def test_a_prompt_that_is_cut_keeps_its_adapter() -> None:
    """One with log-probabilities from a position on, and one with an image that begins like another."""
    text, ids = [*range(100)], [IMAGE_ID + i for i in range(64)]
    placed, _ = image(100, ids)
    first = request("a", [*text, *ids, *range(60)], n=1, images=(placed,))
    scored = replace(first, request_id="b", prompt_logprobs_from=200)
    other = replace(first, request_id="c", prompt=[*text, *ids[:40], *(i + 64 for i in ids[40:]), *range(60)])
    for adapter, starts in (("", (192, 64)), ("sql", (0, 0))):
        scheduler = Scheduler(warm(kv_groups=FULL, prefix=replace(ON, checkpoint_pages=1), prefill_chunk=64))
        run_one(scheduler, first)
        for one, start in zip((scored, other), starts, strict=True):
            plans = run_one(scheduler, replace(one, prompt=TokenBuffer(one.prompt, adapter), publishes=False))
            assert slices(plans, one.request_id)[0][0] == start


def test_steps_carry_the_rows_of_their_images() -> None:
    scheduler = Scheduler(warm(kv_groups=HYBRID, prefill_chunk=64))
    ids = [IMAGE_ID + i for i in range(64)]
    placed, _ = image(100, ids)
    plans = run_one(scheduler, request("a", [*range(100), *ids, *range(60)], n=3, images=(placed,)))
    rows = [b"".join(map(bytes, part)) for plan in plans for part in plan.embeddings.values()]
    assert b"".join(rows) == bytes(range(64))
    assert len(rows) == 2
    opened = [one for plan in plans for one in plan.step.operations if isinstance(one, OpenSequence)]
    assert opened[0].images == (ImageSpan(100, 8, 8),)


@pytest.mark.parametrize("chunk", [64, 80, 128])
def test_images_are_not_cut_where_their_tokens_see_each_other(chunk: int) -> None:
    """Two that touch, and one at a place of its own; two requests at once, and what one reuses."""
    scheduler = Scheduler(warm(kv_groups=FULL, prefix=ON, prefill_chunk=chunk, max_step_tokens=192, whole_images=True))
    ids = [IMAGE_ID + i for i in range(192)]
    text = [*range(40), *ids[:128], *range(50), *ids[128:], *range(30)]
    starts = 40, 104, 218
    placed = tuple(image(start, [])[0] for start in starts)
    for name in "ab":
        scheduler.submit(request(name, prompt=(text if name == "a" else [9, *text[1:]]), n=1, images=placed), 0.0)
    found: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    while any(found_ := plans(scheduler)):
        for plan in found_:
            for name, start, n, _ in shape(plan):
                found[name].append((start, start + n))
            scheduler.apply(answer(plan), 0.0)
    for spans in found.values():
        assert [spans[0][0], spans[-1][1]] == [0, len(text)]
        assert not [s for s in starts for span in spans for end in span if s < end < s + 64]
    again = run_one(scheduler, request("c", [*text, 7], n=1, images=placed))
    assert slices(again, "c")[0][0] >= 272


def test_looked_up_drafts_end_before_an_image() -> None:
    tokens = TokenBuffer([1, 2, 3, 4, 5, IMAGE_ID, IMAGE_ID + 1, 6, 7, 1, 2, 3])
    lookup = NgramLookup(tokens)
    lookup.index()
    match = lookup.match()
    assert match is not None
    assert lookup.continuation(match, 8) == [4, 5]
