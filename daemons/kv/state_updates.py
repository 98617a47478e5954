"""Rank-1 updates of a shard's recurrent states by single tokens, from which the state after an accepted draft is made.

An update takes a hundredth of a state's bytes, so a verify slice stores updates instead of a state for each draft.
Once it is known which drafts are accepted, one state is computed from them.  On a GPU these launches are captured,
because the device waits for them between verification and the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from daemons import parking
from daemons.cuda_graphs import RepeatedLaunches
from daemons.device import allocating, launching

ApplyUpdates = Callable[[Tensor, Tensor, int, Tensor, int], None]
"""See :func:`daemons.ops.delta_rule.apply_updates`."""


class StateUpdates:
    """The updates of one device, in rows with the ids of states."""

    def __init__(self, device: torch.device, apply: ApplyUpdates, state_rows: int = 1) -> None:
        """``state_rows``: state s is in row ``s * state_rows``."""
        self.device, self._apply, self._state_rows = device, apply, state_rows
        self.nbytes = 0
        self._windows: list[Tensor] = []  # stacks [layers, rows, ...] of what is written whole after each token
        self._stacks: list[tuple[Tensor, Tensor]] = []  # matrices and updates, [layers, rows, ...]
        self._by_layer: dict[int, Tensor] = {}
        self.launches = RepeatedLaunches(device, "states of verified tokens are made")

    def allocate(self, n_layers: int, n_rows: int, width: int, what: str) -> Tensor:
        """Allocate rows for the states of some layers and of drafts.  Raises DeviceError."""
        extent = (n_layers, n_rows, width)
        advice = "lower the number of sequences or of cached states, or give this device fewer layers"
        with allocating(self.device, f"updates of {what}", 4 * prod(extent), advice):
            updates = parking.zeros(extent, torch.float32, self.device)
        self.nbytes += updates.nbytes
        return updates

    def add(self, matrices: Tensor, updates: Tensor, layers: Sequence[int]) -> None:
        """Add the ``matrices`` [layers, rows, ...] of some layers, and their updates."""
        self._by_layer |= dict(zip(layers, updates.unbind(0), strict=True))
        self._stacks.append((matrices, updates))

    def add_windows(self, stacks: Sequence[Tensor]) -> None:
        """Add stacks [layers, rows, ...] (convolution windows) that are written whole after each token."""
        self._windows += stacks

    def of_layer(self, layer: int) -> Tensor:
        """Updates of a layer, ``[rows, width]``."""
        return self._by_layer[layer]

    def apply(self, source: int, rows: Sequence[int], target: int, window: int | None = None) -> None:
        """Compute state ``target`` from state ``source`` and the updates in ``rows``, in order.

        ``window``: the row whose convolution windows it gets; None if it has them.
        """
        windows = [] if window is None else self._windows
        if not self._stacks and not windows:
            return
        key = source, target, window, *rows
        with launching(self.device):
            if self.launches.replay(key):
                return
            n = self._state_rows
            at, of, to, last = self._at([n * row for row in rows]), n * source, n * target, n * (window or 0)

            def work() -> None:
                for matrices, updates in self._stacks:
                    self._apply(matrices, updates, of, at, to)
                for stack in windows:
                    stack[:, to] = stack[:, last]

            self.launches.launch(key, work)

    def _at(self, rows: Sequence[int]) -> Tensor:
        """Rows on the device."""
        at = torch.tensor(rows, dtype=torch.int64)
        return at if self.device.type == "cpu" else at.pin_memory().to(self.device, non_blocking=True)
