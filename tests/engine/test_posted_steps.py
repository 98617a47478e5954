"""Posted steps: every stage has them at once, answers come in any order, and a loss takes back what has not begun."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lucevisor.protocol.frames import POSTED
from lucevisor.protocol.steps import (
    PENDING,
    CancelPending,
    Drafted,
    OpenSequence,
    PendingCancelled,
    Sampled,
    SamplingParams,
    Slice,
    Step,
    StepResult,
)
from tests.engine.pipeline_wires import Bench, Wire


def posting(n_stages: int = 3) -> Bench:
    return Bench(range(n_stages), has_doorbells=True)


def step(step_id: int) -> Step:
    return Step(step_id, step_id % 4, [OpenSequence(step_id, 0, SamplingParams())], [Slice(4, 0, [7, 8], True)])


def test_all_stages_get_a_step_at_once_and_later_ones_wait_for_its_rows() -> None:
    bench = posting()
    bench.pipeline.submit(step(1))
    assert [wire.ids for wire in bench.wires] == [[(0, 1)], [(1 | POSTED, 1)], [(2 | POSTED, 1)]]
    bench.answer(1, 0)
    bench.answer(1, 1, hop_s=3e-5)
    bench.answer(1, 2, hop_s=4e-5)
    assert [result.hops_s for result in bench.results] == [(3e-5, 4e-5)]
    assert [len(wire.steps) for wire in bench.wires] == [1, 1, 1]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_an_answer_that_overtakes_that_of_the_stage_before_waits_for_it(order: tuple[int, ...]) -> None:
    bench, rows = posting(), list[tuple[int, int]]()
    bench.pipeline.on_rows = lambda step, stage: rows.append((step.step_id, stage))
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(step(2))
    for stage in order:
        assert not bench.done
        bench.answer(1, stage)
    assert bench.done == [1]
    assert [answer.stage for answer in bench.results[0].results] == [0, 1, 2]
    assert rows == [(1, 0), (1, 1)]


@pytest.mark.parametrize("other", [{"want_hidden": True}, {"rank_pages": [4]}, {"slices": []}], ids=str)
def test_what_is_not_posted_goes_from_stage_to_stage_and_holds_up_what_is_behind(other: dict[str, object]) -> None:
    bench = posting(2)
    bench.pipeline.submit(replace(step(1), **other))  # type: ignore[arg-type]
    bench.pipeline.submit(step(2))
    assert bench.wires[1].ids == []
    bench.answer(1, 0)
    bench.pipeline.submit(step(3))
    assert bench.wires[1].ids == [(1, 1)]  # step 2 is first
    bench.answer(2, 0)
    bench.pipeline.submit(step(4))
    assert bench.wires[1].ids == [(1, 1), (1, 2)]
    bench.answer(3, 0)
    bench.pipeline.submit(step(5))
    assert bench.wires[1].ids == [(1, 1), (1, 2), (1, 3)]
    bench.answer(4, 0)
    bench.pipeline.submit(step(6))
    assert bench.wires[1].ids[3:] == [(1, 4)]
    bench.answer(5, 0)
    bench.answer(6, 0)
    bench.pipeline.submit(step(7))  # nothing is on its way to the second stage that it has not
    assert bench.wires[1].ids[-1] == (1 | POSTED, 7)


def test_a_loss_takes_back_what_has_not_begun_and_it_is_sent_again_from_stage_to_stage() -> None:
    bench, told = posting(), list[bool]()
    bench.pipeline.on_steps_returned = lambda: told.append(bench.pipeline.settled)
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(step(2))
    bench.answer(1, 0)  # stage 1 is at step 1, stage 0 at step 2
    bench.pipeline.lose([0])
    assert [wire.recalls for wire in bench.wires] == [[], [CancelPending(1)], [CancelPending(2)]]
    bench.answer(1, 1)
    bench.pipeline.receive(PendingCancelled(1, [2], operated=True))
    bench.pipeline.receive(
        PendingCancelled(2, [1, 2], operated=False)
    )  # step 1 has come to stage 2: it goes there at once
    assert bench.wires[2].ids == [(2 | POSTED, 1), (2 | POSTED, 2), (2, 1)]
    assert told == [False, False]
    bench.answer(1, 2)
    assert bench.done == [1]
    assert bench.pipeline.settled
    fresh = Wire()
    bench.pipeline.restore({0: fresh}, {})  # type: ignore[dict-item]
    bench.answer(2, 0, 1, 2)
    assert bench.done == [1, 2]
    assert fresh.ids == [(0, 2)]
    assert bench.wires[1].ids[2:] == [(1, 2)]
    assert bench.wires[1].steps[-1][1].operations == []  # it has had them
    assert bench.wires[2].steps[-1][1].operations == step(2).operations
    assert not bench.failures


def test_a_recall_of_what_a_stage_has_not_fails_the_pipeline() -> None:
    bench = posting()
    bench.pipeline.submit(step(1))
    bench.pipeline.lose([0])
    bench.pipeline.receive(PendingCancelled(1, [5], operated=False))
    assert [(failure.stage, failure.code) for failure in bench.failures] == [(1, "protocol_error")]


# ---- steps that run ahead of their tokens


def ahead(step_id: int, depends_on_step: int) -> Step:
    return Step(step_id, step_id % 4, [], [Slice(4, 9 + step_id, [PENDING], True)], depends_on_step=depends_on_step)


def drawn(bench: Bench, step_id: int, token: int) -> None:
    bench.pipeline.receive(StepResult(step_id, 1, [Sampled(4, token)]))


def started(bench: Bench, step_id: int, token: int) -> None:
    """The first stage answers, with the token that it was told."""
    bench.pipeline.receive(StepResult(step_id, 0, [Sampled(4, token)]))


def test_the_first_stage_has_a_step_before_the_token_it_starts_from() -> None:
    bench = posting(2)
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(ahead(2, 1))
    assert bench.wires[0].ids == [(0, 1), (POSTED, 2)]
    bench.answer(1, 0)
    started(bench, 2, 33)  # heard before the result of step 1
    drawn(bench, 1, 33)
    drawn(bench, 2, 34)
    assert bench.done == [1, 2]
    assert bench.results[1].step.slices[0].tokens == [33]
    assert not bench.failures


def test_a_stage_that_went_on_with_another_token_than_was_drawn_again_fails_the_pipeline() -> None:
    bench = posting(2)
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(ahead(2, 1))
    bench.answer(1, 0)
    started(bench, 2, 33)  # the output stage rang, and was lost before its result was heard
    bench.pipeline.lose([1])
    assert bench.pipeline.settled
    bench.pipeline.restore({1: Wire()}, {})  # type: ignore[dict-item]
    drawn(bench, 1, 35)
    assert [failure.code for failure in bench.failures] == ["protocol_error"]
    assert bench.done == []


# ---- steps that run ahead of their drafts


def verifying(step_id: int, drafts_of: int, drafts: list[int]) -> Step:
    return Step(step_id, step_id % 4, [], [Slice(4, 9, [7, *drafts], True, 3, num_draft_tokens=3)], drafts_of=drafts_of)


def drafting(n_stages: int) -> Bench:
    """A step behind which drafts are made, in the last stage's daemon, and one that is to verify them."""
    bench = posting(n_stages)
    bench.pipeline.drafts.attach(bench.wires[-1], with_output=True)  # type: ignore[arg-type]
    bench.pipeline.submit(replace(step(1), slices=[Slice(4, 0, [7, 8], True, num_draft_tokens=3)]))
    bench.answer(1, *range(n_stages))
    bench.pipeline.submit(verifying(2, 1, [PENDING] * 3))
    assert bench.wires[0].ids[1:] == [(POSTED, 2)]
    return bench


