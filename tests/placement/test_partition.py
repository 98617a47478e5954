"""The search for the fastest split finds what trying every split finds."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.model.values import LayerRange
from lucevisor.placement.split import PartitionProblem, RangeCost, SplitError, fastest_partition


@st.composite
def problems(draw):
    """Small ones, with ranges that do not fit, and places where no cut is allowed."""
    n_layers = draw(st.integers(1, 7))
    n_shards = draw(st.integers(1, min(4, n_layers)))
    boundaries = draw(st.lists(st.sampled_from(range(1, n_layers)), unique=True)) if n_layers > 1 else []
    number = st.integers(0, 20).map(float)
    prices = {
        (i, a, b): draw(st.none() | st.builds(RangeCost, number, number))
        for i in range(n_shards)
        for a in range(n_layers)
        for b in range(a + 1, n_layers + 1)
    }
    same = [False, *(draw(st.booleans()) for _ in range(n_shards - 1))]
    return PartitionProblem(n_layers, sorted(boundaries), same, lambda i, r: prices[i, r.start, r.stop])


def every_split(problem):
    """(seconds, fullness, ranges) of every split that is allowed and fits."""
    n = len(problem.joins_previous)
    for cuts in combinations(problem.boundaries, n - 1):
        ranges = [LayerRange(a, b) for a, b in pairwise([0, *cuts, problem.n_layers])]
        prices = [problem.cost(i, r) for i, r in enumerate(ranges)]
        if None in prices:
            continue
        stages = []
        for cost, same in zip(prices, problem.joins_previous, strict=True):
            if same:
                stages[-1] += cost.seconds
            else:
                stages.append(cost.seconds)
        yield max(stages), sum(p.fill**2 for p in prices), tuple(ranges)


@settings(max_examples=250, deadline=None)
@given(problem=problems(), slack=st.sampled_from([0.0, 0.03, 0.5]))
def test_the_partition_is_that_of_trying_all(problem, slack):
    splits = list(every_split(problem))
    if len(problem.boundaries) < len(problem.joins_previous) - 1:
        with pytest.raises(SplitError):
            fastest_partition(problem, slack)
        return
    found = fastest_partition(problem, slack)
    if not splits:
        assert found is None
        return
    assert found is not None
    best_s = min(seconds for seconds, _, _ in splits)
    near = [split for split in splits if split[0] <= best_s * (1 + slack)]
    assert found.best_s == best_s
    assert (found.seconds, min(full for _, full, _ in near), found.ranges) in near
