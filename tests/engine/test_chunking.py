"""The chunk of a long prompt beside short ones: their time to the first token, and what it costs the long one."""

from __future__ import annotations

import pytest

from lucevisor.engine.backlog import Backlog
from lucevisor.engine.chunking import HORIZON_S, MAX_OVERHEAD_SHARE, MAX_SLOWDOWN, SharedChunks, chunk_sizes
from lucevisor.engine.step_times import StepCost
from lucevisor.protocol.steps import Slice

SLOW = StepCost(0.008, 0.000385)  # the demo on a core of an EPYC
GPU = StepCost(0.014, 0.0000205)  # a quarter of a 27B model on an H200


def piece(n: int, start: int = 0) -> Slice:
    return Slice(0, start, [7] * n, False)


def known(cost: StepCost, full: int = 512, n_stages: int = 2) -> SharedChunks:
    chunks = SharedChunks(n_stages, full)
    for _ in range(3):
        for n in (40, 256, full):
            for start in (0, 3000):
                chunks.measured([piece(n, start)], cost.step_s(n, start))
    return chunks


def compute(chunks: SharedChunks, n_tokens: int) -> list[int]:
    """The pieces of a long prompt."""
    at, sizes = 0, []
    while at < n_tokens:
        n = min(chunks.chunk(at), 512 - at % 512, n_tokens - at)
        chunks.charge([(n_tokens, piece(n, at))])
        sizes.append(n)
        at += n
    return sizes


def test_sizes_make_whole_chunks_of_whole_pages() -> None:
    assert chunk_sizes(512) == [64, 128, 192, 256, 512]
    assert chunk_sizes(384) == [64, 128, 192, 384]
    assert chunk_sizes(100) == [100]
    assert chunk_sizes(64) == [64]
    assert chunk_sizes(7) == [7]


def test_half_a_chunk_before_anything_is_known() -> None:
    for full, half in ((512, 256), (64, 64)):
        chunks = SharedChunks(2, full)
        assert chunks.chunk(0) == chunks.max_short_tokens == half
        assert chunks.beside_short == 0
        assert chunks.step_s([piece(64)]) == 0.0


@pytest.mark.parametrize(
    ("cost", "n_stages", "chunk"),
    [
        (SLOW, 2, 128),
        (GPU, 2, 512),  # smaller ones would hardly be shorter
        (StepCost(0.0, 0.001), 2, 128),
        (StepCost(0.010, 0.0), 2, 512),
        (StepCost(0.004, 0.0003), 1, 64),
    ],
)
def test_the_largest_chunk_that_keeps_the_time_to_the_first_token(cost: StepCost, n_stages: int, chunk: int) -> None:
    chunks = known(cost, n_stages=n_stages)
    for _ in range(40):  # alone long enough: all credit there is
        chunks.charge([(512, piece(512))] * 20)
    assert chunks.chunk(0) == chunk
    first_s = n_stages * cost.step_s(chunk) + cost.step_s(64)
    assert first_s <= MAX_SLOWDOWN * n_stages * cost.step_s(64)


def test_chunks_are_smaller_where_tokens_cost_more() -> None:
    chunks = known(StepCost(0.001, 0.0001, 1e-7))
    assert chunks.chunk(0) == 128
    assert chunks.chunk(20_000) == 64


@pytest.mark.parametrize("overhead_s", [0.004, 0.008, 0.02, 0.05])
def test_a_long_prompt_loses_what_the_budget_says(overhead_s: float) -> None:
    cost = StepCost(overhead_s, 0.000385)
    chunks, n_tokens = known(cost), 512 * 400
    sizes = compute(chunks, n_tokens)
    whole_s = n_tokens / 512 * cost.step_s(512)
    lost_s = sum(cost.step_s(n) for n in sizes) / whole_s - 1
    assert lost_s <= MAX_OVERHEAD_SHARE + MAX_OVERHEAD_SHARE * HORIZON_S / whole_s + 0.002
    if chunks.chunk(0) > 128:  # it is the budget that bounds them: it is used
        assert lost_s >= 0.9 * MAX_OVERHEAD_SHARE


def test_pieces_of_a_whole_chunk_are_of_one_size() -> None:
    sizes = compute(known(StepCost(0.02, 0.000385)), 512 * 100)
    at, pieces = 0, dict[int, list[int]]()
    for n in sizes:
        pieces.setdefault(at // 512, []).append(n)
        at += n
    assert len({tuple(found) for found in pieces.values()}) > 1
    assert all(len(set(found[:-1])) <= 1 for found in pieces.values())


def test_short_prompts_are_what_the_bound_is_measured_by() -> None:
    chunks = known(SLOW)
    for _ in range(9):
        chunks.started(20, 0.0)
        chunks.measured([piece(40)], SLOW.step_s(40))
    for _ in range(8):
        chunks.measured([piece(256)], SLOW.step_s(256))
    compute(chunks, 512)
    assert chunks.expects_short(4.9)
    assert not chunks.expects_short(5.1)
    assert chunks.max_short_tokens >= 64


def test_a_short_prompts_step_is_filled_only_where_the_bound_leaves_room() -> None:
    assert known(SLOW).beside_short < 128
    assert known(GPU).beside_short == 512


def test_a_chunk_waits_for_the_head_and_until_the_last_stage_needs_it() -> None:
    chunks, backlog = known(GPU), Backlog(2)
    step_s = GPU.step_s(512)
    assert chunks.may_follow(backlog, 0.0, 0)
    backlog.sent(step_s, 0.0)
    assert not chunks.may_follow(backlog, 0.01, 0)  # the head works
    backlog.first_stage_done(step_s)
    assert chunks.may_follow(backlog, step_s, 0)  # the tail works on one: the next comes when it is done
    backlog.sent(step_s, step_s)
    backlog.first_stage_done(2 * step_s)
    assert chunks.may_follow(backlog, 2 * step_s, 0)  # due now
    slow_tail = Backlog(2)
    slow_tail.sent(step_s, 0.0)
    slow_tail.first_stage_done(step_s)
    slow_tail.sent(step_s, step_s)
    slow_tail.first_stage_done(1.2 * step_s)
    assert not chunks.may_follow(slow_tail, 1.2 * step_s, 0)  # one is at work there and one waits
    slow_tail.answered(2 * step_s)
    assert chunks.may_follow(slow_tail, 2 * step_s, 0)


def test_no_room_is_kept_before_whole_chunks_were_measured() -> None:
    chunks = SharedChunks(2, 512)
    for _ in range(3):
        for n in (40, 256):
            chunks.measured([piece(n)], SLOW.step_s(n))
    chunks.started(20, 0.0)
    assert not chunks.expects_short(1.0)
    for _ in range(2):
        chunks.measured([piece(512)], SLOW.step_s(512))
    assert chunks.expects_short(1.0)
