"""Counts of speculation: sums of what happened, kept apart by origin, that agree with the tokens that requests got."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.request import FinishedEvent, TokenEvent
from lucevisor.engine.spec_decode.statistics import ORIGINS, DraftCounts, DraftStatistics, PrefixOrigin, StepShare
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from tests.engine.toy_engine import ToyEngine, events_of, limits, request, told


def test_acceptance_is_counted_by_position() -> None:
    counts = DraftCounts()
    for n_drafts, n_accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        counts.decoded(n_drafts, n_accepted)
    assert (counts.n_plain, counts.n_verify) == (1, 3)
    assert (counts.verified, counts.accepted) == ([3, 3, 2], [2, 1, 1])
    assert counts.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2]
    assert counts.acceptance_length == pytest.approx(1 + 4 / 3)
    assert counts.tokens_per_step == pytest.approx(1 + 4 / 4)


def test_before_anything_was_verified_there_is_no_acceptance() -> None:
    counts = DraftStatistics().total
    assert (counts.acceptance_length, counts.tokens_per_step, counts.acceptance_by_position) == (0, 0, [])
    counts.decoded(0, 0)
    assert (counts.acceptance_length, counts.tokens_per_step) == (0, 1)


def test_padding_counts_only_where_it_is_right_by_chance() -> None:
    statistics = DraftStatistics()
    statistics.decoded("fresh", 2, 1, looked_up=False)
    statistics.decoded("fresh", 0, 0, looked_up=False)
    assert (statistics.total.verified, statistics.total.n_drafted) == ([1, 1], 0)
    statistics.decoded("fresh", 0, 1, looked_up=False)
    assert (statistics.total.verified, statistics.total.accepted) == ([2, 1], [2, 0])
    assert (statistics.total.n_drafted, statistics.total.n_plain) == (1, 1)


def test_looked_up_drafts_are_drafted_when_they_are_verified() -> None:
    statistics = DraftStatistics()
    statistics.decoded("restored", 4, 3, looked_up=True)
    statistics.decoded("restored", 0, 0, looked_up=True)  # a match that was not worth a row
    lookups = statistics.lookups
    assert (lookups.n_verify, lookups.n_verified, lookups.n_accepted) == (1, 4, 3)
    assert statistics.by_origin["restored"].n_drafted == 4
    assert statistics.by_origin["fresh"] == DraftCounts()


def test_the_draft_stages_time_is_that_of_drafts_or_upkeep() -> None:
    statistics = DraftStatistics()
    statistics.drafted(
        [StepShare("fresh", 4, 4), StepShare("restored", 4, 4), StepShare("fresh", 8, 0)], [3, 2, 0], 1.6
    )
    statistics.drafted([StepShare("fresh", 1, 0)], [0], 0.5)
    assert (statistics.n_steps, statistics.total.n_drafted) == (1, 5)
    assert [statistics.by_origin[one].draft_s for one in ORIGINS] == pytest.approx([0.4, 0.4, 0.0])
    assert statistics.upkeep_s == pytest.approx(0.8 + 0.5)


shares = st.builds(
    lambda origin, n, used: StepShare(origin, n, n if used else 0),
    st.sampled_from(ORIGINS),
    st.integers(1, 40),
    st.booleans(),
)


@given(st.lists(st.tuples(st.lists(shares, max_size=5), st.floats(0, 2)), max_size=20))
def test_times_add_up_to_those_of_the_steps(steps: list[tuple[list[StepShare], float]]) -> None:
    statistics = DraftStatistics()
    for step, seconds in steps:
        statistics.drafted(step, [0] * len(step), seconds)
        statistics.stepped(step, seconds)
    total = statistics.total
    assert total.draft_s + statistics.upkeep_s == pytest.approx(sum(seconds for _, seconds in steps))
    assert total.verify_s == pytest.approx(total.draft_s)


verdicts = st.tuples(st.sampled_from(ORIGINS), st.integers(0, 6), st.integers(0, 6), st.booleans())


@given(st.lists(verdicts, max_size=30))
def test_no_more_is_accepted_than_verified_and_no_more_verified_than_drafted(
    seen: list[tuple[PrefixOrigin, int, int, bool]],
) -> None:
    statistics = DraftStatistics()
    for origin, num_real_drafts, n_accepted, looked_up in seen:
        if not looked_up and num_real_drafts:
            statistics.drafted([StepShare(origin, 1, 1)], [num_real_drafts], 0.1)
        statistics.decoded(origin, num_real_drafts, n_accepted, looked_up=looked_up)
    for counts in (statistics.total, *statistics.by_origin.values()):
        assert counts.n_accepted <= counts.n_verified <= counts.n_drafted
        assert all(n <= of for n, of in zip(counts.accepted, counts.verified, strict=True))
        assert counts.verified == sorted(counts.verified, reverse=True)
    assert statistics.total.n_plain + statistics.total.n_verify == len(seen)
    assert statistics.total.n_accepted == sum(n for _, _, n, _ in seen)


# ---- of an engine


@pytest.mark.parametrize("with_output", [True, False])
def test_counts_agree_with_the_tokens_of_fresh_and_restored_requests(*, with_output: bool) -> None:
    settings = SpeculationSettings(max_drafts=4, drafter=True, fixed=True)
    cached = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1)
    toy = ToyEngine(limits(speculation=settings, prefix=cached, pools=PoolSizes(16, 0, 8, draft_states=12)))
    toy.attach()
    toy.attach_drafter(with_output=with_output, wrong=3)
    answers: list[tuple[int, FinishedEvent]] = []
    prompt = list(range(40))
    for name in ("first", "again"):
        one = request(name, prompt, n=30)
        answer = toy.alone(one)
        toy.texts[one.sampling.seed] = [*prompt, *answer]
        handle = toy.engine.submit(one)
        toy.run()
        *tokens, finished = asyncio.run(events_of(handle))
        assert isinstance(finished, FinishedEvent)
        answers.append((sum(isinstance(token, TokenEvent) and token.drafted for token in tokens), finished))
        prompt = [*prompt, *answer]
    drafts = toy.engine.statistics().drafts
    for origin, (n_flagged, finished) in zip(ORIGINS[:2], answers, strict=True):
        counts, usage = drafts.by_origin[origin], finished.usage
        assert (usage.cached_tokens > 0) == (origin == "restored")
        assert 0 < counts.n_accepted < counts.n_verified
        assert n_flagged == usage.accepted_tokens == counts.n_accepted
        assert usage.draft_tokens == counts.n_verified <= counts.n_drafted
        # The prompt yields one token, every decode one and its accepted drafts.
        assert usage.generated_tokens == 1 + counts.n_plain + counts.n_verify + counts.n_accepted
        assert min(counts.draft_s, counts.verify_s) > 0
    answered = toy.steps  # 0.25 s each for the stage, and for the draft stage
    assert drafts.total.verify_s < 0.25 * len(answered)
    assert drafts.total.draft_s + drafts.upkeep_s == pytest.approx(0.25 * len(answered))


async def test_every_decode_counts_where_its_sequence_began() -> None:
    """Preempted and begun again from a slot, and gone on after a loss, restarts included."""
    settings = SpeculationSettings(max_drafts=4, drafter=True, fixed=True)
    cached = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1)
    bounds = limits(speculation=settings, prefix=cached, pools=PoolSizes(16, 0, 8, draft_states=12))
    toy = ToyEngine(bounds, n_stages=2, hold_s=60.0, journal_pages=100)
    toy.attach()
    toy.attach_drafter(with_output=False, wrong=3)
    one = request("one", range(80), n=150)
    toy.texts[one.sampling.seed] = [*one.prompt, *toy.alone(one)]
    handle = toy.engine.submit(one)
    by_origin = toy.engine.scheduler.drafting.statistics.by_origin

    def seen() -> list[int]:
        return [counts.n_plain + counts.n_verify for counts in by_origin.values()]

    def work_until_more() -> list[int]:
        before = seen()
        while sum(seen()) < sum(before) + 3:
            assert toy.work(0)
        return [now - then for now, then in zip(seen(), before, strict=True)]

    assert work_until_more() == [3, 0, 0]
    scheduler = toy.engine.scheduler
    scheduler._operations += scheduler.preemption.preempt(scheduler.running.youngest, toy.now)
    assert work_until_more() == [0, 3, 0]
    assert scheduler.preemption.n_preempted == 1
    assert toy.crash(0)
    toy.come_back()
    while not toy.engine.ready:
        toy.work(0)
    assert work_until_more() == [0, 0, 3]
    frozen = asyncio.create_task(toy.engine.freezer.freeze(10.0))
    await asyncio.sleep(0)
    await toy.play()
    assert toy.crash(1)
    toy.come_back(await frozen)
    assert work_until_more() == [0, 0, 3]
    toy.run()
    assert told(await events_of(handle))[0] == toy.alone(one)
