"""KV transfers beside the compute thread: threads that save and restore state while steps run.

The compute thread only submits transfers.  Knows no sequences and decides nothing: the supervisor guarantees that no
step writes what is being saved or uses what is being restored.  Invariants: every transfer is answered once, after its
last byte or its first error, with its file closed; once :meth:`TransferExecutor.cancel` returns, no page is
written any more, and a cancelled transfer is never answered as done.
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
from daemons.snapshots.state_map import Conversion, StateMap, StateSegment
from daemons.snapshots.streams import CopyStream, SnapshotIO, copy_stream_for
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.files import ByteFile
from lucevisor.protocol.messages import Failed, Restore, Restored, Save, Saved, TransferFailed
from lucevisor.protocol.threads import StartedThread, lower_priority

MAX_PENDING = 64
"""Pending transfers; each holds a file."""

Answer = Saved | Restored | TransferFailed | Failed
Work = StateSegment | Conversion


class CancelledError(DaemonError):
    """The transfer was cancelled."""


@dataclass(slots=True)
class _Job:
    """One transfer.  ``events``: recorded on each device's stream when the transfer was submitted."""

    order: Save | Restore
    file: ByteFile
    events: dict[torch.device, torch.cuda.Event]
    started_s: float = field(default_factory=time.monotonic)
    cancelled: str = ""
    error: Exception | None = None
    details: str = ""
    n_parts: int = 1
    n_bytes: int = 0
    converted: str = ""

    def events_for(self, device: torch.device) -> list[torch.cuda.Event]:
        """Events to wait for before touching memory of ``device``; any GPU may be copying to or from the host."""
        return list(self.events.values()) if device.type == "cpu" else [self.events[device]]

    @property
    def description(self) -> str:
        return f"{'save' if isinstance(self.order, Save) else 'restore'} {self.order.transfer}"


