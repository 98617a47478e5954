"""Saves and restores beside the compute thread: threads that copy while steps go on.

The compute thread only queues an order.  Knows no sequences and decides nothing: the supervisor sees to it that no step
writes what is being saved, or uses what is being restored.  Invariants: every order is answered once, after its last
byte moved or its first error, and its descriptor is closed before that; when :meth:`Transfers.cancel` returns, no page
is written any more, and what was cancelled is never answered as done.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from daemons.errors import DaemonError
from daemons.snapshots.state_map import Conversion, Piece, StateMap
from daemons.snapshots.streams import Lane, SnapshotFile, lane_for
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.messages import Failed
from lucevisor.protocol.transfers import Restore, Restored, Save, Saved, TransferFailed

SAVE_NICE = 10
"""Saving threads yield to the compute thread where cores are few; a restore is waited for."""
MAX_WAITING = 64
"""Orders at once; each holds a descriptor."""

Answer = Saved | Restored | TransferFailed | Failed
Work = Piece | Conversion


class CancelledError(DaemonError):
    """The transfer was stopped before its end."""


@dataclass(slots=True)
class _Job:
    """One order.  ``events``: what the compute thread had queued on each device when the order came."""

    order: Save | Restore
    fd: int
    events: dict[torch.device, torch.cuda.Event]
    started_s: float = field(default_factory=time.monotonic)
    cancelled: str = ""
    error: Exception | None = None
    details: str = ""
    n_parts: int = 1
    n_bytes: int = 0
    converted: str = ""

    def before(self, device: torch.device) -> list[torch.cuda.Event]:
        """What must be done before memory of ``device`` is touched; any GPU may be copying to or from the host's."""
        return list(self.events.values()) if device.type == "cpu" else [self.events[device]]

    @property
    def what(self) -> str:
        return f"{'save' if isinstance(self.order, Save) else 'restore'} {self.order.transfer}"


