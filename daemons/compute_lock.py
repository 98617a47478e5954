"""The lock of a daemon's compute threads, one for each model whose shards the daemon holds.

A thread has it except while it waits for a frame, for rows or for another daemon, so torch, the kernels and their
scratch memory see one thread at a time.  Imports no torch.
Invariant: threads get the lock in the order in which they asked for it.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class ComputeLock:
    """``with lock`` takes it, ``with lock.released`` gives it up meanwhile."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released when its thread has the lock
        self.released = _Released(self)

    def acquire(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    @property
    def taken(self) -> bool:
        """True if a thread has it."""
        return self._taken

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class _Released:
    def __init__(self, lock: ComputeLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.acquire()