class TransferExecutor:
    """``answer(message, request_id)`` sends an answer, from any thread.  ``on_broken()`` is called when no transfer
    can be relied on any more: a device failed for good, or a thread.  ``before_io(tensor)`` runs before each system
    call on a file, and may raise.  Raises MemoryError when a thread does not begin."""

    def __init__(
        self,
        states: StateMap,
        answer: Callable[[Answer, int], None],
        *,
        group: str = "",
        on_broken: Callable[[], None] = lambda: None,
        before_io: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._states, self._answer, self._group = states, answer, group
        self._on_broken, self._before_io = on_broken, before_io
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        n_cores = len(os.sched_getaffinity(0))
        # Nice, as a request waits for a restore only.
        self._saving = _Threads("save", max(1, min(2, n_cores // 4)), 10, on_broken)
        self._restoring = _Threads("restore", max(1, min(4, n_cores // 4)), 0, on_broken)

    def submit(self, order: Save | Restore, file: ByteFile) -> None:
        """Queue a transfer; takes ownership of the file."""
        self._states.wait_for_page_outs()
        if isinstance(order, Restore):
            self._states.take(order.place)
        job = _Job(order, file, self._events())
        with self._changed:
            full = len(self._jobs) >= MAX_PENDING
            if not full:
                self._jobs[id(job)] = job
        if full:
            job.error = CancelledError(
                order.file, f"{MAX_PENDING} transfers are pending already", "send it again later"
            )
            self._finish_job(job)
        else:
            (self._saving if isinstance(order, Save) else self._restoring).put(
                lambda streams: self._begin(job, streams)
            )

    def cancel(self, reason: str) -> None:
        """Cancel every transfer; returns when no page is written any more.

        Does not wait for a save that hangs in a system call: it only reads pages, and is answered as failed anyway.
        """
        with self._changed:
            for job in self._jobs.values():
                job.cancelled = reason
            self._changed.wait_for(lambda: not any(isinstance(j.order, Restore) for j in self._jobs.values()))

    def close(self) -> None:
        """End the threads, behind what was submitted."""
        for threads in (self._saving, self._restoring):
            threads.close()

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- on the worker threads

    def _begin(self, job: _Job, streams: _ThreadStreams) -> None:
        """Find the segments, distribute them over the threads, run the first part."""
        threads = self._saving if isinstance(job.order, Save) else self._restoring
        try:
            self._check(job)
            work = self._find(job)
        except Exception as error:
            self._fail(job, error)
            work = []
        parts = _partition(work, threads.n_threads)
        job.n_parts = len(parts)
        for part in parts[1:]:
            threads.put(lambda streams, part=part: self._run_part(job, part, streams))  # type: ignore[misc]  # mypy and defaults
        self._run_part(job, parts[0], streams)

    def _find(self, job: _Job) -> list[Work]:
        order = job.order
        if isinstance(order, Save):
            return list(self._states.to_save(order.place, order.tensors))
        segments, conversions = self._states.to_restore(order.place, order.tensors)
        job.converted = ", ".join(sorted({c.formats for c in conversions}))
        return [*segments, *conversions]

    def _run_part(self, job: _Job, part: Sequence[Work], streams: _ThreadStreams) -> None:
        """Run one part of a job; the thread that finishes its last part answers."""
        n_bytes = 0

        def before_io(tensor: str) -> None:
            self._check(job)
            self._before_io(tensor)

        try:
            file = SnapshotIO(job.file, job.order.file, before_io)
            used: dict[torch.device, CopyStream] = {}
            for work in part:
                stream = used.get(work.device)
                if stream is None:
                    stream = used[work.device] = streams.get(work.device)
                    for event in job.events_for(work.device):
                        stream.wait_for(event)
                if isinstance(work, Conversion):
                    stream.convert(work, file)
                elif isinstance(job.order, Save):
                    stream.save(work, file)
                else:
                    stream.restore(work, file)
                n_bytes += work.n_bytes
            for stream in used.values():
                stream.finish(file)
            file.flush()
        except Exception as error:
            self._fail(job, error)
            try:
                streams.drop()
            except RuntimeError as worse:  # the device is lost; the job keeps its first error
                self._fail(job, worse)
        with self._changed:
            job.n_bytes += n_bytes
            job.n_parts -= 1
            last = job.n_parts == 0
        if last:
            self._finish_job(job)

    def _check(self, job: _Job) -> None:
        if job.cancelled:
            raise self._cancelled(job)
        if job.error is not None:
            raise CancelledError(job.order.file, "another part of it failed", "see that error")

    @staticmethod
    def _cancelled(job: _Job) -> CancelledError:
        return CancelledError(job.order.file, f"cancelled: {job.cancelled}", "nothing to do")

    def _fail(self, job: _Job, error: Exception) -> None:
        with self._changed:
            if job.error is None:
                job.error, job.details = error, traceback.format_exc()

    def _finish_job(self, job: _Job) -> None:
        job.file.close()
        if job.cancelled and job.error is None:  # cancelled during its last segment: the pages may be reused by now
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
            pass  # the supervisor is gone; the main loop notices as well
        finally:
            with self._changed:
                self._jobs.pop(id(job), None)
                self._changed.notify_all()
        if isinstance(answer, Failed):
            self._on_broken()

    def _failed(self, job: _Job, error: Exception) -> TransferFailed | Failed:
        device_failed = False
        if isinstance(error, DaemonError):
            where, reason, advice = error.where, error.reason, error.advice
        else:
            where, reason = job.order.file, f"{type(error).__name__}: {error}"
            advice = "serving goes on without this snapshot; report it with the log if it happens again"
            out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            device_failed = (
                isinstance(error, RuntimeError) and not out_of_memory and bool(job.events)
            )  # a GPU that failed
        where = f"group {self._group} {where}" if self._group else where
        if device_failed:
            return Failed(job.description, where, reason, advice, details=job.details)
        return TransferFailed(job.order.transfer, where, reason, advice, details=job.details)

    def _events(self) -> dict[torch.device, torch.cuda.Event]:
        events = {}
        for device in self._states.devices:
            if device.type != "cpu":
                events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                events[device].record(torch.cuda.current_stream(device))
        return events


def _partition(work: Sequence[Work], n: int) -> list[list[Work]]:
    """Split the work into at most ``n`` parts of about the same size, each in file order."""
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


class _ThreadStreams:
    """The copy streams of one thread, created when a device is first used."""

    def __init__(self) -> None:
        self._made: dict[torch.device, CopyStream] = {}

    def get(self, device: torch.device) -> CopyStream:
        if device not in self._made:
            self._made[device] = copy_stream_for(device)
        return self._made[device]

    def drop(self) -> None:
        for stream in self._made.values():
            stream.drop()


class _Threads:
    """Threads that serve one queue until ``close``; ``on_lost`` is called when one of them cannot go on.

    Started with the daemon's load and not by the first transfer.  Raises MemoryError when one does not begin.
    """

    def __init__(self, name: str, n_threads: int, nice: int, on_lost: Callable[[], None]) -> None:
        self.n_threads, self._nice, self._on_lost = n_threads, nice, on_lost
        self._queue: SimpleQueue[Callable[[_ThreadStreams], None] | None] = SimpleQueue()
        for i in range(n_threads):
            StartedThread(f"{name}_{i}", self._run)

    def put(self, work: Callable[[_ThreadStreams], None]) -> None:
        self._queue.put(work)

    def close(self) -> None:
        for _ in range(self.n_threads):
            self._queue.put(None)

    def _run(self) -> None:
        try:
            if self._nice:
                lower_priority(self._nice)
            streams = _ThreadStreams()
            with torch.inference_mode():
                while (work := self._queue.get()) is not None:
                    work(streams)
                    del work  # and with it the pages that it names
        except Exception:  # a transfer answers its own errors; without this thread others would never end
            try:
                traceback.print_exc()  # before the process ends
            finally:
                self._on_lost()
