"""Drafts and what they may take: the drafter's coming and going, pages, states, regions, micro-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lucevisor.engine import validation
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import LiveSequence
from lucevisor.engine.spec_decode.controller import ACTIVE_STEPS, DrafterSuspension, RequestDrafts, SpecDecodeController
from lucevisor.engine.spec_decode.ngram import (
    INDEX_TOKENS,
    MAX_CANDIDATES,
    MAX_MATCH,
    MIN_MATCH,
    NgramLookup,
    NgramMatch,
)
from lucevisor.engine.step import StepPlan, WrongResult
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import CloseSequence, Drafted, OpenSequence, Sampled, StepResult
from tests.costs import lines_of
from tests.engine.scheduler_steps import plans
from tests.engine.toy_engine import HYBRID, attached, events_of, limits, request, told

FULL = frozenset({KvGroup.FULL})


def speculating(max_drafts: int = 4, *, lookup: bool = False, **changes: object) -> EngineLimits:
    settings = SpeculationSettings(max_drafts=max_drafts, drafter=True, lookup=lookup, fixed=True)
    usual = {"kv_groups": FULL, "pools": PoolSizes(16, 0, 0), "speculation": settings, "max_step_tokens": 128}
    return limits(**{**usual, **changes})


class Bench:
    """A scheduler with a drafter, answered by hand.  All drawn tokens are 7."""

    def __init__(self, bounds: EngineLimits, n_stages: int = 1, *, with_output: bool = True) -> None:
        self.scheduler = Scheduler(bounds, n_stages)
        self.scheduler.attach_drafter(with_output=with_output)

    def submit(self, *names: str, n: int = 50, n_prompt: int = 3) -> None:
        for name in names:
            self.scheduler.submit(request(name, [sum(name.encode()), *range(n_prompt - 1)], n), 0.0)

    def plan(self) -> StepPlan:
        plan = self.scheduler.next_plan(0.0)
        assert plan is not None
        return plan

    def answer(self, plan: StepPlan, n_accepted: int = 0, seconds: float = 0.0, *, cold: bool = False) -> None:
        """The output stage's result, with so many drafts of each slice accepted."""
        sampled = []
        for piece in plan.step.slices:
            sure = len(piece.tokens) - piece.n_drafts
            drawn = [*piece.tokens[sure:][:n_accepted], 7] if piece.sample else []
            sampled += [Sampled(piece.sequence, token) for token in drawn]
        result = StepResult(plan.step.step_id, self.scheduler.n_stages - 1, sampled, compute_s=seconds, cold=cold)
        self.scheduler.apply(result, 0.0)
        validation.check(self.scheduler)

    def draft(self, plan: StepPlan, token: int = 9, n: int = 99, seconds: float = 0.0, *, cold: bool = False) -> bool:
        """The draft stage's result: the same token again and again; whether a step may have become possible."""
        drafts = [
            Drafted(s.sequence, [token] * min(n, s.num_draft_tokens)) for s in plan.step.slices if s.num_draft_tokens
        ]
        result = StepResult(plan.step.step_id, self.scheduler.n_stages, drafts=drafts, compute_s=seconds, cold=cold)
        possible = self.scheduler.drafting.on_drafts(result)
        validation.check(self.scheduler)
        return possible

    def live(self, name: str) -> LiveSequence:
        record = next(r for r in self.scheduler.running if r.request.request_id == name)
        assert record.live is not None
        return record.live


# ---- the drafter comes and goes


# ---- drafts that are verified before they are known


def test_a_prompt_does_not_wait_at_the_first_stage_for_the_drafts_of_others() -> None:
    bench = Bench(speculating(pools=PoolSizes(40, 0, 0)), 2)
    bench.scheduler.attach(2, has_doorbells=True)
    bench.submit("a")
    first = bench.plan()
    bench.answer(first)
    bench.submit("b", n_prompt=300)
    following = plans(bench.scheduler)
    assert [[s.sequence for s in plan.step.slices] for plan in following[:1]] == [[1]]
    assert not any(plan.step.drafts_of for plan in following)


