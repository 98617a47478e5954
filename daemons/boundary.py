"""Boundary activations (intermediate tensors of pipeline parallelism) between two stages: one region per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from daemons import device as devices
from daemons.errors import DeviceError, LoadError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.loading import Load
from lucevisor.protocol.steps import Step

RowWait = Callable[[SharedBuffer, int, int, bool], float]
"""Waits for the rows of a region and step; see MessageQueue.await_rows."""


@dataclass(slots=True)
class RowArrival:
    """Arrival of a step's rows: seconds waited (``waited_s``), the time ``at``, and ``hop_s`` since their doorbell."""

    wait: Callable[[], float] = lambda: 0.0
    waited_s: float = 0.0
    hop_s: float = 0.0
    at: float = 0.0

    def __call__(self) -> None:
        """Wait for them."""
        started = time.monotonic()
        self.hop_s = self.wait()
        self.at = time.monotonic()
        self.waited_s = self.at - started

    def idle_s(self, since: float) -> float:
        """Return the part of the wait in which the device was idle, from ``since`` on."""
        return max(0.0, min(self.waited_s, self.at - since))


class BoundaryBuffer:
    """The rows between two stages, ``width`` numbers each, as tensors over ``buffer``.

    ``pinned``: its memory is registered with the device driver for its copies.
    """

    def __init__(self, buffer: SharedBuffer, dtype: Dtype, width: int, *, pinned: bool = False) -> None:
        self.buffer, self._dtype, self._width = buffer, dtype, width
        self._locked = pinned and devices.register_host(buffer.view())
        self._last: dict[int, Tensor] = {}  # by region: its rows when it was used last

    def read(self, step: Step) -> Tensor:
        """Return the rows ``[T, width]`` of a step on the cpu, valid during the step.

        Raises DeviceError when they do not fit.
        """
        placed = self.buffer.placed(step.region, step.step_id)
        return self._rows(step.region, step.n_tokens) if placed is None else self._tensor(placed, step.n_tokens)

    def write(self, step: Step, rows: Tensor, *, wait: bool = True) -> None:
        """Copy ``rows`` ``[T, width]``, on any device, to the region of a step.

        Without ``wait`` it returns at once, and the caller waits for the device before it calls ``ring``.  Raises
        DeviceError when they do not fit.
        """
        self._rows(step.region, rows.shape[0]).copy_(rows, non_blocking=True)
        if wait:
            devices.synchronize(rows.device)

    def ring(self, step: Step) -> None:
        """Tell the next stage that the rows of a step are there."""
        n_bytes = step.n_tokens * self._width * devices.torch_dtype(self._dtype).itemsize
        self.buffer.ring(step.region, step.step_id, n_bytes)

    def _rows(self, region: int, n_rows: int) -> Tensor:
        last = self._last.get(region)
        if last is None or last.shape[0] != n_rows:
            last = self._last[region] = self._tensor(self.buffer.region(region), n_rows)
        return last

    def _tensor(self, memory: memoryview, n_rows: int) -> Tensor:
        dtype = devices.torch_dtype(self._dtype)
        n_bytes = n_rows * self._width * dtype.itemsize
        if n_bytes > len(memory):
            raise DeviceError(
                "arena region",
                f"{n_rows} rows of {self._width} {self._dtype.value} take {n_bytes} bytes, "
                f"the region has {len(memory)}",
                "send fewer tokens in a step: max_step_tokens and the arena's region size disagree",
            )
        if n_rows == 0:
            return torch.empty(0, self._width, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=n_rows * self._width).view(n_rows, self._width)

    def close(self) -> None:
        """Release the memory; idempotent."""
        if self._locked:
            devices.unregister_host(self.buffer.view())
        self._locked = False
        self._last.clear()
        self.buffer.close()


def boundary_rows(
    boundaries: Sequence[BoundaryBuffer], source: int | None, step: Step, await_rows: RowWait | None, *, posted: bool
) -> tuple[Tensor | None, RowArrival]:
    """Return the rows that the previous stage writes for a step, and their arrival; None for the first stage.

    Those of a step that is not ``posted`` have been written, maybe by the supervisor and elsewhere than in the region.
    """
    if source is None:
        return None, RowArrival()
    boundary = boundaries[source]
    if await_rows is None:
        return boundary.read(step), RowArrival()
    if not posted:
        await_rows(boundary.buffer, step.region, step.step_id, False)
        return boundary.read(step), RowArrival()
    return boundary.read(step), RowArrival(partial(await_rows, boundary.buffer, step.region, step.step_id, True))


def arena_width(load: Load, arena: int, spec: ModelSpec) -> int:
    """Return the width of a row in an arena.  Raises LoadError for an arena that no stage uses."""
    if not load.arenas[arena].capture:
        return spec.boundary_width
    layers = [plan.captures for plan in load.stages if plan.capture_target == arena]
    if load.draft is not None:
        layers += [source.layers for source in load.draft.sources if source.arena == arena]
    if len(layers) != 1:
        reason = f"{len(layers)} stages of this daemon write or read it instead of one"
        raise LoadError(f"arena {arena} for captures", reason, "correct the plan", configuration=True)
    return len(layers[0]) * spec.hidden_size
