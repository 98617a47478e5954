"""Layer split: by weights, by ranges, by balancing a cost, or the fastest one.  Ranges cover every layer once, in
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import NamedTuple

from lucevisor.model.values import LayerRange


class SplitError(Exception):
    """The layers cannot be split as configured.  ``of_devices``: there are too many devices for any split."""

    def __init__(self, why: str, hint: str, *, of_devices: bool = False) -> None:
        super().__init__(f"{why}; {hint}")
        self.why, self.hint, self.of_devices = why, hint, of_devices


@dataclass(frozen=True, slots=True)
class BoundaryMove:
    """The boundary in front of shard ``shard`` was moved from layer ``wanted`` to layer ``chosen``."""

    shard: int
    wanted: int
    chosen: int


def from_weights(weights: Sequence[float], n_layers: int) -> tuple[LayerRange, ...]:
    """Give each shard its share by cumulative rounding of exact decimals, at least one layer.  Raises SplitError."""
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
    n_layers, wanted = ranges[-1].stop, [r.start for r in ranges]

    def cost(shard: int, layers: LayerRange) -> RangeCost:
        return RangeCost(abs(layers.start - wanted[shard]), 0)

    boundaries = legal_boundaries(n_layers, legal)
    partition = fastest_partition(PartitionProblem(n_layers, boundaries, [True] * len(ranges), cost), slack=0)
    assert partition is not None
    moves = (BoundaryMove(i, was, r.start) for i, (was, r) in enumerate(zip(wanted, partition.ranges, strict=True)))
    return partition.ranges, tuple(move for move in moves if move.wanted != move.chosen)


def check_count(n_shards: int, n_layers: int) -> None:
    if n_shards > n_layers:
        layers = f"{n_layers} layers" if n_layers > 1 else "1 layer"
        raise SplitError(
            f"has {n_shards} devices for {layers}, and each needs at least one",
            f"nearest: the first {n_layers} of them",
            of_devices=True,
        )


def legal_boundaries(n_layers: int, legal: Callable[[int], bool]) -> list[int]:
    """Return the layers in front of which the model may be split."""
    return [b for b in range(1, n_layers) if legal(b)]


def check_boundaries(n_shards: int, boundaries: Sequence[int]) -> None:
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


SLACK = 0.03
"""Splits within this share of each other count as equally fast, as measurements are no better: the evenest wins."""


@dataclass(frozen=True, slots=True)
class RangeCost:
    """Seconds of a range on a shard, and the share of its memory in use."""

    seconds: float
    fill: float


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """``boundaries``: layers in front of which the model may be split.  ``cost``: None if the range does not fit.

    ``joins_previous[i]``: shard i is in the stage of shard i - 1, so times add up; the largest sum is minimised.
    """

    n_layers: int
    boundaries: Sequence[int]
    joins_previous: Sequence[bool]
    cost: Callable[[int, LayerRange], RangeCost | None]


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranges and the time of their slowest stage; ``best_s``: that of the fastest partition."""

    ranges: tuple[LayerRange, ...]
    seconds: float
    best_s: float


class _Partial(NamedTuple):
    """The shards so far: slowest complete stage, stage to be continued, sum of the squares of fills, boundaries."""

    done_s: float = 0.0
    stage_s: float = 0.0
    fill: float = 0.0
    cuts: tuple[int, ...] = (0,)

    @property
    def seconds(self) -> float:
        return max(self.done_s, self.stage_s)


def fastest_partition(problem: PartitionProblem, slack: float = SLACK) -> Partition | None:
    """Return the most evenly filled of the partitions within ``slack`` of the fastest, if any.  Raises SplitError."""
    check_count(len(problem.joins_previous), problem.n_layers)
    check_boundaries(len(problem.joins_previous), problem.boundaries)
    fastest = _search(problem)
    if fastest is None:
        return None
    chosen = _search(problem, fastest.seconds * (1 + slack))
    assert chosen is not None
    return Partition(tuple(LayerRange(a, b) for a, b in pairwise(chosen.cuts)), chosen.seconds, fastest.seconds)


def _search(problem: PartitionProblem, limit_s: float | None = None) -> _Partial | None:
    """Return the fastest partition, or the evenest within ``limit_s``; the lowest one on a tie.

    Dynamic programming: of the partials that end at one layer, the Pareto front is kept.
    """

    def weight(partial: _Partial) -> tuple[float, float]:
        return (partial.done_s if limit_s is None else partial.fill), partial.stage_s

    reached: dict[int, list[_Partial]] = {0: [_Partial()]}
    ends_stage = [not joins for joins in problem.joins_previous[1:]] + [True]
    for shard, ends in enumerate(ends_stage):
        following: dict[int, list[_Partial]] = {}
        for stop in problem.boundaries if shard < len(ends_stage) - 1 else [problem.n_layers]:
            partials = []
            for start, before in reached.items():
                cost = problem.cost(shard, LayerRange(start, stop)) if start < stop else None
                if cost is not None:
                    partials += [_extended(partial, cost, stop, ends=ends) for partial in before]
            front: list[_Partial] = []
            for partial in sorted(partials, key=lambda partial: (weight(partial), partial.cuts)):
                if (limit_s is None or partial.seconds <= limit_s) and (
                    not front or weight(partial)[1] < weight(front[-1])[1]
                ):
                    front.append(partial)
            if front:
                following[stop] = front
        reached = following
    found = reached.get(problem.n_layers, [])
    return min(found, key=lambda partial: (*weight(partial), partial.seconds, partial.fill, partial.cuts), default=None)


def _extended(before: _Partial, cost: RangeCost, stop: int, *, ends: bool) -> _Partial:
    stage_s, fill = before.stage_s + cost.seconds, before.fill + cost.fill**2
    done_s, stage_s = (max(before.done_s, stage_s), 0.0) if ends else (before.done_s, stage_s)
    return _Partial(done_s, stage_s, fill, (*before.cuts, stop))


def balanced_ranges(
    n_shards: int, n_layers: int, cost: Callable[[int, LayerRange], float], legal: Callable[[int], bool]
) -> tuple[LayerRange, ...]:
    """Return the ranges that minimise the most expensive shard; of those, the most even.  Raises SplitError."""

    def shares(shard: int, layers: LayerRange) -> RangeCost:
        share = cost(shard, layers)
        return RangeCost(share, share)

    problem = PartitionProblem(n_layers, legal_boundaries(n_layers, legal), [False] * n_shards, shares)
    partition = fastest_partition(problem, slack=0)
    assert partition is not None
    return partition.ranges
