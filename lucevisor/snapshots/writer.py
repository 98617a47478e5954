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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from lucevisor.errors import LucevisorError
from lucevisor.model.values import LayerRange
from lucevisor.protocol.messages import SnapshotTensor
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
DISK_FAILURES = ("disk_full", "io", "locked")
"""Those after which another save would most likely fail as well."""


class SaveFailed(LucevisorError):
    """A slot could not be saved.  ``label``: one of FAILED_SAVES, or "keep_out", which is no failure of the disk."""

    def __init__(self, label: str, file: str, reason: str) -> None:
        super().__init__(f"snapshot {file} was not saved: {reason}; earlier snapshots are unchanged")
        self.label, self.file, self.reason = label, file, reason


class Room(Protocol):
    """Makes room for files on the disk.  Raises OSError."""

    def keep_out(self, file: str, snapshot: SnapshotHeader) -> str:
        """Return why a file is not worth the others that it would push out; empty if it is."""

    def make_room(self, n_bytes: int, *, full: bool = False) -> bool:
        """Remove snapshots if ``n_bytes`` more have no room, at least one if the disk said that it is ``full``; False,
        removing none, if all together are not enough.
        """


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

    def draft_tensors(self) -> list[SnapshotTensor]:
        return self.snapshot.of_draft()

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int:
        """Bytes that a daemon writes of ``tensors``."""
        return sum(t.n_bytes for t in tensors)


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

    def begin(self, slot: SlotRecord, most_bytes: int, room: Room) -> PendingSnapshot:
        """Lay out and allocate a file of at most ``most_bytes``.  Raises SaveFailed, leaving nothing behind."""
        snapshot = lay_out(self.model, slot)
        file = file_name(snapshot)
        if snapshot.file_bytes > most_bytes:
            reason = f"it would take {snapshot.file_bytes} bytes, cache.disk is {most_bytes}"
            raise self._failed("too_large", file, reason)
        keep_out = room.keep_out(file, snapshot)
        if keep_out:
            log.debug("snapshot not saved", file=file, label="keep_out", reason=keep_out)
            raise SaveFailed("keep_out", file, keep_out)
        path = self.directory / f"{file.removesuffix('.safetensors')}.{secrets.token_hex(8)}{PARTIAL}"
        pending = PendingSnapshot(file, path, -1, snapshot, time.monotonic())
        with self._saving(pending):
            self._at("create")
            with disk.locked(self.directory):  # or another scan could remove the file before it is locked
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                pending.fd = os.open(path, flags, 0o600)
                disk.try_lock(pending.fd)
            self._at("allocate")
            _allocate(pending, room)
            self._at("data")
        return pending

    def seal(self, pending: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        """Check, seal and rename a file after the daemons reported ``n_bytes`` written.

        Raises SaveFailed, leaving nothing behind.
        """
        with self._saving(pending):
            self._at("size")
            _check_size(pending, n_bytes)
            flushed = self._pool.submit(
                os.fsync, pending.fd
            )  # in parallel with the checksums, which come from the page cache
            try:
                self._at("checksum")
                sums = disk.checksums(pending.fd, pending.snapshot.tensors, self._pool)
            finally:
                flushed.exception()  # never leave a thread behind that uses the descriptor
            flushed.result()
            self._at("header")
            pending.snapshot = replace(pending.snapshot, checksums=sums)
            disk.write_all(pending.fd, pack(pending.snapshot), 0)
            self._at("sync")
            os.fsync(pending.fd)
            status = os.fstat(pending.fd)
            self._at("rename")
            with disk.locked(self.directory):
                pending.path.rename(self.directory / pending.file)
        try:
            self._at("sync_directory")
            disk.sync_directory(self.directory)
        except OSError as error:  # the file is complete, but its name may not survive a power cut
            log.warning("snapshot directory not synced", file=pending.file, reason=describe_error(error))
        _close(pending)
        return SnapshotEntry(pending.file, pending.snapshot, status.st_size, status.st_mtime)

    def abort(self, pending: PendingSnapshot, reason: str) -> None:
        """Abandon a file and remove it.  Idempotent."""
        if not pending.done:
            self._clean(pending)
            self._failed("aborted", pending.file, reason)

    @contextmanager
    def _saving(self, pending: PendingSnapshot) -> Iterator[None]:
        """Turn errors inside into SaveFailed, after logging them and removing the partial file."""
        try:
            yield
        except SaveFailed as failed:
            self._clean(pending)
            self._failed(failed.label, failed.file, failed.reason)
            raise
        except (OSError, SnapshotError) as error:
            self._clean(pending)
            raise self._failed(_label(error), pending.file, describe_error(error)) from error
        except BaseException:
            self._clean(pending)
            raise

    def _failed(self, label: str, file: str, reason: str) -> SaveFailed:
        self._failures[label] += 1
        log.warning("snapshot not saved", file=file, label=label, reason=reason)
        return SaveFailed(label, file, reason)

    def _clean(self, pending: PendingSnapshot) -> None:
        if pending.fd >= 0 and not pending.done:
            try:
                pending.path.unlink(missing_ok=True)
            except OSError as error:  # a later scan removes it
                log.warning("partial snapshot not removed", file=pending.path.name, reason=describe_error(error))
        _close(pending)


def _allocate(pending: PendingSnapshot, room: Room) -> None:
    """Take the file's bytes on the disk, removing others if need be.  Raises OSError."""
    n_bytes = pending.snapshot.file_bytes
    if not room.make_room(n_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while True:
        try:
            os.posix_fallocate(pending.fd, 0, n_bytes)
            return
        except OSError as error:
            taken = os.fstat(pending.fd).st_blocks * 512
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not room.make_room(n_bytes - taken, full=True):
                raise


def _label(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "locked"
    return "disk_full" if isinstance(error, OSError) and error.errno in _FULL else "io"


def _yield() -> None:
    """Yield to decoding where cores are few: no request waits for a save."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread alone


def _check_size(pending: PendingSnapshot, n_bytes: int) -> None:
    size = os.fstat(pending.fd).st_size
    if n_bytes != pending.data_bytes or size != pending.snapshot.file_bytes:
        raise SaveFailed(
            "size",
            pending.file,
            f"the daemons wrote {n_bytes} bytes of {pending.data_bytes}, the file has {size} of "
            f"{pending.snapshot.file_bytes}",
        )


def _close(pending: PendingSnapshot) -> None:
    if not pending.done and pending.fd >= 0:
        os.close(pending.fd)
    pending.done = True
