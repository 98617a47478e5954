"""Which split "auto" takes: by speed where the devices were measured and a split fits, else by memory.

Invariant: ranges chosen by speed fit for the reference context, so that what ``size`` makes of them fits as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lucevisor.config.sections import Goal
from lucevisor.model.values import LayerRange
from lucevisor.placement.devices import HOST, memories_of
from lucevisor.placement.fastest import Found, Price, Problem, fastest
from lucevisor.placement.ranges import check_count, check_places, legal_places
from lucevisor.placement.sizing import Case, Filling, automatic_ranges, reference
from lucevisor.placement.speeds import Clock


@dataclass(frozen=True, slots=True)
class Automatic:
    """An automatic split.  ``found`` is None when it was made by memory, ``clock`` when no speeds were known."""

    ranges: tuple[LayerRange, ...]
    goal: Goal
    clock: Clock | None = None
    found: Found | None = None


def automatic(case: Case, clock: Clock | None, goal: Goal) -> Automatic:
    """Choose the ranges.  Raises SplitError when there are too many devices."""
    found = None if clock is None else by_speed(case, clock, goal)
    return Automatic(automatic_ranges(case) if found is None else found.ranges, goal, clock, found)


def by_speed(case: Case, clock: Clock, goal: Goal) -> Found | None:
    """The fastest split that fits; None when none does.  ``latency``: the sum of all times; ``throughput``: the time of
    the slowest stage.  Raises SplitError when there are too many devices.
    """
    problem = problem_of(case, clock, goal)
    check_count(len(case.seats), case.spec.n_layers)
    check_places(len(case.seats), problem.places)
    return fastest(problem)


def problem_of(case: Case, clock: Clock, goal: Goal) -> Problem:
    """What :func:`fastest` searches."""
    spec, seats = case.spec, case.seats
    filling = Filling(case, *reference(case))
    room = {memory.name: memory.usable_bytes for memory in memories_of(seats).values()}
    host = room.get(HOST)
    if host is not None:
        room[HOST] = host = host - filling.arena_bytes()
    sharers = Counter(seat.memory for seat in seats)  # of all memories, only the host's can have several

    def price(i: int, layers: LayerRange) -> Price | None:
        taken, memory = filling.n_bytes(i, layers), seats[i].memory
        usable = room[memory]
        if usable is not None and taken > usable:
            return None
        return Price(clock.work_s(i, layers), filling.share(i, layers), taken if sharers[memory] > 1 else 0)

    same = [i > 0 and (goal == "latency" or seat.device.group == seats[i - 1].device.group)
            for i, seat in enumerate(seats)]  # fmt: skip
    places = legal_places(spec.n_layers, spec.legal_boundary)
    return Problem(spec.n_layers, places, same, price, host if sharers[HOST] > 1 else None)
