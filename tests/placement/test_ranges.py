"""Ranges: every layer once, in order, whatever the weights; the best cut by brute force; errors that name the layer."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, localcontext
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.model.values import LayerRange
from lucevisor.placement.split import (
    BoundaryMove,
    SplitError,
    balanced_ranges,
    from_ranges,
    from_weights,
    snap_to_legal,
)


def cut(*boundaries: int) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(a, b) for a, b in pairwise(boundaries))


def assert_covers(ranges: tuple[LayerRange, ...], n_layers: int) -> None:
    assert [layer for r in ranges for layer in range(r.start, r.stop)] == list(range(n_layers))
    assert all(len(r) >= 1 for r in ranges)


weights = st.lists(st.floats(min_value=1e-300, max_value=1e300), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("given_weights", "n_layers", "boundaries"),
    [
        ([1], 5, (0, 5)),
        ([1, 1], 3, (0, 2, 3)),  # 1.5 is rounded away from zero
        ([0.3, 0.3, 0.4], 5, (0, 2, 3, 5)),  # 1.5 and 3.0, in decimals: not what 0.3 is in binary
        ([0.7, 0.1, 0.2], 10, (0, 7, 8, 10)),
        ([1e300, 1e-300], 4, (0, 3, 4)),
        ([1e-300, 1e300, 1e-300], 3, (0, 1, 2, 3)),
        ([1, 1000, 1], 40, (0, 1, 39, 40)),
    ],
)
def test_shares_are_rounded_up_the_chain(given_weights, n_layers, boundaries):
    assert from_weights(given_weights, n_layers) == cut(*boundaries)


@given(weights=weights, extra=st.integers(0, 200))
def test_any_weights_cover_each_layer_once_and_round_their_sums(weights, extra):
    n_layers = len(weights) + extra
    ranges = from_weights(weights, n_layers)
    assert len(ranges) == len(weights)
    assert_covers(ranges, n_layers)
    start, n = 0, len(weights)
    with localcontext(prec=2000):  # the oracle: decimals, as written
        total = sum(Decimal(repr(w)) for w in weights)
        for i, r in enumerate(ranges):
            share = sum(Decimal(repr(w)) for w in weights[: i + 1]) / total * n_layers
            rounded = int(share.quantize(Decimal(1), rounding=ROUND_HALF_UP))
            assert r.stop == (n_layers if i == n - 1 else min(max(rounded, start + 1), n_layers - (n - i - 1)))
            start = r.stop


def test_more_shards_than_layers():
    for make in (lambda: from_weights([1, 1, 1], 2), lambda: from_ranges([(0, 1), (1, 2), (2, 3)], 2)):
        with pytest.raises(SplitError, match=r"3 devices for 2 layers.*nearest: the first 2") as caught:
            make()
        assert caught.value.of_devices


@pytest.mark.parametrize(
    ("values", "why", "hint"),
    [
        ([(0, 20), (20, 39)], "layer 39 is in no range", '["0-20", "20-40"]'),
        ([(0, 20), (20, 30)], "layers 30 to 39 are in no range: the model has 40", '["0-20", "20-40"]'),
        ([(0, 20), (20, 41)], "layer 40 does not exist: the model has 40, numbered 0 to 39", '["0-20", "20-40"]'),
        ([(0, 50), (50, 60)], "layer 40 does not exist", '["0-39", "39-40"]'),
        ([(0, 20), (21, 40)], "layer 20 is in no range", '["0-20", "20-40"]'),
        ([(0, 20), (19, 40)], "layer 19 is in two ranges", '["0-20", "20-40"]'),
        ([(1, 20), (20, 40)], "layer 0 is in no range", '["0-20", "20-40"]'),
        ([(0, 0), (0, 40)], "the range 0-0 is empty", '["0-1", "1-40"]'),
    ],
)
def test_wrong_ranges_name_the_layer_and_the_nearest_valid_ranges(values, why, hint):
    with pytest.raises(SplitError) as caught:
        from_ranges(values, 40)
    assert why in caught.value.why
    assert caught.value.hint == f"nearest: {hint}"
    assert not caught.value.of_devices


def test_a_boundary_moves_to_the_nearest_legal_place():
    # 35 layers, the last 20 share with layers 13 and 14: a cut must lie at or before 13
    ranges, moves = snap_to_legal(cut(0, 14, 35), lambda b: b <= 13)
    assert (ranges, moves) == (cut(0, 13, 35), (BoundaryMove(1, 14, 13),))
    ranges, moves = snap_to_legal(cut(0, 10, 20, 35), lambda b: b <= 13)
    assert (ranges, moves) == (cut(0, 10, 13, 35), (BoundaryMove(2, 20, 13),))
    ranges, moves = snap_to_legal(cut(0, 14, 20, 35), lambda b: b <= 13)
    assert (ranges, moves) == (cut(0, 12, 13, 35), (BoundaryMove(1, 14, 12), BoundaryMove(2, 20, 13)))


def test_too_few_legal_places_are_refused():
    with pytest.raises(SplitError, match=r"can be split only in front of layers 1, 2:.*nearest: the first 3") as caught:
        snap_to_legal(cut(0, 3, 6, 9, 12), lambda b: b <= 2)
    assert caught.value.of_devices
    with pytest.raises(SplitError, match=r"can be split nowhere.*nearest: the first 1"):
        balanced_ranges(2, 4, lambda i, r: 1.0, lambda _: False)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int], set[int]]:
    n_layers = draw(st.integers(2, 9))
    wanted = sorted(draw(st.sets(st.integers(1, n_layers - 1), min_size=1, max_size=3)))
    legal = draw(st.sets(st.integers(1, n_layers - 1)))
    return n_layers, wanted, legal


@given(split=splits())
def test_moves_are_the_least_by_brute_force(split):
    n_layers, wanted, legal = split
    choices = list(combinations(sorted(legal), len(wanted)))
    if not choices and not set(wanted) <= legal:
        with pytest.raises(SplitError):
            snap_to_legal(cut(0, *wanted, n_layers), legal.__contains__)
        return
    ranges, moves = snap_to_legal(cut(0, *wanted, n_layers), legal.__contains__)
    chosen = [r.start for r in ranges[1:]]
    assert_covers(ranges, n_layers)
    assert set(chosen) <= legal

    def moved(boundaries: tuple[int, ...]) -> int:
        return sum(abs(a - b) for a, b in zip(boundaries, wanted, strict=True))

    assert tuple(chosen) == min(choices, key=lambda c: (moved(c), c))
    assert [(m.shard, m.wanted, m.chosen) for m in moves] == [
        (i, w, c) for i, (w, c) in enumerate(zip(wanted, chosen, strict=True), 1) if w != c
    ]


@given(
    n_shards=st.integers(1, 4),
    prices=st.lists(st.integers(0, 20), min_size=4, max_size=8),
    speeds=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    legal=st.sets(st.integers(1, 7), min_size=3),
)
def test_balanced_is_the_best_by_brute_force(n_shards, prices, speeds, legal):
    n_layers = len(prices)

    def cost(i: int, layers: LayerRange) -> float:
        return sum(prices[layers.start : layers.stop]) / speeds[i]

    boundaries = [b for b in range(1, n_layers) if b in legal]
    if len(boundaries) < n_shards - 1:
        return
    ranges = balanced_ranges(n_shards, n_layers, cost, legal.__contains__)
    assert_covers(ranges, n_layers)
    dearest = max(cost(i, r) for i, r in enumerate(ranges))
    every = [cut(0, *c, n_layers) for c in combinations(boundaries, n_shards - 1)]
    assert dearest == min(max(cost(i, r) for i, r in enumerate(option)) for option in every)
