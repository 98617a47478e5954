"""Boundary rows in a memfd, the input of a replay, read by several threads.

Invariant: all reads have ended when ``read`` returns or raises.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from concurrent.futures import Executor
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from daemons.device import CPU
from lucevisor.protocol.threads import ThreadExecutor

MAX_ROW_READERS = 4
MIN_PART_BYTES = 4 << 20
"""Smallest part for a thread.  One thread alone copies slower than a GPU receives."""
SLOT_BYTES = 32 << 20
N_SLOTS = 2
"""Page-locked buffers on the way to a GPU: one is filled while the other is copied."""
POLL_S = 1e-3
"""Interval of polls for rows that are still being written."""


class RowFile:
    """Boundary rows ``[n, width]`` in a memfd.

    They may still be being written: the file is complete once it is sealed against growth.
    """

    def __init__(self, fd: int, width: int, dtype: torch.dtype) -> None:
        """``fd`` is closed with this object."""
        self._fd, self._width, self._dtype = fd, width, dtype
        weakref.finalize(self, os.close, fd)

    def read(self, first: int, n: int, device: torch.device) -> Tensor:
        """Return rows ``[n, width]`` on a device, waiting until they are written; the copies run on the current stream.

        Raises OSError if the file ends before them, MemoryError if memory cannot be page-locked or a thread does not
        begin.
        """
        row_bytes = self._width * self._dtype.itemsize
        at, slots = first * row_bytes, list[_PinnedBuffer]()
        if device == CPU:
            # by numpy, which raises MemoryError where torch raises a RuntimeError
            found = torch.from_numpy(np.empty(n * row_bytes, dtype=np.uint8))
        else:
            found = torch.empty(n * row_bytes, dtype=torch.uint8, device=device)
            slots += [_PinnedBuffer() for _ in range(N_SLOTS)]
        n_readers = min(MAX_ROW_READERS, len(found) // MIN_PART_BYTES)
        with ThreadExecutor(n_readers if n_readers > 1 else 0, "row reader") as readers:
            for part in torch.split(found, SLOT_BYTES):
                while not self._is_written(at + len(part)):
                    time.sleep(POLL_S)
                if slots:
                    slots.append(slot := slots.pop(0))
                    self._fill(readers, slot.take(len(part)), at)
                    slot.copy_to(part)
                else:
                    self._fill(readers, part, at)
                at += len(part)
        return found.view(self._dtype).view(n, self._width)

    def _fill(self, readers: Executor, target: Tensor, at: int) -> None:
        """Read written bytes into host memory, with several threads if they are many."""
        view = memoryview(target.numpy())  # type: ignore[arg-type]  # torch's stub of numpy() hides the buffer
        n = min(MAX_ROW_READERS, len(view) // MIN_PART_BYTES)
        if n < 2:
            self._read(view, at)
            return
        borders = [len(view) * i // n for i in range(n + 1)]
        for done in [readers.submit(self._read, view[a:b], at + a) for a, b in pairwise(borders)]:
            done.result()

    def _read(self, view: memoryview, at: int) -> None:
        while view:
            n_read = os.preadv(self._fd, [view], at)
            if not n_read:
                raise OSError("the file of rows was cut off")
            view, at = view[n_read:], at + n_read

    def _is_written(self, n_bytes: int) -> bool:
        """Return whether the file has so many bytes yet.  Raises OSError if it never will."""
        seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
        if os.fstat(self._fd).st_size >= n_bytes:
            return True
        if seals & (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL):
            raise OSError(f"the file of rows ends before row {n_bytes // (self._width * self._dtype.itemsize)}")
        return False


class _PinnedBuffer:
    """A page-locked buffer between the file and a GPU; torch caches its memory for the next one."""

    def __init__(self) -> None:
        """Raises MemoryError."""
        try:
            self._memory = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(f"{SLOT_BYTES} bytes cannot be page-locked: {error}") from error
        self._copied: torch.cuda.Event | None = None

    def take(self, n_bytes: int) -> Tensor:
        """Return the first ``n_bytes``, once their last copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory[:n_bytes]

    def copy_to(self, target: Tensor) -> None:
        """Copy the first bytes to a GPU, on its current stream."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        self._copied = torch.cuda.current_stream(target.device).record_event()
