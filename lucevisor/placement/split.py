"""Layer split: by weights, by explicit ranges, by balancing a cost, or the fastest one that fits.

Knows no device and no model, only costs of ranges and the boundaries that the model allows.  Invariant: the ranges
cover every layer once, in order, and none is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
                    candidate = (add(partial[0], shard, LayerRange(start, stop)), (*partial[1], stop))
                    reached[stop] = min(reached.get(stop, candidate), candidate)
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


SLACK = 0.03
"""Splits within this share of each other count as equally fast, as measurements are no better: the least full wins."""


@dataclass(frozen=True, slots=True)
class RangeCost:
    """One range on one shard: seconds, share of its memory in use, and bytes in a memory that several shards share."""

    seconds: float
    fill: float
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """``boundaries``: layers in front of which the model may be split.  ``cost``: None if the range does not fit.

    ``joins_previous[i]``: shard i is in the same stage as shard i - 1, so their times add up; the largest sum is
    minimised.  With all of them True that is the time of the whole pipeline.  ``shared_limit_bytes``: size of the
    memory that several shards share; None: no limit.
    """

    n_layers: int
    boundaries: Sequence[int]
    joins_previous: Sequence[bool]
    cost: Callable[[int, LayerRange], RangeCost | None]
    shared_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranges and the time of their slowest stage; ``best_s``: that of the fastest partition."""

    ranges: tuple[LayerRange, ...]
    seconds: float
    best_s: float


@dataclass(frozen=True, slots=True)
class _PartialPartition:
    """The shards so far: slowest complete stage, current stage, fullest shard, shared bytes, boundaries."""

    done_s: float = 0.0
    stage_s: float = 0.0
    fill: float = 0.0
    shared_bytes: int = 0
    cuts: tuple[int, ...] = (0,)

    @property
    def worst_s(self) -> float:
        return max(self.done_s, self.stage_s)


def fastest_partition(problem: PartitionProblem, slack: float = SLACK) -> Partition | None:
    """Return the partition whose fullest shard is least full among those within ``slack`` of the fastest.

    None if none fits.
    """
    best = _search(problem, _Objective())
    if best is None:
        return None
    chosen = _search(problem, _Objective(limit_s=best.worst_s * (1 + slack))) or best
    ranges = tuple(LayerRange(a, b) for a, b in pairwise(chosen.cuts))
    return Partition(ranges, chosen.worst_s, best.worst_s)


@dataclass(frozen=True, slots=True)
class _Objective:
    """Quantity to minimise: the time, or with a limit on the time the fill of the fullest shard."""

    limit_s: float | None = None

    def allows(self, partial: _PartialPartition) -> bool:
        return self.limit_s is None or partial.worst_s <= self.limit_s

    def weight(self, partial: _PartialPartition, *, continues: bool) -> tuple[float, ...]:
        """Return what the rest of the partition depends on; ``continues``: the next shard joins the current stage."""
        if self.limit_s is not None:  # complete stages are within the limit: their times no longer matter
            return (partial.fill, partial.stage_s) if continues else (partial.fill,)
        return (partial.done_s, partial.stage_s) if continues else (partial.worst_s,)

    def best(self, partials: list[_PartialPartition]) -> _PartialPartition | None:
        if self.limit_s is None:
            return min(partials, key=lambda partial: (partial.worst_s, partial.fill, partial.cuts), default=None)
        return min(partials, key=lambda partial: (partial.fill, partial.worst_s, partial.cuts), default=None)


def _search(problem: PartitionProblem, search: _Objective) -> _PartialPartition | None:
    """Search without the limit on shared memory first, which is fast; a result within the limit is the best."""
    best = search.best(_explore(replace(problem, shared_limit_bytes=None), search))
    if best is None or problem.shared_limit_bytes is None or best.shared_bytes <= problem.shared_limit_bytes:
        return best
    return search.best(_explore(problem, search))


def _explore(problem: PartitionProblem, search: _Objective) -> list[_PartialPartition]:
    """Return the Pareto-optimal partitions of all layers, built shard by shard (dynamic programming)."""
    n_shards, room = len(problem.joins_previous), problem.shared_limit_bytes
    reached: dict[int, list[_PartialPartition]] = {0: [_PartialPartition()]}
    for shard, joins in enumerate(problem.joins_previous):
        last = shard == n_shards - 1
        continues = not last and problem.joins_previous[shard + 1]
        following: dict[int, list[_PartialPartition]] = {}
        for stop in [problem.n_layers] if last else problem.boundaries:
            candidates: list[_PartialPartition] = []
            for start, partials in reached.items():
                cost = problem.cost(shard, LayerRange(start, stop)) if start < stop else None
                if cost is not None:
                    candidates += [_extend(partial, cost, stop, same=joins) for partial in partials]
            candidates = [
                partial_
                for partial_ in candidates
                if search.allows(partial_) and (room is None or partial_.shared_bytes <= room)
            ]
            if candidates:
                weights = [
                    (*search.weight(partial_, continues=continues), *(() if room is None else (partial_.shared_bytes,)))
                    for partial_ in candidates
                ]
                following[stop] = _pareto_front(candidates, weights)
        reached = following
    return reached.get(problem.n_layers, [])


def _extend(partial: _PartialPartition, cost: RangeCost, stop: int, *, same: bool) -> _PartialPartition:
    return _PartialPartition(
        partial.done_s if same else partial.worst_s,
        partial.stage_s + cost.seconds if same else cost.seconds,
        max(partial.fill, cost.fill),
        partial.shared_bytes + cost.shared_bytes,
        (*partial.cuts, stop),
    )


def _pareto_front(partials: list[_PartialPartition], weights: list[tuple[float, ...]]) -> list[_PartialPartition]:
    """Return the partials that no other one matches or beats in every weight; of equal ones the lowest."""
    front: list[tuple[tuple[float, ...], _PartialPartition]] = []
    for weight, partial in sorted(zip(weights, partials, strict=True), key=lambda pair: (pair[0], pair[1].cuts)):
        if not any(all(a <= b for a, b in zip(other, weight, strict=True)) for other, _ in front):
            front.append((weight, partial))
    return [partial for _, partial in front]
