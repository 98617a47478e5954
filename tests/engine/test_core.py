"""The engine's shell: handles, refusals, a pipeline that comes and goes, drain, statistics, rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lucevisor.engine.output_rows import RowsMissing
from lucevisor.engine.request import (
    ContextOverflow,
    NotReady,
    QueueFull,
    RequestError,
    RequestHandle,
)
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.kv.page_pool import PageUse
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import PendingCancelled, StepResult
from tests.engine.toy_engine import LOST, ToyEngine, attached, events_of, limits, request, told
from tests.engine.toy_pipeline import mix, toy_row

NO_PAYLOAD = memoryview(b"")

STOPPED = RequestError("shutting_down", "the server stops; send the request to another")


def ready(*, n_stages: int = 1, **changes: object) -> ToyEngine:
    return attached(limits(**changes), n_stages=n_stages)


def test_before_a_pipeline_is_there_requests_are_refused_with_the_reason() -> None:
    toy = ToyEngine(limits())
    with pytest.raises(NotReady, match="is being loaded"):
        toy.engine.submit(request("a"))
    assert not toy.engine.statistics().ready
    toy.attach()
    toy.engine.submit(request("a"))


def test_a_full_queue_is_refused_with_the_time_a_place_takes() -> None:
    toy = attached(limits(max_sequences=1, pools=PoolSizes(16, 0, 1)), max_queue=2)
    for name in "abc":
        toy.engine.submit(request(name, n=1))
    with pytest.raises(QueueFull, match=r"2 of your requests are waiting.* try again in 5 s") as caught:
        toy.engine.submit(request("d", n=200))
    assert caught.value.retry_after_s == 5  # nothing is known yet
    toy.now += 2.0
    while toy.work(0):
        toy.now += 2.0
    for name in "def":
        toy.engine.submit(request(name, n=1))
    with pytest.raises(QueueFull) as caught:
        toy.engine.submit(request("g", n=200))
    assert caught.value.retry_after_s == 4  # two, one after the other, of 2 s each


async def test_a_lost_shard_ends_running_requests_and_the_queue_goes_on_later() -> None:
    toy = ready(max_sequences=1, pools=PoolSizes(16, 0, 1))
    running, waiting = toy.engine.submit(request("a")), toy.engine.submit(request("b"))
    toy.work(0)
    toy.lose()
    assert (await events_of(running))[-1].error == LOST  # type: ignore[union-attr]
    assert waiting.finished is None
    with pytest.raises(NotReady, match="group left was killed"):
        toy.engine.submit(request("c"))
    assert toy.engine.statistics().queued == 1
    toy.attach()
    toy.run()
    assert told(await events_of(waiting))[0] == toy.alone(request("b"))


async def test_a_wrong_result_of_the_last_stage_ends_the_pipeline() -> None:
    toy = ready(n_stages=2)
    handle = toy.engine.submit(request("a"))
    toy.work(0)
    assert toy.pipeline is not None
    toy.engine.receive(StepResult(1, 1, []))  # the step asked for a token
    assert [f.code for f in toy.failures] == ["protocol_error"]
    assert "stage 1" in toy.failures[0].message
    assert (await events_of(handle))[-1].error.code == "protocol_error"  # type: ignore[union-attr]


async def test_drain_takes_no_more_and_waits_for_what_it_has() -> None:
    toy = ready(max_sequences=1, pools=PoolSizes(16, 0, 1))
    handles = [toy.engine.submit(request(name)) for name in "ab"]
    assert not await toy.engine.drain(0.01)
    with pytest.raises(NotReady, match="shutting down"):
        toy.engine.submit(request("c"))
    draining = asyncio.create_task(toy.engine.drain(5))
    await toy.play()
    assert await draining
    assert [h.finished.reason for h in handles if h.finished] == ["length", "length"]


async def test_close_ends_what_a_drain_left() -> None:
    toy = ready(max_sequences=1, pools=PoolSizes(16, 0, 1))
    handles = [toy.engine.submit(request(name)) for name in "ab"]
    assert not await toy.engine.drain(0)
    toy.engine.close(STOPPED)
    toy.engine.close(STOPPED)
    assert [h.finished.error for h in handles if h.finished] == [STOPPED, STOPPED]
    assert await toy.engine.drain(0)
    toy.attach()
    with pytest.raises(NotReady, match="shutting down"):
        toy.engine.submit(request("c"))
    closed = ready()
    closed.engine.close(STOPPED)
    with pytest.raises(NotReady, match="the server stops"):
        closed.engine.submit(request("c"))


async def test_quiesce_lets_running_requests_end_and_keeps_the_queue() -> None:
    toy = ready(max_sequences=1, pools=PoolSizes(16, 0, 1))
    running = toy.engine.submit(request("a"))
    quiet = asyncio.create_task(toy.engine.quiesce(5))
    await asyncio.sleep(0)
    waiting = toy.engine.submit(request("b"))
    await toy.play()
    assert await quiet
    assert running.finished is not None
    assert waiting.finished is None
    toy.lose()
    toy.attach()
    toy.run()
    assert waiting.finished is not None


def test_statistics_tell_what_happened() -> None:
    toy = ready(n_stages=2)
    before = toy.engine.statistics()
    assert (before.ready, before.tokens_per_s, before.steps.n_steps) == (True, 0.0, 0)
    toy.engine.submit(request("a", range(100), n=20))
    toy.now = 4.0
    toy.run()
    after = toy.engine.statistics()
    assert after.tokens_per_s == pytest.approx(5.0)  # 20 tokens in the 4 s there were
    assert after.generated_tokens == 20
    assert after.pages == {"full": PageUse(0, 16), "recurrent": PageUse(0, 4)}
    assert after.steps.n_steps == len(toy.steps) == 2 + 19
    assert after.steps.n_tokens == 100 + 19
    assert [s.n_steps for s in after.steps.stages] == [21, 21]
    assert after.steps.stages[0].compute_s == pytest.approx(0.25 * 21)
    assert before.steps.n_steps == 0  # a snapshot, not a view
    toy.now = 30.0
    assert toy.engine.statistics().tokens_per_s == 0.0


@pytest.mark.parametrize("n_stages", [1, 3])
async def test_rows_of_every_position_come_back_in_order_beside_other_requests(n_stages: int) -> None:
    toy = ready(n_stages=n_stages)
    other = toy.engine.submit(request("a", range(200), n=30))
    ids = list(range(5, 95))
    running = asyncio.create_task(toy.engine.run_ids(ids, want_hidden=True, rows_per_step=40))
    await asyncio.sleep(0)
    toy.run()
    output = await asyncio.wait_for(running, 30)
    assert output.hidden is not None
    assert output.logits.shape == (90, 3)
    assert output.hidden.shape == (n_stages + 1, 90, 2)
    embedded = [toy_row(mix(token, i), 2) for i, token in enumerate(ids)]
    assert np.array_equal(output.hidden[0], np.array(embedded, dtype=np.float32))
    assert len({tuple(row) for row in output.logits.tolist()}) == 90
    again = ready(n_stages=n_stages)
    running = asyncio.create_task(again.engine.run_ids(ids, want_hidden=False, rows_per_step=1000))
    await asyncio.sleep(0)
    again.run()
    whole = await asyncio.wait_for(running, 30)
    assert whole.hidden is None
    assert np.array_equal(whole.logits, output.logits)
    assert other.finished is not None


async def test_rows_that_do_not_come_are_an_error_with_the_reason() -> None:
    toy = ready()
    running = asyncio.create_task(toy.engine.run_ids([1, 2, 3], want_hidden=False, rows_per_step=8))
    await asyncio.sleep(0)
    toy.lose()
    with pytest.raises(RowsMissing, match="group left was killed"):
        await running
    toy.attach()
    running = asyncio.create_task(toy.engine.run_ids([1, 2, 3], want_hidden=False, rows_per_step=8))
    await asyncio.sleep(0)
    assert toy.pipeline is not None
    result, _ = toy.daemons[0].run_one()
    toy.engine.receive(StepResult(result.step_id, 0, result.sampled))
    with pytest.raises(RowsMissing, match="stage 0 sent no logits"):
        await running


async def test_logits_that_are_no_numbers_end_their_request_alone_and_name_the_stage() -> None:
    toy = attached(limits(), n_stages=2, blame=lambda _: "stage 0 (group a)")
    bad, good = (toy.engine.submit(request(name, n=6)) for name in ("bad", "good"))
    assert toy.pipeline is not None
    receive, drawn, late = toy.engine.receive, list[int](), list[StepResult]()

    def spoil(result: StepResult | PendingCancelled, payload: memoryview = NO_PAYLOAD) -> None:
        assert isinstance(result, StepResult)
        if result.stage == 0:  # answers after the output stage
            late.append(result)
            return
        if any(one.sequence == 0 for one in result.sampled):
            drawn.append(result.step_id)
            result = structs.replace(result, invalid=[0]) if len(drawn) == 3 else result
        receive(result, payload)
        while late and late[0].step_id <= result.step_id:
            receive(late.pop(0))

    toy.engine.receive = spoil  # type: ignore[method-assign]
    toy.run()
    tokens, end = told(await events_of(bad))
    assert end.error is not None
    assert end.error.code == "invalid_logits"
    assert end.error.message.startswith("stage 0 (group a) computed numbers that are NaN or infinite; ")
    assert tokens == toy.alone(request("bad", n=6))[:2]
    assert told(await events_of(good))[0] == toy.alone(request("good", n=6))
    assert toy.failures == []
    assert toy.engine.invalid == ""  # numbers have come since


# ---- rows


# ---- The table of request states, and what refusals tell


def test_a_prompt_too_long_for_the_context_is_told_what_to_do() -> None:
    error = ContextOverflow(prompt_tokens=1024, max_context=1024, max_paged_tokens=2048)
    assert (error.prompt_tokens, error.max_context, error.limit_tokens) == (1024, 1024, 1024)
    for part in ("1024 tokens", "max_context is 1024", "at most 1023 tokens", "raise engine.max_context"):
        assert part in error.message


def test_a_prompt_too_long_for_the_pages_names_the_pages() -> None:
    error = ContextOverflow(prompt_tokens=700, max_context=1024, max_paged_tokens=640)
    assert error.limit_tokens == 640
    for part in ("page pool holds 640 tokens", "at most 639 tokens", "engine.pages"):
        assert part in error.message


def test_requests_that_come_together_share_their_first_step() -> None:
    waiting: list[Callable[[], None]] = []
    toy = ToyEngine(limits(), call_soon=waiting.append)
    toy.attach()
    handles = [toy.engine.submit(request(name, n=1)) for name in "abc"]
    [tick] = waiting
    tick()
    toy.run()
    assert [len(done.step.slices) for done in toy.steps if done.step.slices] == [3]
    assert [handle.finished is not None for handle in handles] == [True] * 3
    toy.engine.submit(request("d"))
    assert len(waiting) == 2


# ---- a reader's end


def test_leaving_the_block_cancels_what_still_runs() -> None:
    cancelled: list[str] = []
    with pytest.raises(ConnectionResetError), RequestHandle("r", cancelled.append):
        raise ConnectionResetError
    assert cancelled == ["r"]


# ---- records


def record(n_prompt: int, wanted: WantedRows | None = None) -> RequestRecord:
    return RequestRecord(request("r", range(n_prompt)), 0, 4, 10.0, wanted)


@given(st.integers(1, 500), st.integers(1, 100), st.integers(0, 499))
def test_chunks_end_at_the_same_places_wherever_one_begins(n_prompt: int, chunk: int, start: int) -> None:
    one = record(n_prompt)
    whole = [0]
    while whole[-1] < n_prompt:
        whole.append(one.next_stop(whole[-1], chunk))
    assert whole[-1] == n_prompt
    assert all(stop % chunk == 0 for stop in whole[:-1])
    if start < n_prompt:
        assert one.next_stop(start, chunk) == next(stop for stop in whole if stop > start)


# ---- Rates are events over seconds; totals add up
