"""The scheduler's decisions: what a step carries, what is refused, how requests end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lucevisor.engine.request import (
    ContextOverflow,
    FinishedEvent,
    InvalidRequest,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import WantedRows
from lucevisor.engine.step import StepPlan, WrongResult
from lucevisor.kv.page_pool import PageUse
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CloseSequence,
    OpenSequence,
    PromptLogprobs,
    Sampled,
    StepResult,
)
from tests.engine.scheduler_steps import answer, decoding, plans, shape
from tests.engine.toy_engine import limits, request

# ---- filling a step


def test_decodes_ride_beside_prefill_chunks_and_come_first() -> None:
    scheduler = decoding(limits(), "ab")
    scheduler.submit(request("c", range(300)), 0.0)
    found = plans(scheduler)
    assert shape(found[0]) == [("a", 3, 1, True), ("b", 3, 1, True), ("c", 0, 64, False)]
    assert len(found) == 1  # one stage, one chunk: what is left in flight is for a short prompt that comes
    scheduler.apply(answer(found[0]), 0.0)
    [second] = plans(scheduler)
    assert shape(second) == [("a", 4, 1, True), ("b", 4, 1, True), ("c", 64, 64, False)]


def test_a_step_takes_several_prompts_the_shortest_first() -> None:
    scheduler = Scheduler(limits(prefill_chunk=120))
    for name, n_prompt in (("a", 60), ("b", 64), ("c", 50), ("d", 4)):
        scheduler.submit(request(name, range(n_prompt)), 0.0)
    found = plans(scheduler)
    assert {name for name, *_ in shape(found[0])} == {"a", "c", "d"}
    assert {name for name, *_ in shape(found[1])} == {"b"}


SHARED = {"prefill_chunk": 512, "max_step_tokens": 516, "pools": PoolSizes(64, 0, 4), "long_prefill_tokens": 128}


def test_beside_others_the_prompts_of_a_step_share_a_budget_shortest_first() -> None:
    scheduler = Scheduler(limits(**SHARED))
    for name, n_prompt in (("long", 900), ("short", 60)):
        scheduler.submit(request(name, range(n_prompt)), 0.0)
    [first] = plans(scheduler)
    assert shape(first) == [("long", 0, 64, False), ("short", 0, 60, True)]  # cut at a page to what shorter ones leave
    scheduler.apply(answer(first), 0.0)
    [second] = plans(scheduler)
    assert shape(second) == [("long", 64, 128, False), ("short", 60, 1, True)]


def test_beside_a_short_prompt_a_long_one_leaves_the_first_stage_free() -> None:
    scheduler = Scheduler(limits(**SHARED), n_stages=2)
    scheduler.submit(request("first", n=1), 0.0)
    scheduler.submit(request("long", range(1000), n=1), 0.0)
    first = scheduler.next_plan(0.0)
    assert first is not None
    assert shape(first) == [("first", 0, 3, True), ("long", 0, 64, False)]
    assert scheduler.next_plan(0.0) is None  # the head has a step
    scheduler.submit(request("second", n=1), 1.0)
    second = scheduler.next_plan(1.0)
    assert second is not None
    assert shape(second) == [("second", 0, 3, True)]  # at once, without the long one
    scheduler.on_first_stage_done()
    assert scheduler.next_plan(1.0) is None
    scheduler.on_first_stage_done()
    assert scheduler.next_plan(1.0) is None  # the other stage has two
    scheduler.apply(answer(first), 1.0)
    third = scheduler.next_plan(1.0)
    assert third is not None
    assert shape(third) == [("long", 64, 128, False)]


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_decodes_are_dealt_into_as_many_micro_batches_as_there_are_stages(n_stages: int) -> None:
    names = "abcdefgh"
    bounds = limits(max_sequences=8, pools=PoolSizes(64, 0, 8))
    scheduler = decoding(bounds, names, n_stages=n_stages)
    found = plans(scheduler)
    most = -(-8 // n_stages)
    assert len(found) == n_stages
    assert [len(p.step.slices) for p in found[:-1]] == [most] * (n_stages - 1)
    assert sorted(name for p in found for name in p.request_ids) == list(names)
    served = dict.fromkeys(names, 0)
    for _ in range(6 * n_stages):  # going on, nobody falls behind
        oldest = found.pop(0)
        scheduler.apply(answer(oldest), 0.0)
        for name in oldest.request_ids:
            served[name] += 1
        found += plans(scheduler)
        assert scheduler.n_in_flight == n_stages
    assert max(served.values()) - min(served.values()) <= 1


def test_rows_that_come_back_have_a_step_of_their_own() -> None:
    scheduler = decoding(limits(), "a")
    scheduler.submit(request("rows", range(100), n=1), 0.0, WantedRows(hidden=True, rows=40))
    scheduler.submit(request("b"), 0.0)
    found = plans(scheduler)
    assert shape(found[0]) == [("a", 3, 1, True), ("b", 0, 3, True)]
    assert shape(found[1]) == [("rows", 0, 40, False)]
    assert (found[0].step.want_logits, found[0].step.want_hidden) == (False, False)
    assert (found[1].step.want_logits, found[1].step.want_hidden) == (True, True)


# ---- refusals and ends


def test_what_can_never_be_served_is_refused_at_once() -> None:
    scheduler = Scheduler(limits(pools=PoolSizes(3, 0, 4)))
    scheduler.submit(request("a"), 0.0)
    with pytest.raises(InvalidRequest, match="request_id: 'a' is in use"):
        scheduler.submit(request("a"), 0.0)
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        scheduler.submit(request("b", ()), 0.0)
    with pytest.raises(InvalidRequest, match="max_tokens: is 0"):
        scheduler.submit(request("b", n=0), 0.0)
    with pytest.raises(ContextOverflow) as caught:
        scheduler.submit(request("b", range(192)), 0.0)
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (192, 192)
    assert scheduler.n_queued == 1


def test_a_stop_id_ends_a_request_is_counted_and_is_no_token_event() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(request("a", stop_ids=frozenset({9})), 1.0)
    [plan] = plans(scheduler, 3.0)
    assert scheduler.apply(answer(plan, 8), 4.0) == [("a", TokenEvent(8))]
    plan, ahead = plans(scheduler, 4.0)
    [(name, finished)] = scheduler.apply(answer(plan, 9), 10.0)
    assert scheduler.apply(answer(ahead, 5), 11.0) == []
    assert name == "a"
    assert isinstance(finished, FinishedEvent)
    assert (finished.reason, finished.stop_id, finished.usage) == ("stop", 9, Usage(3, 0, 2))
    timings = finished.timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (2.0, 1.0, 6.0)
    assert scheduler.idle


def test_cancel_frees_everything_at_once_and_late_tokens_are_dropped() -> None:
    scheduler = Scheduler(limits(max_sequences=1, pools=PoolSizes(16, 0, 1)))
    scheduler.submit(request("a", range(60)), 0.0)
    [plan] = plans(scheduler)
    scheduler.submit(request("b"), 0.0)
    [(name, finished)] = scheduler.cancel("a", 1.0)
    assert name == "a"
    assert isinstance(finished, FinishedEvent)
    assert finished.reason == "cancelled"
    assert {use.used for use in scheduler.pools.usage().values()} == {0}
    [following] = plans(scheduler)  # the id is used again, after its CloseSequence
    assert following.step.operations[:2] == [
        CloseSequence(0),
        OpenSequence(0, 0, request("b").sampling, n_prompt=len(request("b").prompt)),
    ]
    assert scheduler.apply(answer(plan, 3), 1.0) == []
    assert scheduler.apply(answer(following, 4), 1.0) == [("b", TokenEvent(4))]
    assert scheduler.cancel("a", 2.0) == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (StepResult(77, 0, [Sampled(0, 1)]), "result of step 77 came; the oldest step in flight is 1"),
        (StepResult(1, 0, []), r"asked for tokens of sequences \[0\], the result has \[\]"),
        (StepResult(1, 0, [Sampled(3, 1)]), r"the result has \[3\]"),
        (StepResult(1, 0, [Sampled(0, 1), Sampled(1, 1)]), r"the result has \[0, 1\]"),
    ],
)
def test_a_result_that_does_not_fit_its_step_is_refused_and_changes_nothing(result: StepResult, words: str) -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(request("a"), 0.0)
    [plan] = plans(scheduler)
    with pytest.raises(WrongResult, match=words):
        scheduler.apply(result, 0.0)
    assert scheduler.apply(answer(plan, 2), 0.0) == [("a", TokenEvent(2))]


# ---- log-probabilities of prompts


def scored_answer(plan: StepPlan) -> StepResult:
    """A token's log-probability is minus its id."""
    scored = [
        PromptLogprobs(
            s.sequence,
            s.start + 1,
            [-float(t) for t in s.logprob_targets],
            [[(t, -float(t))] for t in s.logprob_targets],
        )
        for s in plan.step.slices
        if s.logprob_targets
    ]
    return msgspec.structs.replace(answer(plan), prompt_logprobs=scored)


