"""The write protocol of a snapshot: allocate, data by the daemons, checksums, header, fsync, rename.

Blocks on the disk; knows no index and no budget beyond the largest file.  Invariants: a file with a final name is
complete; a save that fails at any step removes its partial file and leaves all others alone; a failed fsync is never
retried, since the kernel may have dropped the pages it could not write.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from lucevisor.errors import LucevisorError
from lucevisor.model.values import LayerRange
from lucevisor.protocol.transfers import SnapshotTensor
from lucevisor.snapshots import disk
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.file_format import lay_out, pack
from lucevisor.snapshots.layout import SlotRecord, SnapshotError, SnapshotHeader, StateModel
from lucevisor.snapshots.policy import PARTIAL, SnapshotEntry, file_name

log = structlog.get_logger("snapshots")

STEPS = ("create", "allocate", "data", "size", "checksum", "header", "sync", "rename", "sync_directory", "prune")
"""Names of the write protocol's steps, in order, as passed to ``at``; ``data`` is between ``begin`` and ``finish``."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


NICE = 10


FAILED_SAVES = ("disk_full", "io", "locked", "too_large", "size", "aborted")
"""The labels of saves that failed; Fault has those of refused files."""


class SaveFailed(LucevisorError):
    """A slot could not be saved.  ``label``: one of FAILED_SAVES."""

    def __init__(self, label: str, file: str, reason: str) -> None:
        super().__init__(f"snapshot {file} was not saved: {reason}; earlier snapshots are unchanged")
        self.label, self.file, self.reason = label, file, reason


@dataclass(slots=True)
class PendingSnapshot:
    """A file being written.  Pass ``fd`` and ``tensors(...)`` to each daemon; it stays open until finish or abort."""

    file: str  # its final name
    path: Path  # its partial one
    fd: int
    snapshot: SnapshotHeader
    started_s: float
    done: bool = False

    @property
    def data_bytes(self) -> int:
        """Bytes that all daemons together must write."""
        return self.snapshot.file_bytes - self.snapshot.data_start

    def tensors(self, layers: LayerRange) -> list[SnapshotTensor]:
        return self.snapshot.of_layers(layers)

    def n_bytes(self, layers: LayerRange) -> int:
        """Bytes that a daemon with these layers writes."""
        return sum(t.n_bytes for t in self.tensors(layers))


class SnapshotWriter:
    """Writes files of ``model`` into ``directory``.  ``at`` is called before each step; ``failures`` counts failed
    saves by label."""

    def __init__(self, directory: Path, model: StateModel, at: disk.Hook, failures: Counter[str]) -> None:
        self.directory, self.model = directory, model
        self._at, self._failures = at, failures
        n_threads = 1 + min(2, os.cpu_count() or 1)  # one for fsync
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="snapshot seal", initializer=_yield)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def begin(self, slot: SlotRecord, most_bytes: int) -> PendingSnapshot:
        """Lay out and allocate a file of at most ``most_bytes``.  Raises SaveFailed, leaving nothing behind."""
        snapshot = lay_out(self.model, slot)
        file = file_name(snapshot)
        if snapshot.file_bytes > most_bytes:
            reason = f"it would take {snapshot.file_bytes} bytes, cache.disk is {most_bytes}"
            raise self._failed("too_large", file, reason)
        path = self.directory / f"{file.removesuffix('.safetensors')}.{secrets.token_hex(8)}{PARTIAL}"
        writing = PendingSnapshot(file, path, -1, snapshot, time.monotonic())
        with self._saving(writing):
            self._at("create")
            with disk.locked(self.directory):  # or another scan could remove the file before it is locked
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                writing.fd = os.open(path, flags, 0o600)
                disk.try_lock(writing.fd)
            self._at("allocate")
            os.posix_fallocate(writing.fd, 0, snapshot.file_bytes)
            self._at("data")
        return writing

    def seal(self, writing: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        """Check, seal and rename a file after the daemons reported ``n_bytes`` written.

        Raises SaveFailed, leaving nothing behind.
        """
        with self._saving(writing):
            self._at("size")
            _check_size(writing, n_bytes)
            flushed = self._pool.submit(
                os.fsync, writing.fd
            )  # in parallel with the checksums, which come from the page cache
            try:
                self._at("checksum")
                sums = disk.checksums(writing.fd, writing.snapshot.tensors, self._pool)
            finally:
                flushed.exception()  # never leave a thread behind that uses the descriptor
            flushed.result()
            self._at("header")
            writing.snapshot = replace(writing.snapshot, checksums=sums)
            disk.write_all(writing.fd, pack(writing.snapshot), 0)
            self._at("sync")
            os.fsync(writing.fd)
            status = os.fstat(writing.fd)
            self._at("rename")
            with disk.locked(self.directory):
                writing.path.rename(self.directory / writing.file)
        try:
            self._at("sync_directory")
            disk.sync_directory(self.directory)
        except OSError as error:  # the file is complete, but its name may not survive a power cut
            log.warning("snapshot directory not synced", file=writing.file, reason=describe_error(error))
        _close(writing)
        return SnapshotEntry(writing.file, writing.snapshot, status.st_size, status.st_mtime)

    def abort(self, writing: PendingSnapshot, reason: str) -> None:
        """Abandon a file and remove it.  Idempotent."""
        if not writing.done:
            self._clean(writing)
            self._failed("aborted", writing.file, reason)

    @contextmanager
    def _saving(self, writing: PendingSnapshot) -> Iterator[None]:
        """Turn errors inside into SaveFailed, after logging them and removing the partial file."""
        try:
            yield
        except SaveFailed as failed:
            self._clean(writing)
            self._failed(failed.label, failed.file, failed.reason)
            raise
        except (OSError, SnapshotError) as error:
            self._clean(writing)
            raise self._failed(_label(error), writing.file, describe_error(error)) from error
        except BaseException:
            self._clean(writing)
            raise

    def _failed(self, label: str, file: str, reason: str) -> SaveFailed:
        self._failures[label] += 1
        log.warning("snapshot not saved", file=file, label=label, reason=reason)
        return SaveFailed(label, file, reason)

    def _clean(self, writing: PendingSnapshot) -> None:
        if writing.fd >= 0 and not writing.done:
            try:
                writing.path.unlink(missing_ok=True)
            except OSError as error:  # a later scan removes it
                log.warning("partial snapshot not removed", file=writing.path.name, reason=describe_error(error))
        _close(writing)


def _label(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "locked"
    return "disk_full" if isinstance(error, OSError) and error.errno in _FULL else "io"


def _yield() -> None:
    """Yield to decoding where cores are few: no request waits for a save."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread alone


def _check_size(writing: PendingSnapshot, n_bytes: int) -> None:
    size = os.fstat(writing.fd).st_size
    if n_bytes != writing.data_bytes or size != writing.snapshot.file_bytes:
        raise SaveFailed(
            "size",
            writing.file,
            f"the daemons wrote {n_bytes} bytes of {writing.data_bytes}, the file has {size} of "
            f"{writing.snapshot.file_bytes}",
        )


def _close(writing: PendingSnapshot) -> None:
    if not writing.done and writing.fd >= 0:
        os.close(writing.fd)
    writing.done = True