def test_an_unused_drafter_is_suspended_without_sequences_and_resumed_like_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(speculating(max_context=2_048, pools=PoolSizes(40, 0, 0)))
    drafting = bench.scheduler.drafting
    monkeypatch.setattr(SpecDecodeController, "num_draft_tokens", lambda *_: 0)
    monkeypatch.setattr(SpecDecodeController, "no_drafts", "it does not pay")
    bench.submit("a", n=2_000)

    def decode(n: int) -> list[StepPlan]:
        found = []
        for _ in range(n):
            found.append(bench.plan())
            bench.answer(found[-1])
            if drafting.outstanding:
                bench.draft(found[-1])
        return found

    before = decode(ACTIVE_STEPS + 1)
    assert all(plan.draft_operations is None for plan in before)
    [closing] = decode(1)
    assert (closing.step.slices, closing.draft_operations) == ([], [*closing.step.operations, CloseSequence(0)])
    assert (drafting.suspended, drafting.attached, bench.scheduler.pools[KvGroup.FULL].epoch) == (True, True, 0)
    assert not drafting.outstanding
    suspended = decode(2 * ACTIVE_STEPS)
    assert all(plan.draft_operations is None and not drafting.outstanding for plan in suspended)
    [opening] = decode(1)
    live = bench.live("a")
    assert opening.draft_operations is not None
    assert opening.draft_operations[0] == OpenSequence(0, live.state, request("a").sampling, n_prompt=3)
    assert not drafting.suspended
    assert bench.plan().step.slices[0].draft_from > live.n_computed  # of what was computed before it has nothing


def test_suspensions_double_while_the_drafter_is_resumed_in_vain() -> None:
    suspension, stretches, n = DrafterSuspension(), [], 0
    while len(stretches) < 18:
        suspension.record_step()
        n += 1
        if suspension.is_due(idle=False):
            suspension.toggle()
            stretches.append(n)
            n = 0
    assert stretches[::2] == [ACTIVE_STEPS] * 9
    assert stretches[1::2] == [256, 512, 1024, 2048, 4096, 8192, 8192, 8192, 8192]
    suspension.record_use()
    assert not suspension.is_due(idle=True)
    for _ in range(ACTIVE_STEPS):
        suspension.record_step()
    suspension.toggle()
    assert not suspension.is_due(idle=False)
    assert suspension.is_due(idle=True), "it was used, so the next request that comes alone resumes it"
    suspension.toggle()
    suspension.toggle()
    assert not suspension.is_due(idle=True), "the one before resumed it in vain"


# ---- what the draft stage answers


# ---- pages and states


def test_drafts_are_cut_to_the_pages_there_are() -> None:
    bench = Bench(speculating(pools=PoolSizes(3, 0, 0)))
    bench.submit("a", "b", n_prompt=61)
    both = plans(bench.scheduler)
    # the third page is for a's 65th position and on
    assert [s.num_draft_tokens for plan in both for s in plan.step.slices] == [4, 2]
    for plan in both:
        bench.answer(plan)
        bench.draft(plan)
    assert [(s.n_drafts, s.num_draft_tokens) for s in bench.plan().step.slices] == [(4, 4), (2, 0)]
    assert bench.scheduler.admission.n_preempted == 0


def test_a_request_that_needs_a_page_gets_one_that_is_kept_for_drafts_before_any_is_preempted() -> None:
    bench = Bench(speculating(2, pools=PoolSizes(3, 0, 0)))
    bench.submit("a", n_prompt=62)
    bench.submit("b", n_prompt=63)
    for _ in range(2):
        for plan in plans(bench.scheduler):
            bench.answer(plan)
            bench.draft(plan, n=0)
    assert [len(bench.live(name).table.held(KvGroup.FULL)) for name in "ab"] == [2, 1]
    assert [s.start for s in bench.plan().step.slices] == [63, 64]
    assert [len(bench.live(name).table.held(KvGroup.FULL)) for name in "ab"] == [1, 2]
    assert bench.scheduler.admission.n_preempted == 0


# ---- epochs


def test_restored_pages_have_the_drafters_state_only_if_the_file_had_it() -> None:
    cached = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1)
    for drafted, expected in ((False, 64), (True, 0)):
        bench = Bench(speculating(prefix=cached))
        index = bench.scheduler.reuse.index
        reservation = index.reserve(64)
        assert reservation is not None
        slot = index.adopt([1, *range(63)], reservation, 0.0, drafted=drafted)
        assert slot is not None
        bench.scheduler.submit(request("a", [1, *range(70)], 5), 0.0)
        [piece] = bench.plan().step.slices
        assert (piece.start, piece.draft_from) == (64, expected)


# ---- order and overlap


def test_drafting_of_one_micro_batch_overlaps_the_verification_of_another() -> None:
    bench = Bench(speculating(), n_stages=2)
    bench.submit("a", "b")
    first = plans(bench.scheduler)[0]
    bench.answer(first)
    bench.draft(first)
    one, two = plans(bench.scheduler)
    assert (one.request_ids, two.request_ids) == (("a",), ("b",))
    bench.answer(one)
    bench.draft(one)
    three = bench.plan()  # a again, while b is verified
    assert three.request_ids == ("a",)
    bench.answer(two)
    bench.answer(three)  # b's drafts are being made
    assert plans(bench.scheduler) == []
    bench.draft(two)
    assert bench.plan().request_ids == ("b",)