def test_every_token_but_the_first_is_scored_once_and_the_prefix_is_computed_again() -> None:
    scheduler = Scheduler(limits())
    prompt = range(10, 310)
    for name in "ab":
        scheduler.submit(replace(request(name, prompt, n=3), prompt_logprobs=True), 0.0)
        asked: list[int] = []
        last = None
        while not scheduler.idle:
            for plan in plans(scheduler):
                asked += [t for s in plan.step.slices for t in s.logprob_targets]
                for _, event in scheduler.apply(scored_answer(plan), 0.0):
                    last = event
        assert asked == [*prompt][1:]
        assert isinstance(last, FinishedEvent)
        assert last.usage.cached_tokens == 0
        assert last.prompt_logprobs == tuple(TokenLogprob(-float(t), ((t, -float(t)),)) for t in prompt[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [PromptLogprobs(0, 1, [-1.0], [[]])],
        [PromptLogprobs(0, 2, [-1.0, -2.0], [[], []])],
        [PromptLogprobs(5, 1, [-1.0, -2.0], [[], []])],
    ],
    ids=["none", "too few", "elsewhere", "another sequence"],
)
def test_a_result_with_other_prompt_logprobs_is_refused(wrong: list[PromptLogprobs]) -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(replace(request("a"), prompt_logprobs=True), 0.0)
    [plan] = plans(scheduler)
    with pytest.raises(WrongResult, match="other log-probabilities"):
        scheduler.apply(msgspec.structs.replace(answer(plan), prompt_logprobs=wrong), 0.0)
    assert scheduler.n_in_flight == 1


