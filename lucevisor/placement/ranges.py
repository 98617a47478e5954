"""Layer split: by weights, by explicit ranges, or by balancing a cost; only at boundaries the model allows.

Knows no device and no model.  Invariant: the ranges cover every layer once, in order, and none is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor

from lucevisor.model.values import LayerRange

Cost = Callable[[int, LayerRange], float]
"""The cost of a range on shard i: a share of its memory, or seconds per step."""


class SplitError(Exception):
    """The layers cannot be split as configured.  ``of_devices``: there are too many devices for any split."""

    def __init__(self, why: str, hint: str, *, of_devices: bool = False) -> None:
        super().__init__(f"{why}; {hint}")
        self.why, self.hint, self.of_devices = why, hint, of_devices


_Total = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BoundaryMove:
    """The boundary in front of shard ``shard`` was moved from layer ``wanted`` to layer ``chosen``."""

    shard: int
    wanted: int
    chosen: int


def from_weights(weights: Sequence[float], n_layers: int) -> tuple[LayerRange, ...]:
    """Give each shard its share by cumulative rounding, so that errors do not add up; each gets at least one layer.

    Weights are read as exact decimals (0.1 is a tenth), and shares rounded half away from zero.  Raises SplitError when
    there are more shards than layers.
    """
    check_count(len(weights), n_layers)
    exact = [Fraction(repr(float(w))) for w in weights]
    total = sum(exact)
    ranges: list[LayerRange] = []
    start, share = 0, Fraction(0)
    for i, weight in enumerate(exact):
        share += weight
        rounded = floor(share / total * n_layers + Fraction(1, 2))
        left = len(exact) - i - 1
        stop = n_layers if not left else min(max(rounded, start + 1), n_layers - left)
        ranges.append(LayerRange(start, stop))
        start = stop
    return tuple(ranges)


def from_ranges(values: Sequence[tuple[int, int]], n_layers: int) -> tuple[LayerRange, ...]:
    """Check explicit ranges.  Raises SplitError naming a layer that is missing, duplicated, or out of range."""
    check_count(len(values), n_layers)
    expected = 0
    for start, stop in values:
        if stop <= start:
            raise SplitError(f"the range {start}-{stop} is empty", _near(values, n_layers))
        if start > expected:
            raise SplitError(f"layer {expected} is in no range", _near(values, n_layers))
        if start < expected:
            raise SplitError(f"layer {start} is in two ranges", _near(values, n_layers))
        expected = stop
    if expected < n_layers:
        missing = f"layer {expected} is" if expected == n_layers - 1 else f"layers {expected} to {n_layers - 1} are"
        raise SplitError(f"{missing} in no range: the model has {n_layers}", _near(values, n_layers))
    if expected > n_layers:
        why = f"layer {n_layers} does not exist: the model has {n_layers}, numbered 0 to {n_layers - 1}"
        raise SplitError(why, _near(values, n_layers))
    return tuple(LayerRange(start, stop) for start, stop in values)


def snap_to_legal(
    ranges: Sequence[LayerRange], legal: Callable[[int], bool]
) -> tuple[tuple[LayerRange, ...], tuple[BoundaryMove, ...]]:
    """Move boundaries to the nearest layers where the model may be split, the lower of two equally near.

    The sum of all moves is minimal.  Raises SplitError when the model has fewer legal boundaries than needed.
    """
    n_layers = ranges[-1].stop
    wanted = [r.start for r in ranges]
    if all(legal(b) for b in wanted[1:]):
        return tuple(ranges), ()

    def moved(so_far: _Total, shard: int, layers: LayerRange) -> _Total:
        return (so_far[0] + abs(layers.start - wanted[shard]),)

    chosen = _choose(len(ranges), n_layers, legal, moved, (0,))
    moves = (BoundaryMove(i, was, now.start) for i, (was, now) in enumerate(zip(wanted, chosen, strict=True)))
    return chosen, tuple(move for move in moves if move.wanted != move.chosen)


def balanced_ranges(n_shards: int, n_layers: int, cost: Cost, legal: Callable[[int], bool]) -> tuple[LayerRange, ...]:
    """Return the ranges that minimise the most expensive shard; of those, the most even.

    Raises SplitError when there are too many shards for the layers or the legal boundaries.  Calls ``cost`` once per
    shard and range: about ``n_shards * n_layers ** 2 / 2`` times.
    """
    check_count(n_shards, n_layers)

    def dearest(so_far: _Total, shard: int, layers: LayerRange) -> _Total:
        value = cost(shard, layers)
        return max(so_far[0], value), so_far[1] + value * value

    return _choose(n_shards, n_layers, legal, dearest, (0.0, 0.0))


def _choose(
    n_shards: int,
    n_layers: int,
    legal: Callable[[int], bool],
    add: Callable[[_Total, int, LayerRange], _Total],
    nothing: _Total,
) -> tuple[LayerRange, ...]:
    """Return the ranges with the smallest total, the lowest ones on a tie (dynamic programming over the shards).

    ``add(total, shard, layers)`` must never shrink a total.
    """
    boundaries = legal_boundaries(n_layers, legal)
    check_boundaries(n_shards, boundaries)
    best: dict[int, tuple[_Total, tuple[int, ...]]] = {0: (nothing, ())}
    for shard in range(n_shards):
        stops = boundaries if shard < n_shards - 1 else [n_layers]
        reached: dict[int, tuple[_Total, tuple[int, ...]]] = {}
        for stop in stops:
            for start, partial in best.items():
                if start < stop:
                    found = (add(partial[0], shard, LayerRange(start, stop)), (*partial[1], stop))
                    reached[stop] = min(reached.get(stop, found), found)
        best = reached
    return tuple(LayerRange(a, b) for a, b in pairwise([0, *best[n_layers][1]]))


def check_count(n_shards: int, n_layers: int) -> None:
    """Raise SplitError when there are more shards than layers."""
    if n_shards > n_layers:
        layers = f"{n_layers} layers" if n_layers > 1 else "1 layer"
        raise SplitError(
            f"has {n_shards} devices for {layers}, and each needs at least one",
            f"nearest: the first {n_layers} of them",
            of_devices=True,
        )


def legal_boundaries(n_layers: int, legal: Callable[[int], bool]) -> list[int]:
    """Return the layers in front of which the model may be split, without the two ends."""
    return [b for b in range(1, n_layers) if legal(b)]


def check_boundaries(n_shards: int, boundaries: Sequence[int]) -> None:
    """Raise SplitError when there are more shards than the boundaries allow."""
    if len(boundaries) < n_shards - 1:
        where = f"only in front of {_listed(boundaries)}" if boundaries else "nowhere"
        raise SplitError(
            f"has {n_shards} devices, but the model can be split {where}: elsewhere layers share state across it",
            f"nearest: the first {len(boundaries) + 1} of them",
            of_devices=True,
        )


def _listed(boundaries: Sequence[int]) -> str:
    return f"layer{'s' if len(boundaries) > 1 else ''} {', '.join(map(str, boundaries))}"


def _near(values: Sequence[tuple[int, int]], n_layers: int) -> str:
    """Return a hint: the configured ranges, changed as little as possible so that they cover the layers."""
    ranges, start = [], 0
    for i, (_, stop) in enumerate(values):
        left = len(values) - i - 1
        stop = n_layers if not left else min(max(stop, start + 1), n_layers - left)
        ranges.append(f'"{start}-{stop}"')
        start = stop
    return f"nearest: [{', '.join(ranges)}]"
