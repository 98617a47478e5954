"""Layer ranges that take the least time and fit: a search over all of them, shard by shard.

Knows no model and no device, only what a range costs on a shard.  Invariant: what is returned covers every layer once,
fits, and takes no more than SLACK longer than the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lucevisor.model.values import LayerRange

SLACK = 0.03
"""Splits whose times lie this close count as equally fast, since measuring is no better: the least full is taken."""


@dataclass(frozen=True, slots=True)
class Price:
    """One range on one shard: seconds, share of its memory that it fills, bytes of a memory it shares with others."""

    seconds: float
    fullness: float
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """``places``: where the chain may be cut.  ``price``: None when the range does not fit there.

    ``same_stage[i]``: shard i works in one call with the one before it, so that their times add up; what is made small
    is the largest sum.  With all of them True that is the time of the whole chain.  ``shared_room``: bytes of the
    memory that several shards share; None: no limit.
    """

    n_layers: int
    places: Sequence[int]
    same_stage: Sequence[bool]
    price: Callable[[int, LayerRange], Price | None]
    shared_room: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The ranges and the time of their slowest stage; ``best_s`` is the least that any split takes."""

    ranges: tuple[LayerRange, ...]
    seconds: float
    best_s: float


@dataclass(frozen=True, slots=True)
class _Way:
    """Shards so far: slowest stage that is complete, the stage under way, fullest shard, shared bytes, cuts."""

    done_s: float = 0.0
    stage_s: float = 0.0
    fullness: float = 0.0
    shared_bytes: int = 0
    cuts: tuple[int, ...] = (0,)

    @property
    def worst_s(self) -> float:
        return max(self.done_s, self.stage_s)


def fastest(problem: Problem, slack: float = SLACK) -> Found | None:
    """Choose the ranges; None when none fit.

    Of all within ``slack`` of the least time, one whose fullest shard is least full.
    """
    best = _least(problem, _Search())
    if best is None:
        return None
    chosen = _least(problem, _Search(limit_s=best.worst_s * (1 + slack))) or best
    ranges = tuple(LayerRange(a, b) for a, b in pairwise(chosen.cuts))
    return Found(ranges, chosen.worst_s, best.worst_s)


@dataclass(frozen=True, slots=True)
class _Search:
    """What is made small: the time, or with a limit on that the fullest shard's fullness."""

    limit_s: float | None = None

    def allows(self, way: _Way) -> bool:
        return self.limit_s is None or way.worst_s <= self.limit_s

    def weight(self, way: _Way, *, continues: bool) -> tuple[float, ...]:
        """All of a way that what follows can depend on; ``continues``: the next shard adds to the stage under way."""
        if self.limit_s is not None:  # a stage that is complete was allowed, and that is all that matters of it
            return (way.fullness, way.stage_s) if continues else (way.fullness,)
        return (way.done_s, way.stage_s) if continues else (way.worst_s,)

    def best(self, ways: list[_Way]) -> _Way | None:
        if self.limit_s is None:
            return min(ways, key=lambda way: (way.worst_s, way.fullness, way.cuts), default=None)
        return min(ways, key=lambda way: (way.fullness, way.worst_s, way.cuts), default=None)


def _least(problem: Problem, search: _Search) -> _Way | None:
    """Search without the limit on shared memory first, which is quick; when what it finds is within, it is the best."""
    found = search.best(_walk(replace(problem, shared_room=None), search))
    if found is None or problem.shared_room is None or found.shared_bytes <= problem.shared_room:
        return found
    return search.best(_walk(problem, search))


def _walk(problem: Problem, search: _Search) -> list[_Way]:
    """The ways to the end that no other way makes pointless, shard by shard (dynamic programming)."""
    n_shards, room = len(problem.same_stage), problem.shared_room
    reached: dict[int, list[_Way]] = {0: [_Way()]}
    for shard, same in enumerate(problem.same_stage):
        last = shard == n_shards - 1
        continues = not last and problem.same_stage[shard + 1]
        following: dict[int, list[_Way]] = {}
        for stop in [problem.n_layers] if last else problem.places:
            found: list[_Way] = []
            for start, ways in reached.items():
                price = problem.price(shard, LayerRange(start, stop)) if start < stop else None
                if price is not None:
                    found += [_further(way, price, stop, same=same) for way in ways]
            found = [w for w in found if search.allows(w) and (room is None or w.shared_bytes <= room)]
            if found:
                weights = [
                    (*search.weight(w, continues=continues), *(() if room is None else (w.shared_bytes,)))
                    for w in found
                ]
                following[stop] = _undominated(found, weights)
        reached = following
    return reached.get(problem.n_layers, [])


def _further(way: _Way, price: Price, stop: int, *, same: bool) -> _Way:
    return _Way(
        way.done_s if same else way.worst_s,
        way.stage_s + price.seconds if same else price.seconds,
        max(way.fullness, price.fullness),
        way.shared_bytes + price.shared_bytes,
        (*way.cuts, stop),
    )


def _undominated(ways: list[_Way], weights: list[tuple[float, ...]]) -> list[_Way]:
    """Of ways to one place those that no other is at least as good as in every weight; of equal ones the lowest."""
    kept: list[tuple[tuple[float, ...], _Way]] = []
    for weight, way in sorted(zip(weights, ways, strict=True), key=lambda pair: (pair[0], pair[1].cuts)):
        if not any(all(a <= b for a, b in zip(other, weight, strict=True)) for other, _ in kept):
            kept.append((weight, way))
    return [way for _, way in kept]