# ---- limits


def test_a_step_has_room_for_a_chunk_and_all_decodes() -> None:
    with pytest.raises(ValueError, match="max_step_tokens is 67; 68 is the least"):
        limits(max_step_tokens=67)


# ---- admission, pages and preemption


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
        if scheduler.admission.n_preempted and preempted_at is None:
            preempted_at = dict(told)
            assert scheduler.pools.usage()[KvGroup.FULL] == PageUse(3, 4)
            assert (scheduler.n_running, scheduler.n_queued) == (1, 1)
    assert preempted_at == {
        "a": 69,
        "b": 67,
    }  # two pages each hold 62 + 66; a ran ahead
    assert order == ["a", "b"]
    assert told == {"a": 90, "b": 90}
    assert scheduler.admission.n_preempted == 1


# ---- steps that run ahead of their tokens


def tokens(scheduler: Scheduler) -> list[list[list[int]]]:
    """The tokens of the slices of each step that can be sent now."""
    return [[piece.tokens for piece in plan.step.slices] for plan in plans(scheduler)]


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_a_request_starts_while_all_micro_batches_run_ahead(n_stages: int) -> None:
    scheduler = decoding(limits(pools=PoolSizes(32, 0, 16), max_sequences=8), "abcdef", n_stages=n_stages)
    scheduler.attach(n_stages, has_doorbells=True)
    found = plans(scheduler)
    assert len(found) == 2 * n_stages
    scheduler.submit(request("g"), 0.0)
    for n_answered in range(2 * n_stages):
        if any("g" in plan.request_ids for plan in found):
            assert n_answered <= n_stages  # those that ran ahead
            return
        scheduler.apply(answer(found.pop(0)), 0.0)
        found += plans(scheduler)
    raise AssertionError("it waits until another one ends")