class Transfers:
    """``answer(message, request_id)`` sends an answer, from any thread.  ``broken()`` is called when a device failed in
    a way that no later call survives.  ``tick`` is told each tensor before a system call on the file."""

    def __init__(
        self,
        states: StateMap,
        answer: Callable[[Answer, int], None],
        *,
        group: str = "",
        broken: Callable[[], None] = lambda: None,
        tick: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._states, self._answer, self._group, self._broken, self._tick = states, answer, group, broken, tick
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        n_cores = len(os.sched_getaffinity(0))
        self._saving = _Crew("save", max(1, min(2, n_cores // 4)), SAVE_NICE)
        self._restoring = _Crew("restore", max(1, min(4, n_cores // 4)), 0)

    def take(self, order: Save | Restore, fd: int) -> None:
        """Queue an order; takes the descriptor over."""
        job = _Job(order, fd, self._events())
        with self._changed:
            full = len(self._jobs) >= MAX_WAITING
            if not full:
                self._jobs[id(job)] = job
        if full:
            job.error = CancelledError(
                order.file, f"{MAX_WAITING} transfers are waiting already", "send it again later"
            )
            self._conclude(job)
        else:
            (self._saving if isinstance(order, Save) else self._restoring).put(lambda lanes: self._begin(job, lanes))

    def cancel(self, reason: str) -> None:
        """Stop every transfer between two pieces; returns when no page is written any more.

        A save that hangs in a system call is not waited for: it reads pages, and is answered as failed in any case.
        """
        with self._changed:
            for job in self._jobs.values():
                job.cancelled = reason
            self._changed.wait_for(lambda: not any(isinstance(j.order, Restore) for j in self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- in the threads

    def _begin(self, job: _Job, lanes: _Lanes) -> None:
        """Find the pieces, deal them out to the crew, do the first part."""
        crew = self._saving if isinstance(job.order, Save) else self._restoring
        try:
            self._check(job)
            work = self._find(job)
        except Exception as error:
            self._fail(job, error)
            work = []
        parts = _deal(work, crew.n_threads)
        job.n_parts = len(parts)
        for part in parts[1:]:
            crew.put(lambda lanes, part=part: self._do(job, part, lanes))  # type: ignore[misc]  # mypy and defaults
        self._do(job, parts[0], lanes)

    def _find(self, job: _Job) -> list[Work]:
        order = job.order
        if isinstance(order, Save):
            return list(self._states.to_save(order.place, order.tensors))
        pieces, conversions = self._states.to_restore(order.place, order.tensors)
        job.converted = ", ".join(sorted({c.formats for c in conversions}))
        return [*pieces, *conversions]

    def _do(self, job: _Job, part: Sequence[Work], lanes: _Lanes) -> None:
        """Move a part of a job; whoever ends its last part answers."""
        n_bytes = 0

        def tick(tensor: str) -> None:
            self._check(job)
            self._tick(tensor)

        try:
            file = SnapshotFile(job.fd, job.order.file, tick)
            used: dict[torch.device, Lane] = {}
            for work in part:
                lane = used.get(work.device)
                if lane is None:
                    lane = used[work.device] = lanes.get(work.device)
                    for event in job.before(work.device):
                        lane.wait_for(event)
                if isinstance(work, Conversion):
                    lane.convert(work, file)
                elif isinstance(job.order, Save):
                    lane.save(work, file)
                else:
                    lane.restore(work, file)
                n_bytes += work.n_bytes
            for lane in used.values():
                lane.finish(file)
        except Exception as error:
            self._fail(job, error)
            try:
                lanes.drop()
            except RuntimeError as worse:  # the device is lost; the job has its error already
                self._fail(job, worse)
        with self._changed:
            job.n_bytes += n_bytes
            job.n_parts -= 1
            last = job.n_parts == 0
        if last:
            self._conclude(job)

    def _check(self, job: _Job) -> None:
        if job.cancelled:
            raise self._cancelled(job)
        if job.error is not None:
            raise CancelledError(job.order.file, "another part of it failed", "see there")

    @staticmethod
    def _cancelled(job: _Job) -> CancelledError:
        return CancelledError(job.order.file, f"cancelled: {job.cancelled}", "nothing to do")

    def _fail(self, job: _Job, error: Exception) -> None:
        with self._changed:
            if job.error is None:
                job.error, job.details = error, traceback.format_exc()

    def _conclude(self, job: _Job) -> None:
        os.close(job.fd)
        if job.cancelled and job.error is None:  # its last piece was under way; the pages may be somebody else's by now
            job.error = self._cancelled(job)
        seconds = time.monotonic() - job.started_s
        transfer = job.order.transfer
        answer: Answer
        if job.error is not None:
            answer = self._failed(job, job.error)
        elif isinstance(job.order, Save):
            answer = Saved(transfer, job.n_bytes, seconds)
        else:
            answer = Restored(transfer, job.n_bytes, seconds, job.converted)
        try:
            self._answer(answer, transfer)
        except LinkClosed:
            pass  # the supervisor is gone; the main loop sees it too
        finally:
            with self._changed:
                self._jobs.pop(id(job), None)
                self._changed.notify_all()
        if isinstance(answer, Failed):
            self._broken()

    def _failed(self, job: _Job, error: Exception) -> TransferFailed | Failed:
        device_failed = False
        if isinstance(error, DaemonError):
            where, reason, advice = error.where, error.reason, error.advice
        else:
            where, reason = job.order.file, f"{type(error).__name__}: {error}"
            advice = "serving goes on without this snapshot; report it with the log if it comes again"
            out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            device_failed = (
                isinstance(error, RuntimeError) and not out_of_memory and bool(job.events)
            )  # a GPU that failed
        where = f"group {self._group} {where}" if self._group else where
        if device_failed:
            return Failed(job.what, where, reason, advice, details=job.details)
        return TransferFailed(job.order.transfer, where, reason, advice, details=job.details)

    def _events(self) -> dict[torch.device, torch.cuda.Event]:
        events = {}
        for device in self._states.devices:
            if device.type != "cpu":
                events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                events[device].record(torch.cuda.current_stream(device))
        return events


def _deal(work: Sequence[Work], n: int) -> list[list[Work]]:
    """The work in at most ``n`` parts of about the same bytes, each in the order of the file."""
    if n == 1 or len(work) < 2:
        return [list(work)]
    share = sum(w.n_bytes for w in work) / n
    parts: list[list[Work]] = [[]]
    taken = 0
    for w in work:
        if parts[-1] and taken >= share * len(parts) and len(parts) < n:
            parts.append([])
        parts[-1].append(w)
        taken += w.n_bytes
    return parts


class _Lanes:
    """The lanes of one thread, made when a device is first used."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Lane] = {}

    def get(self, device: torch.device) -> Lane:
        if device not in self._made:
            self._made[device] = lane_for(device)
        return self._made[device]

    def drop(self) -> None:
        for lane in self._made.values():
            lane.drop()


class _Crew:
    """Threads that take work from one queue; started with the first of it.  They end with the process."""

    def __init__(self, name: str, n_threads: int, nice: int) -> None:
        self.n_threads, self._name, self._nice = n_threads, name, nice
        self._queue: SimpleQueue[Callable[[_Lanes], None]] = SimpleQueue()
        self._started = False

    def put(self, work: Callable[[_Lanes], None]) -> None:
        if not self._started:  # only the compute thread puts the first
            self._started = True
            for i in range(self.n_threads):
                threading.Thread(target=self._run, name=f"{self._name} {i}", daemon=True).start()
        self._queue.put(work)

    def _run(self) -> None:
        if self._nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)  # of this thread alone
        lanes = _Lanes()
        with torch.inference_mode():
            while True:
                self._queue.get()(lanes)