def test_a_flush_waits_for_the_drafter() -> None:
    async def check() -> None:
        toy = attached(speculating())
        one = request("a", range(10), n=2)
        toy.texts[one.sampling.seed] = [*one.prompt, *toy.alone(one)]
        toy.attach_drafter(with_output=False)
        toy.engine.submit(one)
        synchronized = asyncio.create_task(toy.engine.slots.synchronize())
        await asyncio.sleep(0)
        target, drafter = toy.daemons
        assert toy.pipeline is not None
        toy.engine.receive(*target.run_one())
        await asyncio.sleep(0)
        assert toy.engine.core.scheduler.last_applied == 1
        assert not synchronized.done()
        toy.engine.receive(*drafter.run_one())
        assert await synchronized
        toy.run()

    asyncio.run(check())


# ---- what the policy is told


class Recorder(SpecDecodeController):
    """Asks for and verifies two drafts of every slice, and writes down what is recorded."""

    def __init__(self) -> None:
        super().__init__(4)
        self.told: list[tuple[object, ...]] = []

    def num_draft_tokens(self, drafts: RequestDrafts, n_decoding: int) -> int:
        self.told.append(("ask", n_decoding))
        return 2

    def num_verify_tokens(self, offers: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        self.told.append(("verify", [len(drafted.tokens) for _, drafted in offers], n_decoding))
        return 2

    def record_verdict(self, drafts: RequestDrafts, n_drafts: int, n_accepted: int) -> None:
        self.told.append(("verdict", n_drafts, n_accepted))

    def record_round(self, width: int, seconds: float, *, asked: bool, cold: bool = False) -> None:
        self.told.append(("round", width, seconds, asked, cold))


def adaptive_bench() -> Bench:
    bounds = speculating()
    return Bench(replace(bounds, speculation=structs.replace(bounds.speculation, fixed=False)))


def test_the_controller_is_told_verdicts_and_the_times_of_whole_rounds_of_decodes() -> None:
    bench = adaptive_bench()
    recorder = bench.scheduler.drafting.speculation = Recorder()
    bench.submit("a", "b")
    prompts = bench.plan()
    assert recorder.told == [("ask", 2)] * 2, "behind prompts all that run count as decoding"
    bench.answer(prompts)
    bench.draft(prompts)
    steps = []
    for cold in (False, True, False):
        recorder.told.clear()
        steps.append(bench.plan())
        bench.draft(steps[-2]) if len(steps) > 1 else None
        bench.answer(steps[-1], seconds=2.0, cold=cold)
    assert [s.n_drafts for s in steps[-1].step.slices] == [2, 2]
    assert [told for told in recorder.told if told[0] == "verdict"] == [("verdict", 2, 0)] * 2
    [(_, width, _, asked, cold)] = [told for told in recorder.told if told[0] == "round"]
    assert (width, asked, cold) == (2, True, False)


def test_what_followed_the_same_tokens_before_is_verified_in_place_of_the_drafters_drafts() -> None:
    bench = Bench(speculating(lookup=True))
    bench.scheduler.submit(request("a", [*range(20, 27), 7, 5, 6, 8, 1, *range(20, 27)], 20), 0.0)
    first = bench.plan()
    bench.answer(first)
    bench.draft(first, token=9)
    [piece] = bench.plan().step.slices
    assert piece.tokens == [7, 5, 6, 8, 1]


# ---- verify steps


@pytest.mark.parametrize("drawn", [[9], [5, 6], [5, 9, 6, 7]], ids=["wrong", "wrong then more", "too many"])
def test_an_accepted_draft_that_was_not_proposed_is_a_wrong_result(drawn: list[int]) -> None:
    scheduler = Scheduler(speculating())
    scheduler.attach_drafter(with_output=True)
    scheduler.submit(request("a", n=8), 0.0)
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step.step_id, 0, [Sampled(0, 4)]), 0.0)
    scheduler.drafting.on_drafts(StepResult(plan.step.step_id, 1, drafts=[Drafted(0, [5, 9])]))
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    result = StepResult(plan.step.step_id, 0, [Sampled(0, token) for token in (*drawn, 1)])
    with pytest.raises(WrongResult, match="accepted"):
        scheduler.apply(result, 0.0)
    assert scheduler.n_generated_tokens == 1


