"""What single tokens do to a shard's recurrent states, and the states that are made of it.

A verified token's update takes a hundredth of a state's bytes, and has the row of the state after it, which for a draft
is not there; of all those of a slice one state is made, when it is known which one the sequence goes on with.  The
device waits for that between drafts and the next step, and the same rows come again and again: on a GPU their launches
are captured.  Knows rows, no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from daemons.cuda_graphs import RepeatedLaunches
from daemons.device import allocating, launching
from daemons.ops.operations import MAX_DECODE_TOKENS

ApplyUpdates = Callable[[Tensor, Tensor, int, Tensor, int], None]
"""See :func:`daemons.ops.delta_rule.apply_updates`."""


class StateUpdates:
    """Of one device."""

    def __init__(self, device: torch.device, apply: ApplyUpdates) -> None:
        self.device, self._apply = device, apply
        # Stacks [layers, rows, ...] of what is written whole after each token; on a cpu arrays, which numpy copies in
        # half of the time that torch takes when neither is in the cache (10 instead of 20 us).
        self._windows: list[Any] = []
        self._stacks: list[tuple[Tensor, Tensor]] = []  # matrices and updates, [layers, rows, ...]
        self._by_layer: dict[int, Tensor] = {}
        self.launches = RepeatedLaunches(device, "states of verified tokens are made")
        rows = torch.empty(MAX_DECODE_TOKENS, dtype=torch.int64)  # those of a cpu, kept for the same reason
        self._rows, self._first_rows = rows.numpy(), [rows[:n] for n in range(MAX_DECODE_TOKENS + 1)]

    def allocate(self, matrices: Tensor, n_rows: int, width: int, layers: Sequence[int], what: str) -> None:
        """Rows for the states of ``matrices`` [layers, states, ...], and more behind them.  Raises DeviceError."""
        extent = (len(layers), n_rows, width)
        advice = "lower the number of sequences or of cached states, or give this device fewer layers"
        with allocating(self.device, f"updates of {what}", 4 * prod(extent), advice):
            updates = torch.zeros(extent, device=self.device)
        self._by_layer |= dict(zip(layers, updates.unbind(0), strict=True))
        self._stacks.append((matrices, updates))

    def add_windows(self, stacks: Sequence[Tensor]) -> None:
        """Also make the rows of stacks [layers, rows, ...] that are written whole after each token."""
        on_host = self.device.type == "cpu"
        self._windows += [stack.view(torch.uint8).numpy() for stack in stacks] if on_host else stacks

    def of_layer(self, layer: int) -> Tensor:
        """Updates of a layer, ``[rows, width]``."""
        return self._by_layer[layer]

    def apply(self, source: int, rows: Sequence[int], target: int, window: int | None = None) -> None:
        """Make a state from another one, or in its place, and the updates of tokens, in order.

        ``window``: the row whose windows it gets; None: it has them.
        """
        windows = [] if window is None else self._windows
        if not self._stacks and not windows:
            return
        key = source, target, window, *rows
        with launching(self.device):
            if self.launches.replay(key):
                return
            at = self._at(rows)

            def work() -> None:
                for matrices, updates in self._stacks:
                    self._apply(matrices, updates, source, at, target)
                for stack in windows:
                    stack[:, target] = stack[:, window]

            self.launches.launch(key, work)

    def _at(self, rows: Sequence[int]) -> Tensor:
        """Rows on the device; on a cpu valid until the next call."""
        n = len(rows)
        if self.device.type == "cpu" and n < len(self._first_rows):
            self._rows[:n] = rows
            return self._first_rows[n]
        at = torch.tensor(rows, dtype=torch.int64)
        return at if self.device.type == "cpu" else at.pin_memory().to(self.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return sum(updates.nbytes for _, updates in self._stacks)
