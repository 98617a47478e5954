"""Finds the fastest partition of the layers that fits, by dynamic programming over the shards.

Knows no model and no device, only the cost of a range on a shard.  Invariant: a partition covers every layer once,
fits, and is at most SLACK slower than the fastest one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lucevisor.model.values import LayerRange

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
    """What is minimised: the time, or with a limit on the time how full the fullest shard is."""

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
    found = search.best(_explore(replace(problem, shared_limit_bytes=None), search))
    if found is None or problem.shared_limit_bytes is None or found.shared_bytes <= problem.shared_limit_bytes:
        return found
    return search.best(_explore(problem, search))


def _explore(problem: PartitionProblem, search: _Objective) -> list[_PartialPartition]:
    """Return the Pareto-optimal partitions of all layers, built shard by shard (dynamic programming)."""
    n_shards, room = len(problem.joins_previous), problem.shared_limit_bytes
    reached: dict[int, list[_PartialPartition]] = {0: [_PartialPartition()]}
    for shard, same in enumerate(problem.joins_previous):
        last = shard == n_shards - 1
        continues = not last and problem.joins_previous[shard + 1]
        following: dict[int, list[_PartialPartition]] = {}
        for stop in [problem.n_layers] if last else problem.boundaries:
            found: list[_PartialPartition] = []
            for start, partials in reached.items():
                cost = problem.cost(shard, LayerRange(start, stop)) if start < stop else None
                if cost is not None:
                    found += [_extend(partial, cost, stop, same=same) for partial in partials]
            found = [w for w in found if search.allows(w) and (room is None or w.shared_bytes <= room)]
            if found:
                weights = [
                    (*search.weight(w, continues=continues), *(() if room is None else (w.shared_bytes,)))
                    for w in found
                ]
                following[stop] = _pareto_front(found, weights)
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
    kept: list[tuple[tuple[float, ...], _PartialPartition]] = []
    for weight, partial in sorted(zip(weights, partials, strict=True), key=lambda pair: (pair[0], pair[1].cuts)):
        if not any(all(a <= b for a, b in zip(other, weight, strict=True)) for other, _ in kept):
            kept.append((weight, partial))
    return [partial for _, partial in kept]
