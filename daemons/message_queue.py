"""Message queue of a daemon's compute thread: frames in order, token masks by step, doorbells of boundary rows.

A step is computed while the supervisor still makes its masks; only sampling waits for them.  A posted step is sent
before the previous stage has finished it; only its layers wait for the rows.
Invariant: frames other than masks and rows come out in the order of the link.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from daemons.compute_lock import ComputeLock
from daemons.errors import StateError
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Shutdown
from lucevisor.protocol.steps import CancelPending, DraftStep, Masks, PlacedRows, Reset, Slice, Step
from lucevisor.protocol.transport import BlockingLink


class StepCancelled(Exception):
    """A posted step is cancelled: the supervisor took it back, dropped all sequences, or ended."""


class MessageQueue:
    """Frames of one link.  ``spin_s``: how long ``await_rows`` polls before it sleeps.

    ``place`` gets rows from the supervisor.  ``lock`` is released during every wait.
    """

    def __init__(
        self,
        link: BlockingLink,
        place: Callable[[PlacedRows, memoryview], None] = lambda rows, _: None,
        lock: ComputeLock | None = None,
    ) -> None:
        self._link, self._place = link, place
        self._lock = lock or ComputeLock()
        self._released = self._lock.released
        self._waiting: deque[Frame] = deque()  # received while a step waited for something
        self._masks: dict[int, tuple[Masks, memoryview]] = {}  # by step id
        self.spin_s = 0.0

    def receive(self) -> Frame | None:
        """Return the next frame that is neither masks nor rows, as BlockingLink.receive."""
        while True:
            frame = self._waiting.popleft() if self._waiting else self._receive()
            if frame is None or not self._store(frame):
                return frame

    def _receive(self) -> Frame | None:
        with self._released:
            return self._link.receive()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a frame or the end of the link, up to ``timeout_s``; return whether ``receive`` would not block."""
        if self._waiting:
            return True
        with self._released:
            return self._link.wait(timeout_s)

    @property
    def is_cancelling(self) -> bool:
        """True if posted steps that have not begun are to be dropped."""
        return self.is_resetting or any(isinstance(frame.message, CancelPending) for frame in self._waiting)

    @property
    def is_resetting(self) -> bool:
        """True if every sequence is to be dropped."""
        ends = any(isinstance(frame.message, Reset | Shutdown) for frame in self._waiting)
        return ends or self._link.closed_because is not None

    def await_captures(self, rows: SharedBuffer, step: Step) -> None:
        """Wait for the captures of a step, which are written or on the way.  Raises StepCancelled."""
        rows.awaited(True)
        try:
            while not (rows.rung(step.region, step.step_id) or rows.placed(step.region, step.step_id) is not None):
                if self.is_resetting:
                    raise StepCancelled(f"step {step.step_id}")
                self._check_link(rows, None)
        finally:
            rows.awaited(False)

    def await_rows(
        self, rows: SharedBuffer, region: int, step_id: int, posted: bool, computing: Callable[[], bool] = lambda: False
    ) -> float:
        """Wait until the rows of a step are there; return the seconds since then, or since the call if shorter.

        Polls for ``spin_s``, then sleeps until the bell or the link wakes it; never sleeps while ``computing`` returns
        True.  Raises StepCancelled.
        """
        began = time.monotonic()
        until = began + self.spin_s
        rows.awaited(True)
        try:
            while not (rows.rung(region, step_id) or (not posted and rows.placed(region, step_id) is not None)):
                if self.is_cancelling:
                    raise StepCancelled(f"step {step_id}")
                spins = computing() or time.monotonic() < until
                if spins and any(rows.rung(region, step_id) for _ in range(20)):
                    break
                self._check_link(rows, None if not spins else 0)
        finally:
            rows.awaited(False)
        return min(rows.since_s(region), time.monotonic() - began)

    def _check_link(self, rows: SharedBuffer, timeout_ms: int | None) -> None:
        """Queue a frame that has arrived; without a timeout sleep until there is one, or a bell is rung."""
        if (link := self._link.fileno()) >= 0 and not self._link.buffered:
            poll = select.poll()
            poll.register(link, select.POLLIN)
            for fd in rows.wake_fds:
                poll.register(fd, select.POLLIN)
            with self._released:
                ready = {fd for fd, _ in poll.poll(timeout_ms)}
                if ready - {link}:
                    rows.drain()
                if self._lock.taken:  # by another model's step: the rest is received while this thread waits for it
                    rows.awaited(False)
            if link not in ready:
                return
        frame = self._link.receive()
        if frame is not None and not self._store(frame):
            self._waiting.append(frame)

    def wait_for_masks(self, step_id: int, slices: list[Slice]) -> Tensor | None:
        """Wait for the masks of a step; return them as uint8 [rows of its masked slices, bytes].

        None if the supervisor is gone or has dropped all sequences, so that no result is read.  Raises StateError if
        they are for another number of rows.
        """
        while step_id not in self._masks:
            frame = self._receive()
            if frame is None:
                return None
            if not self._store(frame):
                self._waiting.append(frame)
                if isinstance(frame.message, Reset | Shutdown):
                    return None
        message, payload = self._masks.pop(step_id)
        n_rows = sum(1 + s.n_drafts for s in slices if s.masked)
        if message.n_rows != n_rows or message.n_rows * message.row_bytes != len(payload):
            found = f"{message.n_rows} masks of {message.row_bytes} bytes in {len(payload)}"
            raise StateError(f"step {step_id}", f"{found} came for {n_rows} rows")
        return torch.frombuffer(payload, dtype=torch.uint8).view(message.n_rows, message.row_bytes)

    def draft_step(self, step_id: int) -> DraftStep | None:
        """Return the DraftStep of a step if it is the next frame, without removing it."""
        while not self._waiting and self._link.closed_because is None and self._link.wait(0.0):
            frame = self._link.receive()
            if frame is None:
                break
            if not self._store(frame):
                self._waiting.append(frame)
        message = self._waiting[0].message if self._waiting else None
        return message if isinstance(message, DraftStep) and message.step.step_id == step_id else None

    def clear(self) -> None:
        """Drop all masks."""
        self._masks.clear()

    def _store(self, frame: Frame) -> bool:
        """Store what a step waits for; return False for any other frame."""
        match frame.message:
            case Masks() as masks:
                self._masks[masks.step_id] = masks, frame.payload
            case PlacedRows() as rows:
                self._place(rows, frame.payload)
            case _:
                return False
        return True
