"""The search for the fastest split finds what trying every split finds."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.model.values import LayerRange
from lucevisor.placement.fastest import Found, Price, Problem, fastest


@st.composite
def problems(draw):
    """Small ones, with ranges that do not fit, places where no cut is allowed, and a memory that shards share."""
    n_layers = draw(st.integers(1, 7))
    n_shards = draw(st.integers(1, min(4, n_layers)))
    places = draw(st.lists(st.sampled_from(range(1, n_layers)), unique=True)) if n_layers > 1 else []
    number = st.integers(0, 20).map(float)
    prices = {
        (i, a, b): draw(st.none() | st.builds(Price, number, number, st.integers(0, 20)))
        for i in range(n_shards)
        for a in range(n_layers)
        for b in range(a + 1, n_layers + 1)
    }
    same = [False, *(draw(st.booleans()) for _ in range(n_shards - 1))]
    room = draw(st.none() | st.integers(0, 60))
    return Problem(n_layers, sorted(places), same, lambda i, r: prices[i, r.start, r.stop], room)


def every_split(problem):
    """(seconds, fullness, ranges) of every split that is allowed and fits."""
    n = len(problem.same_stage)
    for cuts in combinations(problem.places, n - 1):
        ranges = [LayerRange(a, b) for a, b in pairwise([0, *cuts, problem.n_layers])]
        prices = [problem.price(i, r) for i, r in enumerate(ranges)]
        if None in prices:
            continue
        if problem.shared_room is not None and sum(p.shared_bytes for p in prices) > problem.shared_room:
            continue
        stages = []
        for price, same in zip(prices, problem.same_stage, strict=True):
            if same:
                stages[-1] += price.seconds
            else:
                stages.append(price.seconds)
        yield max(stages), max(p.fullness for p in prices), tuple(ranges)


@settings(max_examples=250, deadline=None)
@given(problem=problems(), slack=st.sampled_from([0.0, 0.03, 0.5]))
def test_it_finds_what_trying_all_finds(problem, slack):
    splits = list(every_split(problem))
    found = fastest(problem, slack)
    if not splits:
        assert found is None
        return
    assert found is not None
    best_s = min(seconds for seconds, _, _ in splits)
    near = [split for split in splits if split[0] <= best_s * (1 + slack)]
    assert found.best_s == best_s
    assert (found.seconds, min(full for _, full, _ in near), found.ranges) in near


def test_a_whole_chain_in_one_sum_and_stages_apart():
    """Layer times 1 on the first, 2 on the second: the sum wants all on the first, the largest wants 2 to 1."""

    def price(i: int, layers: LayerRange) -> Price:
        return Price((layers.stop - layers.start) * (1.0 + i), 0.0)

    def solved(same: list[bool]) -> Found | None:
        return fastest(Problem(12, range(1, 12), same, price))

    latency, throughput = solved([False, True]), solved([False, False])
    assert latency is not None
    assert throughput is not None
    assert latency.ranges == (LayerRange(0, 11), LayerRange(11, 12))
    assert throughput.ranges == (LayerRange(0, 8), LayerRange(8, 12))
    assert (latency.seconds, throughput.seconds) == (13.0, 8.0)


def test_of_equally_fast_splits_the_least_full():
    def price(i: int, layers: LayerRange) -> Price:
        n = layers.stop - layers.start
        return Price(n * (1.0 if i else 1.001), n / (10 if i else 30))

    found = fastest(Problem(40, range(1, 40), [False, True], price))
    assert found is not None
    assert found.ranges == (LayerRange(0, 30), LayerRange(30, 40))