def drafted(bench: Bench, *tokens: int) -> None:
    bench.pipeline.receive(StepResult(1, len(bench.wires), drafts=[Drafted(4, [*tokens])]))


@pytest.mark.parametrize("heard", [True, False])
def test_the_first_stage_has_a_step_before_its_drafts(*, heard: bool) -> None:
    bench, tail = drafting(2), Wire()
    if heard:
        drafted(bench, 11, 12, 13)
    bench.pipeline.receive(StepResult(2, 0, [Sampled(4, token) for token in (11, 12, 13)]))
    bench.pipeline.drafts.detach()
    bench.pipeline.lose([1])  # rows are those of the drafts that the first stage was told
    bench.pipeline.restore({1: tail}, {})  # type: ignore[dict-item]
    assert tail.steps == [(1, verifying(2, 0, [11, 12, 13]))]


def test_drafts_that_are_heard_before_the_end_of_their_step_are_put_into_the_next_one() -> None:
    bench = posting(2)
    bench.pipeline.drafts.attach(bench.wires[-1], with_output=True)
    bench.pipeline.submit(replace(step(1), slices=[Slice(4, 0, [7, 8], True, num_draft_tokens=3)]))
    bench.answer(1, 1)
    drafted(bench, 11, 12, 13)
    bench.plans = [verifying(2, 1, [PENDING] * 3)]
    bench.answer(1, 0)
    assert [entry.step for entry in bench.pipeline.in_flight] == [verifying(2, 0, [11, 12, 13])]


def test_the_watchdog_sees_a_first_stage_that_has_its_drafts() -> None:
    bench = drafting(2)
    waiting = bench.pipeline.oldest_in_flight(1e9)
    assert waiting is not None
    assert waiting.stage == 2  # the draft stage
    drafted(bench, 11, 12, 13)
    working = bench.pipeline.oldest_in_flight(1e9)
    assert working is not None
    assert (working.stage, working.step_id) == (0, 2)
    bench = drafting(2)
    bench.pipeline.drafts.detach()  # its daemon tells them all the same
    working = bench.pipeline.oldest_in_flight(1e9)
    assert working is not None
    assert working.stage == 0
