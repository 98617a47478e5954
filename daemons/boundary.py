"""Boundary activations (pipeline parallelism's intermediate tensors) from one stage to the next: one region per step.

Invariant: when ``write`` returns, the bytes are where the next stage reads them, unless ``wait`` is False.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from daemons import device as devices
from daemons.deferred import QueuedStep, recorded
from daemons.errors import DeviceError, LoadError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype
from lucevisor.protocol.arena import Arena, Doorbells
from lucevisor.protocol.loading import Load
from lucevisor.protocol.steps import Step

RowWait = Callable[[Doorbells, int, int], float]
"""Waits for the rows of a region and step; see Inbox.await_rows."""


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


class BoundaryBuffer(Protocol):
    """The rows between two stages, in any memory."""

    @property
    def bells(self) -> Doorbells:
        """The doorbells, which name the step whose rows are in each region."""

    def read(self, region: int, n_rows: int) -> Tensor:
        """Return the rows ``[n_rows, width]`` that the previous stage wrote, on the cpu; valid during the step."""

    def write(self, region: int, rows: Tensor, *, wait: bool = True) -> None:
        """Copy ``rows`` ``[T, width]``, on any device, to where the next stage reads them.

        Without ``wait`` it returns at once, and the caller waits for the device before the doorbell is rung.
        """

    def close(self) -> None:
        """Release the memory; idempotent."""


class SharedMemoryBuffer:
    """Rows in an arena that both neighbours map; ``pinned``: registered with the device driver for its copies."""

    def __init__(self, arena: Arena, dtype: Dtype, width: int, *, pinned: bool = False) -> None:
        self._arena, self._dtype, self._width = arena, dtype, width
        self._locked = pinned and devices.register_host(arena.view())
        self._last: dict[int, Tensor] = {}  # by region: its rows when it was used last

    @property
    def bells(self) -> Doorbells:
        return self._arena.bells

    def read(self, region: int, n_rows: int) -> Tensor:
        """Return a view of the region.  Raises DeviceError when the rows do not fit."""
        last = self._last.get(region)
        if last is not None and last.shape[0] == n_rows:
            return last
        buffer, dtype = self._arena.region(region), devices.torch_dtype(self._dtype)
        n_bytes = n_rows * self._width * dtype.itemsize
        if n_bytes > len(buffer):
            raise DeviceError(
                "arena region",
                f"{n_rows} rows of {self._width} {self._dtype.value} take {n_bytes} bytes, "
                f"the region has {len(buffer)}",
                "send fewer tokens in a step: max_step_tokens and the arena's region size disagree",
            )
        if n_rows == 0:
            return torch.empty(0, self._width, dtype=dtype)
        rows = torch.frombuffer(buffer, dtype=dtype, count=n_rows * self._width).view(n_rows, self._width)
        self._last[region] = rows
        return rows

    def write(self, region: int, rows: Tensor, *, wait: bool = True) -> None:
        """Copy into the region.  Raises DeviceError when the rows do not fit."""
        self.read(region, rows.shape[0]).copy_(rows, non_blocking=True)
        if wait:
            devices.synchronize(rows.device)

    def close(self) -> None:
        """Release the arena."""
        if self._locked:
            devices.unregister_host(self._arena.view())
        self._locked = False
        self._last.clear()
        self._arena.close()


def boundary_rows(
    boundaries: Sequence[BoundaryBuffer], source: int | None, step: Step, await_rows: RowWait | None
) -> tuple[Tensor | None, RowArrival]:
    """Return the rows that the previous stage writes for a step, and their arrival; None for the first stage."""
    if source is None:
        return None, RowArrival()
    boundary = boundaries[source]
    rows = boundary.read(step.region, step.n_tokens)
    if await_rows is None:
        return rows, RowArrival()
    return rows, RowArrival(partial(await_rows, boundary.bells, step.region, step.step_id))


def write_boundary_rows(boundary: BoundaryBuffer, step: Step, rows: Tensor, *, wait: bool) -> QueuedStep | None:
    """Write the rows of a step for the next stage and ring its doorbell.

    Without ``wait`` the returned QueuedStep rings it.
    """
    boundary.write(step.region, rows, wait=wait)
    if not wait:
        return QueuedStep(recorded(rows.device), boundary.bells, step.region, step.step_id)
    boundary.bells.ring(step.region, step.step_id)
    return None


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
