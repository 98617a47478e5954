"""Layer ranges of shards: from weights, from explicit ranges, or by balancing a cost; cut only where the model allows.

Knows no device and no model.  Invariant: what is returned covers every layer once, in order, and gives each shard at
least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor

from lucevisor.model.values import LayerRange

Cost = Callable[[int, LayerRange], float]
"""What it costs that shard number i holds a range: a share of its memory, or seconds a step."""


class SplitError(Exception):
    """The layers cannot be split as asked.  ``of_devices``: there are too many devices, whatever the split."""

    def __init__(self, why: str, hint: str, *, of_devices: bool = False) -> None:
        super().__init__(f"{why}; {hint}")
        self.why, self.hint, self.of_devices = why, hint, of_devices


_Total = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """The boundary in front of shard ``shard`` was asked for at one layer and lies at another."""

    shard: int
    wanted: int
    chosen: int


def from_weights(weights: Sequence[float], n_layers: int) -> tuple[LayerRange, ...]:
    """Give each shard its share by cumulative rounding, so that no error adds up; each gets one layer at least.

    Shares are rounded half away from zero, and counted in the decimals the user wrote: 0.1 is a tenth.  Raises
    SplitError when there are more shards than layers.
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
    """Take explicit ranges.  Raises SplitError naming the layer that is missing, held twice, or not there."""
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


def legalise(
    ranges: Sequence[LayerRange], legal: Callable[[int], bool]
) -> tuple[tuple[LayerRange, ...], tuple[Move, ...]]:
    """Move boundaries to the nearest layers where the chain may be cut, the lower one of two equally near.

    When several want the same place, they are moved as little as possible in sum.  Raises SplitError when the model has
    fewer such places than boundaries are needed.
    """
    n_layers = ranges[-1].stop
    wanted = [r.start for r in ranges]
    if all(legal(b) for b in wanted[1:]):
        return tuple(ranges), ()

    def moved(so_far: _Total, shard: int, layers: LayerRange) -> _Total:
        return (so_far[0] + abs(layers.start - wanted[shard]),)

    chosen = _choose(len(ranges), n_layers, legal, moved, (0,))
    moves = (Move(i, was, now.start) for i, (was, now) in enumerate(zip(wanted, chosen, strict=True)))
    return chosen, tuple(move for move in moves if move.wanted != move.chosen)


def balanced(n_shards: int, n_layers: int, cost: Cost, legal: Callable[[int], bool]) -> tuple[LayerRange, ...]:
    """Choose the ranges whose dearest shard is cheapest, then the most even of them.

    Raises SplitError when there are more shards than layers, or than places to cut.  Calls ``cost`` once for each shard
    and range that it may hold: about ``n_shards * n_layers ** 2 / 2`` times.
    """
    check_count(n_shards, n_layers)

    def dearest(so_far: _Total, shard: int, layers: LayerRange) -> _Total:
        price = cost(shard, layers)
        return max(so_far[0], price), so_far[1] + price * price

    return _choose(n_shards, n_layers, legal, dearest, (0.0, 0.0))


def _choose(
    n_shards: int,
    n_layers: int,
    legal: Callable[[int], bool],
    add: Callable[[_Total, int, LayerRange], _Total],
    nothing: _Total,
) -> tuple[LayerRange, ...]:
    """The legal cuts with the least total, the lowest of those; ``add(total, shard, layers)`` must not shrink a total.

    Shard by shard the best way to reach each cut is kept (dynamic programming).
    """
    places = legal_places(n_layers, legal)
    check_places(n_shards, places)
    best: dict[int, tuple[_Total, tuple[int, ...]]] = {0: (nothing, ())}
    for shard in range(n_shards):
        stops = places if shard < n_shards - 1 else [n_layers]
        reached: dict[int, tuple[_Total, tuple[int, ...]]] = {}
        for stop in stops:
            for start, way in best.items():
                if start < stop:
                    found = (add(way[0], shard, LayerRange(start, stop)), (*way[1], stop))
                    reached[stop] = min(reached.get(stop, found), found)
        best = reached
    return tuple(LayerRange(a, b) for a, b in pairwise([0, *best[n_layers][1]]))


def check_count(n_shards: int, n_layers: int) -> None:
    """Raise SplitError when there are more shards than layers."""
    if n_shards > n_layers:
        layers = f"{n_layers} layers" if n_layers > 1 else "1 layer"
        raise SplitError(
            f"has {n_shards} devices for {layers}, and each holds one at least",
            f"nearest: the first {n_layers} of them",
            of_devices=True,
        )


def legal_places(n_layers: int, legal: Callable[[int], bool]) -> list[int]:
    """Return the layers in front of which the chain may be cut, the two ends left out."""
    return [b for b in range(1, n_layers) if legal(b)]


def check_places(n_shards: int, places: Sequence[int]) -> None:
    """Raise SplitError when there are more shards than the places allow."""
    if len(places) < n_shards - 1:
        where = f"only in front of {_listed(places)}" if places else "nowhere"
        raise SplitError(
            f"has {n_shards} devices, but the model may be cut {where}: elsewhere layers read state in front of it",
            f"nearest: the first {len(places) + 1} of them",
            of_devices=True,
        )


def _listed(places: Sequence[int]) -> str:
    return f"layer{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"


def _near(values: Sequence[tuple[int, int]], n_layers: int) -> str:
    """The written ranges with as little as possible changed, so that they cover the layers."""
    ranges, start = [], 0
    for i, (_, stop) in enumerate(values):
        left = len(values) - i - 1
        stop = n_layers if not left else min(max(stop, start + 1), n_layers - left)
        ranges.append(f'"{start}-{stop}"')
        start = stop
    return f"nearest: [{', '.join(ranges)}]"
