"""Doorbells: how a stage tells the next one that the rows of a step are in their region, without the supervisor.

Each region of an arena has a bell in the arena's last page: the step rung for, and when.  The reader polls it for a
while, then sleeps on an event descriptor.  Knows no tensors, no frames.
Invariants: a bell is rung after the rows are there, and has one writer; a bell left by a process that died is of a step
that is never announced again, so nobody waits for it.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from typing import Final

SLOT_BYTES: Final = 64  # a cache line each: the reader of one does not slow the writer of another
ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine's stores become visible in order: a bell must not be seen before the rows."""


class Doorbells:
    """The bells of an arena over ``page``, and ``wake_fd``, an eventfd that this object owns; -1: nobody sleeps."""

    def __init__(self, page: memoryview, wake_fd: int) -> None:
        self._numbers = page.cast("Q")
        self.wake_fd = wake_fd

    @staticmethod
    def make_wake_fd() -> int:
        """Return a descriptor on which the reader of an arena sleeps; both its stages have it."""
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self, region: int, step_id: int) -> None:
        """Say that the rows of a step are there."""
        at = region * (SLOT_BYTES // 8)
        self._numbers[at + 1] = time.monotonic_ns()
        self._numbers[at] = step_id
        if self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)

    def rung(self, region: int, step_id: int) -> bool:
        """Whether the rows of a step are there."""
        return self._numbers[region * (SLOT_BYTES // 8)] == step_id

    def since_s(self, region: int) -> float:
        """Seconds since a region's bell was rung."""
        return (time.monotonic_ns() - self._numbers[region * (SLOT_BYTES // 8) + 1]) / 1e9

    def drain(self) -> None:
        """Let the next sleep last until the next ring.  Look at the bell after this."""
        with suppress(BlockingIOError):  # nobody rang
            os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._numbers.release()
        if self.wake_fd >= 0:
            os.close(self.wake_fd)
            self.wake_fd = -1
