"""What stays of a part: as much as asked, the best chunks, those at its ends, and those that repeat the question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.compression.selection import (
    ANCHOR_TOKENS,
    CHUNK_TOKENS,
    HEAD_CHUNKS,
    TAIL_CHUNKS,
    anchor_chunks,
    chunk_scores,
    chunks_of,
    keep_ratio_at,
    select,
)

scores_of = st.lists(st.floats(0, 1), min_size=1, max_size=1200)
shares = st.floats(0, 1, exclude_min=True)


@given(scores=scores_of, ratio=shares, anchors=st.sets(st.integers(0, 40)))
def test_as_many_tokens_stay_as_asked_give_or_take_a_chunk(scores, ratio, anchors):
    ranges = select(scores, ratio, {chunk for chunk in anchors if chunk < len(chunks_of(len(scores)))})
    n_kept = sum(stop - start for start, stop in ranges)
    assert n_kept - ratio * len(scores) > -CHUNK_TOKENS
    assert n_kept <= max(ratio * len(scores), CHUNK_TOKENS)
    flat = [edge for both in ranges for edge in both]
    assert flat == sorted(set(flat)), "ascending, and adjacent chunks are one range"
    assert flat[0] >= 0
    assert flat[-1] == len(scores), "the end is always kept"
    assert all(start == 0 or (len(scores) - start) % CHUNK_TOKENS == 0 for start, _ in ranges)


@given(scores=scores_of, ratio=shares)
def test_a_chunk_that_goes_is_no_better_than_one_that_was_chosen_by_its_score(scores, ratio):
    bounds, means = chunks_of(len(scores)), chunk_scores(scores)
    ranges = select(scores, ratio)
    kept = {i for i, (a, b) in enumerate(bounds) if any(low <= a and b <= high for low, high in ranges)}
    n, n_kept = len(bounds), max(CHUNK_TOKENS, int(len(scores) * ratio)) // CHUNK_TOKENS
    by_place = set(range(min(HEAD_CHUNKS, n_kept // 8))) | set(range(n - max(1, min(TAIL_CHUNKS, n_kept // 4)), n))
    short = {0} if len(scores) % CHUNK_TOKENS else set()  # fits where a whole chunk does not
    chosen = [means[chunk] for chunk in kept - by_place - short]
    gone = [means[chunk] for chunk in set(range(n)) - kept - short]
    assert not chosen or not gone or min(chosen) >= max(gone)


@given(data=st.data(), tokens=st.lists(st.integers(0, 5), max_size=400))
def test_anchors_are_the_chunks_around_a_repeated_run(data, tokens):
    question = data.draw(st.lists(st.integers(0, 5), max_size=12))
    runs = {tuple(question[i : i + ANCHOR_TOKENS]) for i in range(len(question) - ANCHOR_TOKENS + 1)}
    n = data.draw(st.integers(0, len(tokens)))
    places = {run: [i for i in range(n - 3) if tuple(tokens[i : i + 4]) == run] for run in runs}
    bounds = chunks_of(len(tokens))

    def chunk_of(at):
        return next(i for i, (start, stop) in enumerate(bounds) if start <= at < stop)

    near = {
        chunk
        for found in places.values()
        if len(found) <= 8
        for at in found
        for chunk in range(len(bounds))
        if chunk_of(at) - 2 <= chunk <= chunk_of(at + 3) + 2
    }
    assert anchor_chunks(tokens, question, n) == near


@given(
    n=st.integers(1, 10**6),
    points=st.dictionaries(st.integers(1, 10**6), shares, min_size=1, max_size=5).map(lambda x: sorted(x.items())),
)
def test_the_curve_goes_through_its_points_and_stays_between_them(n, points):
    found = keep_ratio_at(n, 0.5, points)
    assert min(share for _, share in points) - 1e-12 <= found <= max(share for _, share in points) + 1e-12
    for tokens, share in points:
        assert keep_ratio_at(tokens, 0.5, points) == pytest.approx(share)
    assert keep_ratio_at(n, 0.5, ()) == 0.5
