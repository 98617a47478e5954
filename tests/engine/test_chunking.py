"""The chunk of a long prompt beside short ones: their time to the first token, and what it costs the long one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from lucevisor.engine.scheduling.backlog import Backlog
from lucevisor.engine.scheduling.chunking import (
    BESIDE_DECODES,
    HORIZON_S,
    MAX_DECODE_LOSS,
    MAX_OVERHEAD_SHARE,
    MAX_SLOWDOWN,
    PROMISED_SLOWDOWN,
    RECENT_S,
    SharedChunks,
    chunk_sizes,
)
from lucevisor.engine.scheduling.step_times import MAX_AGE, StepCost
from lucevisor.protocol.steps import Slice
from tests.engine.timed_pipeline import gpu_rows_s, h200_rows_s

SLOW = StepCost(0.008, 0.000385)  # the demo on a core of an EPYC
GPU = StepCost(0.014, 0.0000205)  # a quarter of a 27B model on an H200


def piece(n: int, start: int = 0) -> Slice:
    return Slice(0, start, [7] * n, False)


def known(cost: StepCost, full: int = 512, n_stages: int = 2) -> SharedChunks:
    """Every size was measured."""
    chunks = SharedChunks(n_stages, full)
    for _ in range(3):
        for n in (40, *chunk_sizes(full)):
            for start in (0, 3000):
                chunks.measured([piece(n, start)], cost.step_s(n, start))
    return chunks


def compute(chunks: SharedChunks, n_tokens: int, seconds: Callable[[int], float], full: int = 512) -> list[int]:
    """The pieces of a long prompt beside others, each measured when it is computed."""
    at, sizes = 0, []
    while at < n_tokens:
        n = min(chunks.chunk(at, others=True), full - at % full, n_tokens - at)
        chunks.charge([(n_tokens, piece(n, at))])
        chunks.measured([piece(n, at)], seconds(n))
        sizes.append(n)
        at += n
    return sizes


def test_sizes_make_whole_chunks_of_whole_pages() -> None:
    assert chunk_sizes(512) == [64, 128, 192, 256, 512]
    assert chunk_sizes(384) == [64, 128, 192, 384]
    assert chunk_sizes(100) == [100]
    assert chunk_sizes(64) == [64]
    assert chunk_sizes(7) == [7]


def test_whole_chunks_before_anything_is_known() -> None:
    for full, half in ((512, 256), (64, 64)):
        chunks = SharedChunks(2, full)
        assert chunks.chunk(0, others=True) == full
        assert chunks.max_short_tokens == half
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
        chunks.charge([(1024, piece(512))] * 20)
    assert chunks.chunk(0, others=False) == chunk
    first_s = n_stages * cost.step_s(chunk) + cost.step_s(64)
    assert first_s <= MAX_SLOWDOWN * n_stages * cost.step_s(64)


def test_chunks_are_smaller_where_tokens_cost_more() -> None:
    chunks = known(StepCost(0.001, 0.0001, 1e-7))
    assert chunks.chunk(0, others=False) == 128
    assert chunks.chunk(20_000, others=False) == 64


@pytest.mark.parametrize("overhead_s", [0.004, 0.008, 0.02, 0.05])
def test_a_long_prompt_loses_what_the_budget_says(overhead_s: float) -> None:
    cost = StepCost(overhead_s, 0.000385)
    chunks, n_tokens = known(cost), 512 * 400
    sizes = compute(chunks, n_tokens, cost.step_s)
    whole_s = n_tokens / 512 * cost.step_s(512)
    lost_s = sum(cost.step_s(n) for n in sizes) / whole_s - 1
    assert lost_s <= MAX_OVERHEAD_SHARE + MAX_OVERHEAD_SHARE * HORIZON_S / whole_s + 0.002
    if chunks.chunk(0, others=True) > 128:  # it is the budget that bounds them: it is used
        assert lost_s >= 0.9 * MAX_OVERHEAD_SHARE


def test_pieces_of_a_whole_chunk_are_of_one_size() -> None:
    cost = StepCost(0.02, 0.000385)
    sizes = compute(known(cost), 512 * 100, cost.step_s)
    at, pieces = 0, dict[int, list[int]]()
    for n in sizes:
        pieces.setdefault(at // 512, []).append(n)
        at += n
    assert len({tuple(found) for found in pieces.values()}) > 1
    assert all(len(set(found[:-1])) <= 1 for found in pieces.values())


# ---- sizes that were not measured


def measured(rows_s: Callable[[int], float], *sizes: int, full: int = 512) -> SharedChunks:
    chunks = SharedChunks(1, full)
    for n in sizes * 3:
        chunks.measured([piece(n)], rows_s(n))
    return chunks


def test_sizes_are_measured_from_the_largest_while_they_promise_a_gain() -> None:
    sizes = compute(measured(SLOW.step_s, 64, 512), 512 * 20, SLOW.step_s)
    assert sizes[:6] == [256, 256, 128, 128, 128, 128]
    assert 512 not in sizes


def flat_s(n: int) -> float:
    """Up to 64 rows a step is cheap, so that a line to whole chunks promises much; above, all take the same."""
    return 0.005 + 0.0002 * n if n <= 64 else 0.08


def test_a_size_that_gains_nothing_is_tried_once() -> None:
    sizes = compute(measured(flat_s, 64, 512), 512 * 40, flat_s)
    assert sizes == [256, 256] + [512] * 39


def test_a_size_is_used_down_to_where_it_gains() -> None:
    def rows_s(n: int) -> float:
        return flat_s(n) if n <= 64 else max(0.045, 0.08 * n / 512)

    sizes = compute(measured(rows_s, 64, 512), 512 * 400, rows_s)
    lost_s = sum(map(rows_s, sizes)) - 400 * rows_s(512)
    assert set(sizes) == {256}  # half a chunk takes 45 ms, and a quarter no less
    assert lost_s <= MAX_OVERHEAD_SHARE * (400 * rows_s(512) + HORIZON_S)


def test_a_size_is_measured_again_after_long() -> None:
    sizes = compute(measured(flat_s, 64, 512), 512 * (MAX_AGE + 100), flat_s)
    tried = [i for i, n in enumerate(sizes) if n == 256]
    assert tried[:2] == [0, 1]
    assert len(tried) == 4
    assert MAX_AGE <= tried[2] - tried[1] <= MAX_AGE + 16


def test_whole_chunks_are_measured_again_after_long() -> None:
    """So that what is lost is known, also where all chunks are small."""
    chunks = measured(SLOW.step_s, 64, 512)
    sizes = compute(chunks, 512 * MAX_AGE // 2, SLOW.step_s)
    whole = [i for i, n in enumerate(sizes) if n == 512]
    assert len(whole) >= 2
    assert whole[0] >= MAX_AGE - 16


def test_short_ones_are_no_reason_for_smaller_chunks_on_a_gpu() -> None:
    """Their steps run other kernels.  A 27B model on one H200: whatever they are, whole chunks are right."""
    for n_short in (16, 40, 64, 128):
        rows_s = gpu_rows_s()
        chunks = measured(rows_s, n_short, 512)
        assert compute(chunks, 512 * 50, rows_s).count(512) >= 49


# ---- chunks of more than 512


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_beside_decodes_chunks_are_smaller_where_that_shortens_steps(n_stages: int) -> None:
    rows_s = gpu_rows_s(n_stages)
    chunks = SharedChunks(n_stages, 2048)
    for n in (16, 64, 512, 1024, 2048) * 3:
        chunks.measured([piece(n)], rows_s(n))
    assert chunks.chunk(0, others=True) == BESIDE_DECODES
    assert chunks.chunk(0, others=False) == 2048
    assert 4 * rows_s(512) <= (1 + MAX_DECODE_LOSS) * rows_s(2048)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_beside_decodes_chunks_are_as_large_as_the_bound_allows(n_stages: int) -> None:
    rows_s = h200_rows_s(n_stages)
    chunks = SharedChunks(n_stages, 2048)
    for n in (16, 64, 512, 704, 1024, 2048) * 3:
        chunks.measured([piece(n)], rows_s(n))
    own_s = rows_s(64)
    found = chunks.chunk(0, others=True)
    assert found == 1024
    assert n_stages * rows_s(found) + own_s <= PROMISED_SLOWDOWN * n_stages * own_s


def test_beside_decodes_chunks_are_whole_where_smaller_ones_take_as_long() -> None:
    """A small model on a fast GPU, where launching takes longer than computing."""

    def rows_s(n: int) -> float:
        return 0.004 if n <= 64 else 0.05

    chunks = measured(rows_s, 16, 64, 2048, full=2048)
    sizes = compute(chunks, 2048 * 50, rows_s, full=2048)
    assert sizes.count(2048) >= 49


# ---- what is short, and when it is expected


def test_short_prompts_are_what_the_bound_is_measured_by() -> None:
    chunks = known(SLOW)
    for _ in range(9):
        chunks.started(20, 0.0)
        chunks.measured([piece(40)], SLOW.step_s(40))
    compute(chunks, 512, SLOW.step_s)
    assert chunks.expects_short(RECENT_S - 0.1)
    assert not chunks.expects_short(RECENT_S + 0.1)
    assert chunks.max_short_tokens >= 64


def test_short_prompts_that_came_beside_long_ones_are_remembered() -> None:
    chunks = known(SLOW)
    chunks.started(20, 0.0)
    assert not chunks.came_beside_long(0.1)
    chunks.started(20, 1.0, beside_long=True)
    chunks.started(20, 2.0)
    assert chunks.came_beside_long(RECENT_S + 0.9)
    assert not chunks.came_beside_long(RECENT_S + 1.1)
    chunks.started(4000, 20.0, beside_long=True)  # itself a long one
    assert not chunks.came_beside_long(20.1)


def test_a_short_prompts_step_is_filled_only_where_the_bound_leaves_room() -> None:
    assert known(SLOW).beside_short < 128
    assert known(GPU).beside_short == 512
    assert measured(gpu_rows_s(), 40, 64, 512).beside_short <= 64  # what 65 rows take is not known: as 512, perhaps


def test_a_chunk_waits_for_the_head_and_until_the_last_stage_needs_it() -> None:
    chunks, backlog = known(GPU), Backlog(2)
    step_s = GPU.step_s(512)
    assert chunks.may_follow(backlog, 0.0, 0, others=True)
    backlog.sent(step_s, 0.0)
    assert not chunks.may_follow(backlog, 0.01, 0, others=True)  # the head works
    backlog.first_stage_done(step_s)
    assert chunks.may_follow(backlog, step_s, 0, others=True)  # the tail works on one: the next comes when it is done
    backlog.sent(step_s, step_s)
    backlog.first_stage_done(2 * step_s)
    assert chunks.may_follow(backlog, 2 * step_s, 0, others=True)  # due now
    slow_tail = Backlog(2)
    slow_tail.sent(step_s, 0.0)
    slow_tail.first_stage_done(step_s)
    slow_tail.sent(step_s, step_s)
    slow_tail.first_stage_done(1.2 * step_s)
    assert not chunks.may_follow(slow_tail, 1.2 * step_s, 0, others=True)  # one is at work there and one waits
    slow_tail.answered(2 * step_s)
    assert chunks.may_follow(slow_tail, 2 * step_s, 0, others=True)


def test_chunks_are_whole_until_whole_ones_were_measured() -> None:
    chunks = SharedChunks(2, 512)
    for _ in range(3):
        for n in (40, 256):
            chunks.measured([piece(n)], SLOW.step_s(n))
    assert chunks.chunk(0, others=True) == 512
    for _ in range(2):
        chunks.measured([piece(512)], SLOW.step_s(512))
    assert chunks.chunk(0, others=True) == 128


def test_chunks_are_whole_where_small_ones_take_as_long_as_their_launches() -> None:
    """Two GPUs with half of a 27B model each, and graphs up to 8,192 positions."""

    def seconds(n: int, start: int) -> float:
        launches_s = 0.08 if start + n > 8192 else 0.0
        return max(0.005 + 0.00007 * n, launches_s)

    chunks, n_tokens, full = SharedChunks(2, 1024), 16384, 1024
    taken, smallest = list[float](), dict[int, int]()
    for n in chunk_sizes(full) * 2:  # beside others; a prompt that is alone tries no size
        for start in (0, 9 * full):
            chunks.measured([piece(n, start)], seconds(n, start))
    for _ in range(8):
        chunks.measured([piece(16)], seconds(16, 0))
        at, taken_s = 0, 0.0
        while at < n_tokens:
            n = min(chunks.chunk(at, others=False), full - at % full, n_tokens - at)
            chunks.charge([(n_tokens, piece(n, at))])
            chunks.measured([piece(n, at)], seconds(n, at))
            smallest[at // full] = min(n, smallest.get(at // full, full))
            taken_s += seconds(n, at)
            at += n
        taken.append(taken_s)
    whole_s = sum(seconds(full, at) for at in range(0, n_tokens, full))
    assert max(taken) <= 1.2 * whole_s  # 1.5 x where steps were not compared at their depth
    assert smallest[0] < full  # where small ones are cheap they are used


def test_dear_first_steps_at_a_depth_do_not_make_small_chunks_cheap() -> None:
    """One H200 with a 27B model, as logged: 512 tokens, then 3,581.  The first two steps of a size and length take a
    tenth of a second: one runs before its graph is there, one captures it.  Those behind 3,328 tokens are the only ones
    of their size at another depth.
    """
    sizes = ((64, 0.0316), (128, 0.0449), (192, 0.0478), (256, 0.050), (512, 0.0717), (1024, 0.117), (2048, 0.210))
    n_seen = Counter[tuple[int, int]]()

    def seconds(n: int, start: int) -> float:
        size, least_s = next(one for one in sizes if one[0] >= n)
        n_seen[size, (start + n).bit_length()] += 1
        is_new = size <= 1024 and start and n_seen[size, (start + n).bit_length()] <= 2
        return least_s + 0.055 * is_new + n * start * 5e-9

    chunks, taken = SharedChunks(1, 2048), list[float]()
    for _ in range(10):
        for at in (0, 256):
            chunks.measured([piece(256, at)], seconds(256, at))
        at, taken_s = 0, 0.0
        while at < 3581:
            stop = 3328 if at < 3328 else 3581  # a checkpoint
            n = min(chunks.chunk(at, others=False), 2048 - at % 2048, stop - at)
            chunks.charge([(3581, piece(n, at))])
            chunks.measured([piece(n, at)], found_s := seconds(n, at))
            at, taken_s = at + n, taken_s + found_s
        taken.append(taken_s)
    assert max(taken) <= 1.5 * min(taken)  # 3.4 x where the last pieces' depth counted for all sizes


def prompts_after_short_ones(*, told: bool) -> list[float]:
    """Tokens a second of prompts of 3,581 tokens, each behind one of 512 and many of one, on an H200 with a model of
    experts.  Steps are padded, and the first two of a size and length launch and capture a graph.
    """
    padded = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    n_seen = Counter[tuple[int, int]]()
    chunks, rates = SharedChunks(1, 2048), list[float]()
    for turn in range(8):
        for n_prompt in (512, 3581):
            chunks.started(n_prompt, 10.0 * turn)
            at, taken_s = 0, 0.0
            while at < n_prompt:
                long = n_prompt > chunks.max_short_tokens
                n = min(chunks.chunk(at, others=False) if long else 2048, 2048 - at % 2048, n_prompt - at)
                key = next(size for size in padded if size >= n), (at + n - 1).bit_length()
                n_seen[key] += 1
                cold = n_seen[key] <= 2
                seconds = 0.009 + 3.2e-5 * key[0] + 0.12 * cold
                chunks.charge([(n_prompt, piece(n, at))] if long else [])
                chunks.measured([piece(n, at)], seconds, cold=cold and told)
                at, taken_s = at + n, taken_s + seconds
            rates.append(n_prompt / taken_s)
        for _ in range(57 if turn else 0):
            chunks.started(1, 10.0 * turn + 5.0)
    return rates[1::2]


def test_cold_steps_do_not_make_small_chunks_cheap() -> None:
    rates = prompts_after_short_ones(told=True)
    assert min(rates[2:]) >= 0.95 * max(rates)
    assert min(prompts_after_short_ones(told=False)[2:]) < 0.2 * max(rates)  # where nobody says that they are cold


def test_a_chunk_as_long_as_the_longest_beside_others_earns_credit_at_every_depth() -> None:
    """Steps of up to 1,024 tokens take as long as their launches behind 8,192 positions, where no graph is replayed."""

    def seconds(n: int, start: int) -> float:
        return max(0.005 + 0.00007 * n, 0.08 if n <= 1024 and start >= 8192 else 0.0)

    chunks = SharedChunks(1, 2048)
    for n in chunk_sizes(2048) * 4:
        for start in (0, 9 * 1024):
            chunks.measured([piece(n, start)], seconds(n, start))
    for start in (0, 8192):
        size = chunks.chunk(start, others=True)
        chunks._base = size  # whatever is chosen instead of it
        before = chunks._credit_s
        chunks.charge([(1 << 16, piece(size, start))])
        assert chunks._credit_s > before