@pytest.mark.parametrize("kv_groups", [FULL, HYBRID], ids=["full", "recurrent"])
async def test_a_request_that_ends_in_the_middle_of_its_drafts_is_remembered_up_to_there(
    kv_groups: frozenset[KvGroup],
) -> None:
    """What was drafted behind the stop id is in the pages and states, and not in the slot."""
    cached = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1, checkpoint_pages=0)
    toy = attached(speculating(8, kv_groups=kv_groups, prefix=cached, pools=PoolSizes(16, 0, 8, draft_states=12)))
    toy.attach_drafter(with_output=False)
    one = request("a", range(10), n=9)
    right = toy.alone(one)
    stop = next(t for i, t in enumerate(right) if i >= 2 and t not in right[:i])
    at = right.index(stop)
    two = request("b", (*range(10), *right[: at + 1], 7, 7), n=3)
    for asked in (one, two):
        toy.texts[asked.sampling.seed] = [*asked.prompt, *toy.alone(asked)]
    toy.engine.submit(replace(one, stop_ids=frozenset({stop})))
    toy.run()
    assert [(s.start, s.n_drafts) for result in toy.steps for s in result.step.slices] == [(0, 0), (10, 7)]
    [slot] = [s for s in toy.engine.prefixes.slots if s.n_tokens > 10]
    assert list(slot.tokens) == [*range(10), *right[: at + 1]]
    handle = toy.engine.submit(two)
    toy.run()
    tokens, finished = told(await events_of(handle))
    assert tokens == toy.alone(two)
    assert finished.usage.cached_tokens == slot.n_tokens


# ---- n-grams


ALPHABET = 4
"""Ids of the naive comparison: their n-grams all have buckets of their own (asserted below)."""


def naive(tokens: Sequence[int]) -> NgramMatch | None:
    """The longest of the matches at the newest occurrences of the last tokens, by trying every position."""
    tokens, best = list(tokens), None
    n = len(tokens)
    occurrences = [s for s in range(n - 1, MIN_MATCH - 1, -1) if tokens[s - MIN_MATCH : s] == tokens[n - MIN_MATCH :]]
    for start in occurrences[:MAX_CANDIDATES]:
        length = max(m for m in range(1, min(start, MAX_MATCH) + 1) if tokens[start - m : start] == tokens[n - m :])
        if best is None or length > best.length:
            best = NgramMatch(start, length)
    return best


def indexed(tokens: Sequence[int]) -> NgramLookup:
    lookup = NgramLookup(TokenBuffer(tokens))
    while lookup.index():
        pass
    return lookup


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=120))
def test_matches_are_those_of_a_naive_search_and_drafts_repeat_what_followed(tokens: list[int]) -> None:
    lookup, match = indexed(tokens), naive(tokens)
    assert lookup.match() == match
    if match is not None:
        text = [*tokens]
        for at in range(match.start, match.start + 4):
            text.append(text[at])  # a repetition goes on behind the end
        assert lookup.continuation(match, 4) == text[len(tokens) :]


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=60), st.lists(st.integers(0, ALPHABET - 1), max_size=60))
def test_a_growing_sequence_is_indexed_as_a_whole_one(prompt: list[int], answer: list[int]) -> None:
    tokens = TokenBuffer(prompt)
    lookup = NgramLookup(tokens)
    for token in answer:
        lookup.index(7)
        tokens.append(token)
    while lookup.index(5):
        pass
    assert lookup.match() == naive(tokens)


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 50), max_size=200))
def test_a_match_is_one_whatever_the_ids(tokens: list[int]) -> None:
    """Buckets may be shared: candidates of other n-grams are no matches."""
    tokens = tokens * 2
    match = indexed(tokens).match()
    if match is None:
        assert len(tokens) <= MIN_MATCH + 1
    else:
        assert MIN_MATCH <= match.length <= MAX_MATCH
        assert tokens[match.start - match.length : match.start] == tokens[len(tokens) - match.length :]


def test_a_long_prompt_is_indexed_in_slices() -> None:
    n = 262_144
    tokens = TokenBuffer([(i * i + i // 7) % 150_000 for i in range(n)])
    lookup = NgramLookup(tokens)
    n_calls = 0
    while lookup.n_waiting:
        n_waiting = lookup.n_waiting
        assert lines_of(lookup.index) < 8 * INDEX_TOKENS  # it holds up the event loop
        assert 0 < n_waiting - lookup.n_waiting <= INDEX_TOKENS
        n_calls += 1
    assert n_calls == -(-(n - MIN_MATCH) // INDEX_TOKENS)


def test_a_text_of_one_token_costs_few_candidates() -> None:
    tokens = TokenBuffer([1] * 20_000 + [2, 1, 1, 1])
    lookup = indexed(tokens)
    assert lines_of(lookup.match) < 2_000  # a walk of the chain would take 20,000 comparisons
