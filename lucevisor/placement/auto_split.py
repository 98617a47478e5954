"""Chooses the layer split for "auto": by speed if the devices were measured and a split fits, else by memory.

Invariant: ranges chosen by speed fit the reference context, so ``compute_sizes`` finds sizes for them that fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lucevisor.config.sections import Goal
from lucevisor.model.values import LayerRange
from lucevisor.placement.devices import HOST, memories_of
from lucevisor.placement.partition import Partition, PartitionProblem, RangeCost, fastest_partition
from lucevisor.placement.ranges import check_boundaries, check_count, legal_boundaries
from lucevisor.placement.sizer import SizingInputs
from lucevisor.placement.sizing import RangeMemory, ranges_by_memory, reference_load
from lucevisor.placement.speeds import SpeedModel


@dataclass(frozen=True, slots=True)
class AutoSplit:
    """An automatic split.  ``found`` is None when it was chosen by memory, ``speed_model`` when speeds are unknown."""

    ranges: tuple[LayerRange, ...]
    goal: Goal
    speed_model: SpeedModel | None = None
    found: Partition | None = None


def automatic(inputs: SizingInputs, speed_model: SpeedModel | None, goal: Goal) -> AutoSplit:
    """Choose the ranges.  Raises SplitError when there are too many devices."""
    found = None if speed_model is None else split_by_speed(inputs, speed_model, goal)
    return AutoSplit(ranges_by_memory(inputs) if found is None else found.ranges, goal, speed_model, found)


def split_by_speed(inputs: SizingInputs, speed_model: SpeedModel, goal: Goal) -> Partition | None:
    """Return the fastest split that fits, None if none does.  Raises SplitError when there are too many devices.

    ``latency`` minimises the sum of all times, ``throughput`` the time of the slowest stage.
    """
    problem = partition_problem(inputs, speed_model, goal)
    check_count(len(inputs.targets), inputs.spec.n_layers)
    check_boundaries(len(inputs.targets), problem.boundaries)
    return fastest_partition(problem)


def partition_problem(inputs: SizingInputs, speed_model: SpeedModel, goal: Goal) -> PartitionProblem:
    """Return the problem for :func:`fastest_partition`."""
    spec, targets = inputs.spec, inputs.targets
    range_memory = RangeMemory(inputs, *reference_load(inputs))
    room = {
        memory.name: None if memory.usable_bytes is None else memory.usable_bytes - range_memory.reserved[memory.name]
        for memory in memories_of(targets).values()
    }
    host = room.get(HOST)
    sharers = Counter(target.memory for target in targets)  # of all memories, only the host's can have several

    def cost(i: int, layers: LayerRange) -> RangeCost | None:
        taken, memory = range_memory.n_bytes(i, layers), targets[i].memory
        usable = room[memory]
        if usable is not None and taken > usable:
            return None
        return RangeCost(
            speed_model.request_s(i, layers), range_memory.share(i, layers), taken if sharers[memory] > 1 else 0
        )

    same = [i > 0 and (goal == "latency" or target.device.group == targets[i - 1].device.group)
            for i, target in enumerate(targets)]  # fmt: skip
    boundaries = legal_boundaries(spec.n_layers, spec.legal_boundary)
    return PartitionProblem(spec.n_layers, boundaries, same, cost, host if sharers[HOST] > 1 else None)
