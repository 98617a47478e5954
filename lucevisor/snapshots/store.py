"""The snapshot directory: scan, save, restore, prune.  Every method blocks on the disk; any thread may call it.

A save allocates a partial file, which daemons write, then computes checksums, writes the header, syncs and renames.
Invariants: a file with a final name is complete; a save that fails removes its partial file; a failed fsync is never
retried, as the kernel may have dropped pages; a refused file is never used again, and each refusal is logged once.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.kv_transfer.transfers import TransferFile
from lucevisor.protocol.messages import TransferTensor
from lucevisor.protocol.threads import lower_priority
from lucevisor.snapshots import disk
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.file_format import (
    Fault,
    SlotRecord,
    SnapshotError,
    SnapshotHeader,
    StateModel,
    check_fits,
    holds_draft,
    lay_out,
    pack,
)
from lucevisor.snapshots.policy import (
    LOCK_FILE,
    PARTIAL,
    CacheFile,
    FileKind,
    SnapshotEntry,
    SnapshotMatch,
    StoreStatistics,
    file_name,
    longest_match,
    name_prefix,
)

log = structlog.get_logger("lucevisor.snapshots")

STEPS = ("create", "allocate", "data", "size", "checksum", "header", "sync", "rename", "sync_directory", "prune")
"""Names of the write protocol's steps, in order, as passed to ``at``; ``data`` is between ``begin`` and ``finish``."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILED_SAVES = ("disk_full", "io", "locked", "removed", "too_large", "size", "aborted")
"""The labels of saves that failed; Fault has those of refused files."""
DISK_FAILURES = ("disk_full", "io", "locked")
"""Labels of failures after which another save would most likely fail as well."""

NOT_RESTORED = "not_restored"
"""Label of a restore that failed in a daemon or timed out; the file stays."""


class SnapshotRefused(LucevisorError):
    """A file is not restored.  ``fault``: the kind of reason; ``reason``: a sentence."""

    def __init__(self, fault: Fault, file: str, reason: str) -> None:
        super().__init__(f"snapshot {file} is refused: {reason}; the prompt is computed instead")
        self.fault, self.file, self.reason = fault, file, reason


class SaveFailed(LucevisorError):
    """A slot could not be saved.  ``label``: one of FAILED_SAVES."""

    def __init__(self, label: str, file: str, reason: str) -> None:
        super().__init__(f"snapshot {file} was not saved: {reason}; earlier snapshots are unchanged")
        self.label, self.file, self.reason = label, file, reason


@dataclass(slots=True, eq=False, kw_only=True)
class PendingSnapshot(TransferFile):
    """A file being written: ``file`` is its final name, ``path`` its partial one."""

    path: Path
    snapshot: SnapshotHeader
    started_s: float
    done: bool = False

    @property
    def data_bytes(self) -> int:
        return self.snapshot.file_bytes - self.snapshot.data_start


@dataclass(slots=True, eq=False, kw_only=True)
class OpenSnapshot(TransferFile):
    """A matching file, open to restore its first ``n_tokens``."""

    entry: SnapshotEntry
    snapshot: SnapshotHeader
    n_tokens: int
    closed: bool = False

    @property
    def tokens(self) -> TokenBuffer:
        packed = self.snapshot.packed_tokens[: self.n_tokens * TOKEN_BYTES]
        return TokenBuffer.from_packed(packed, self.entry.adapter)

    def n_bytes(self, tensors: Sequence[TransferTensor]) -> int:
        """Return the bytes that a daemon reads of ``tensors``: the first rows of each if part of the slot is used."""
        return sum(t.n_bytes for t in tensors) * self.n_tokens // self.snapshot.n_tokens


class SnapshotStore:
    """The snapshots of ``model`` in ``directory``; those of others count towards ``disk_bytes``.

    ``budget``: the same, or what the disk has room for.  ``at`` is called before each step of a save.  Raises
    ConfigError.
    """

    def __init__(
        self,
        directory: Path,
        model: StateModel,
        disk_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
        at: disk.Hook = lambda _: None,
    ) -> None:
        self.directory, self.model, self.disk_bytes = directory, model, disk_bytes
        self.statistics = StoreStatistics()
        self._clock, self._at = clock, at
        self._index: dict[str, SnapshotEntry] = {}  # by file name
        self._guard = threading.Lock()  # for index and statistics; never held during I/O
        n_threads = min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="snapshot check")
        n_sealing = 1 + min(2, os.cpu_count() or 1)  # one for fsync
        # requests come first
        self._seal_pool = ThreadPoolExecutor(n_sealing, thread_name_prefix="snapshot seal", initializer=lower_priority)
        self.budget = disk_bytes
        self._scanned = False
        disk.make_directory(directory)

    def close(self) -> None:
        self._seal_pool.shutdown()
        self._pool.shutdown()

    def renew(self) -> None:
        """Make the directory again if it or all that was in it was removed.  Raises ConfigError."""
        if self._scanned and not (self.directory / LOCK_FILE).exists():
            log.warning("snapshot directory was emptied or removed", directory=str(self.directory))
            disk.make_directory(self.directory)
            self.scan()

    # ---- index

    @property
    def entries(self) -> list[SnapshotEntry]:
        """Usable files, least recently used first."""
        with self._guard:
            return sorted(self._index.values(), key=lambda e: (e.used_s, e.file))

    def scan(self) -> list[SnapshotEntry]:
        """Read this model's headers, remove leftovers, set aside what is not a snapshot.  Raises ConfigError."""
        started, began_s = time.monotonic(), self._clock()
        with self._directory_lock():
            files, _ = self._list_files()
            for file in files:
                if file.kind is FileKind.PARTIAL and disk.remove_leftover(self.directory / file.file):
                    log.info("snapshot leftover removed", file=file.file, n_bytes=file.n_bytes)
        found: dict[str, SnapshotEntry] = {}
        own = tuple(map(name_prefix, (self.model.fingerprint, *self.model.adapters.values())))
        for file in files:
            if file.kind is FileKind.SNAPSHOT and file.file.startswith(own):
                with suppress(SnapshotRefused):
                    found[file.file] = self._entry(file)
        listed = {file.file for file in files}
        with self._guard:  # keep what was saved since the directory was listed
            recent = {e.file: e for e in self._index.values() if e.file not in listed and e.used_s >= began_s}
            self._index = {**found, **recent}
        self._scanned = True
        others = [f.file for f in files if f.kind is FileKind.SNAPSHOT and f.file not in found]
        n_older = sum(map(self._is_older, others))  # of any model: fingerprints change with versions, too
        if n_older:
            log.warning(
                "snapshots of an earlier version are not used",
                n=n_older,
                reason="`lucevisor cache ls` shows them, `cache rm` removes them",
            )
        log.info(
            "snapshots scanned", directory=str(self.directory), n_usable=len(found), n_others=len(others),
            n_bytes=sum(f.n_bytes for f in files), seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        return self.entries

    def _is_older(self, file: str) -> bool:
        try:
            os.close(disk.open_snapshot(self.directory / file)[0])
        except SnapshotError as error:
            return error.fault is Fault.OLDER
        return False

    def _entry(self, file: CacheFile) -> SnapshotEntry:
        with self._refusing(file.file):
            fd, snapshot, status = disk.open_snapshot(self.directory / file.file)
            os.close(fd)
            check_fits(snapshot, self.model)
        return self._entry_of(file.file, snapshot, status)

    def _entry_of(self, file: str, snapshot: SnapshotHeader, status: os.stat_result) -> SnapshotEntry:
        adapter = self.model.adapter_of(snapshot.fingerprint) or ""
        return SnapshotEntry(file, snapshot, status.st_size, status.st_mtime, adapter)

    def find(self, prompt: Sequence[int], most: int) -> SnapshotMatch | None:
        """Return the match that restores most of the prompt's first ``most`` tokens; does not block."""
        return longest_match(self.entries[::-1], prompt, most, whole_only=self.model.whole_only)

    # ---- write

    def begin(self, slot: SlotRecord) -> PendingSnapshot:
        """Lay out and allocate a file.  Raises SaveFailed, leaving nothing behind."""
        snapshot = lay_out(self.model, slot)
        file = file_name(snapshot)
        try:
            self.renew()
        except ConfigError as error:
            # Not "removed", after which saves would not pause.
            label = "locked" if isinstance(error.__cause__, TimeoutError) else "io"
            raise self._save_failed(label, file, f"{error.key} {error.why}") from error
        if snapshot.file_bytes > self.disk_bytes:
            reason = f"it would take {snapshot.file_bytes} bytes, cache.disk is {self.disk_bytes}"
            raise self._save_failed("too_large", file, reason)
        path = self.directory / f"{file.removesuffix('.safetensors')}.{secrets.token_hex(8)}{PARTIAL}"
        pending = PendingSnapshot(file, -1, snapshot.tensors, path=path, snapshot=snapshot, started_s=time.monotonic())
        with self._saving(pending):
            self._at("create")
            with disk.locked(self.directory):  # or another scan could remove the file before it is locked
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                pending.fd = os.open(path, flags, 0o600)
                disk.try_lock(pending.fd)
            self._at("allocate")
            self._allocate(pending)
            self._at("data")
        return pending

    def finish(self, pending: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        """Seal and publish a file after the daemons wrote ``n_bytes``, then prune.  Raises SaveFailed."""
        entry = self._seal(pending, n_bytes)
        seconds = time.monotonic() - pending.started_s
        with self._guard:
            self._index[entry.file] = entry
            self.statistics.n_saved += 1
            self.statistics.saved_bytes += entry.n_bytes
            self.statistics.save_s += seconds
        log.info(
            "snapshot saved", file=entry.file, n_tokens=entry.n_tokens, n_bytes=entry.n_bytes, seconds=round(seconds, 3)
        )
        try:
            self._at("prune")
            self.prune(keep=(entry.file,))
        except OSError as error:
            log.warning("snapshots not pruned", directory=str(self.directory), reason=describe_error(error))
        return entry

    def abort(self, pending: PendingSnapshot, reason: str) -> None:
        if not pending.done:
            self._remove_partial(pending)
            self._save_failed("aborted", pending.file, reason)

    def _seal(self, pending: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        with self._saving(pending):
            self._at("size")
            _check_size(pending, n_bytes)
            flushed = self._seal_pool.submit(os.fsync, pending.fd)  # beside the checksums, which read the page cache
            try:
                self._at("checksum")
                sums = disk.checksums(pending.fd, pending.snapshot.tensors, self._seal_pool)
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
        return self._entry_of(pending.file, pending.snapshot, status)

    def _allocate(self, pending: PendingSnapshot) -> None:
        """Take the file's bytes on the disk, removing others if need be.  Raises OSError."""
        n_bytes = pending.snapshot.file_bytes
        if not self._make_room(n_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while True:
            try:
                os.posix_fallocate(pending.fd, 0, n_bytes)
                return
            except OSError as error:
                taken = os.fstat(pending.fd).st_blocks * 512
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(n_bytes - taken, full=True):
                    raise

    @contextmanager
    def _saving(self, pending: PendingSnapshot) -> Iterator[None]:
        """Turn errors inside into SaveFailed, after logging them and removing the partial file."""
        try:
            yield
        except BaseException as error:
            self._remove_partial(pending)
            if isinstance(error, SaveFailed):
                raise self._save_failed(error.label, error.file, error.reason) from error
            if isinstance(error, OSError | SnapshotError):
                raise self._save_failed(_label(error), pending.file, describe_error(error)) from error
            raise

    def _save_failed(self, label: str, file: str, reason: str) -> SaveFailed:
        self.statistics.failures[label] += 1
        log.warning("snapshot not saved", file=file, label=label, reason=reason)
        return SaveFailed(label, file, reason)

    def _remove_partial(self, pending: PendingSnapshot) -> None:
        if pending.fd >= 0 and not pending.done:
            try:
                pending.path.unlink(missing_ok=True)
            except OSError as error:  # a later scan removes it
                log.warning("partial snapshot not removed", file=pending.path.name, reason=describe_error(error))
        _close(pending)

    # ---- read

    def open_for_restore(self, entry: SnapshotEntry, n_tokens: int | None = None) -> OpenSnapshot:
        """Open a file and check that its header matches this model.  ``n_tokens``: use only so many.  Raises
        SnapshotRefused."""
        n = entry.n_tokens if n_tokens is None else n_tokens
        if not 0 < n <= entry.n_tokens or (n < entry.n_tokens and self.model.whole_only):
            raise ValueError(f"{n} tokens of {entry.file}: it has {entry.n_tokens} and must be used whole")
        with self._refusing(entry.file):
            fd, snapshot, _ = disk.open_snapshot(self.directory / entry.file)
            try:
                check_fits(snapshot, self.model)
                if snapshot.packed_tokens != entry.snapshot.packed_tokens:
                    raise SnapshotError(Fault.MISFIT, "tokens", "do not match the name: the file was replaced")
            except BaseException:
                os.close(fd)
                raise
        with suppress(OSError):  # readahead is optional, and so is the time of use on a read-only file system
            os.posix_fadvise(fd, snapshot.data_start, 0, os.POSIX_FADV_WILLNEED)
            os.utime(fd, (self._clock(), self._clock()))
        with self._guard:
            if (known := self._index.get(entry.file)) is not None:
                self._index[entry.file] = replace(known, used_s=self._clock())
        return OpenSnapshot(
            entry.file, fd, snapshot.tensors, holds_draft(snapshot, self.model, n),
            entry=entry, snapshot=snapshot, n_tokens=n,
        )  # fmt: skip

    def check(self, opened: OpenSnapshot) -> None:
        """Compare every tensor's checksum, also while daemons read.  Raises SnapshotRefused."""
        with self._refusing(opened.file, opened.fd):
            try:
                disk.compare(disk.checksums(opened.fd, opened.snapshot.tensors, self._pool), opened.snapshot)
            except OSError as error:
                raise disk.unreadable("tensors", error) from error

    def restored(self, entry: SnapshotEntry, seconds: float) -> None:
        with self._guard:
            self.statistics.n_restored += 1
            self.statistics.restored_bytes += entry.n_bytes
            self.statistics.restore_s += seconds

    def not_restored(self, entry: SnapshotEntry, reason: str) -> None:
        with self._guard:
            self.statistics.failures[NOT_RESTORED] += 1
        log.warning("snapshot not restored", file=entry.file, reason=reason)

    @staticmethod
    def close_snapshot(opened: OpenSnapshot) -> None:
        if not opened.closed:
            opened.closed = True
            os.close(opened.fd)

    @contextmanager
    def _refusing(self, file: str, fd: int = -1) -> Iterator[None]:
        """Turn a SnapshotError inside into SnapshotRefused, after refusing the file."""
        try:
            yield
        except SnapshotError as error:
            self._refuse(file, error, fd)
            raise SnapshotRefused(error.fault, file, str(error)) from error

    def _refuse(self, file: str, error: SnapshotError, fd: int = -1) -> None:
        """Forget a file, log why, and rename it unless it is gone, another model's, or possibly intact."""
        with self._guard:
            self._index.pop(file, None)
        self.statistics.failures[error.fault.value] += 1
        kept_name = error.fault in (Fault.GONE, Fault.OTHER_MODEL, Fault.OLDER) or disk.is_our_own(error)
        new_name = ""
        try:
            inode = os.fstat(fd).st_ino if fd >= 0 else None
            new_name = "" if kept_name else disk.set_aside(self.directory / file, inode)
        except OSError as failure:
            log.warning("snapshot not set aside", file=file, reason=describe_error(failure))
        log.warning("snapshot refused", file=file, fault=error.fault.value, reason=str(error), set_aside=new_name)

    # ---- prune

    def prune(self, disk_bytes: int | None = None, keep: Collection[str] = ()) -> list[CacheFile]:
        """Remove the least recently used files, of any model, beyond the budget.  Raises OSError."""
        budget = self.disk_bytes if disk_bytes is None else disk_bytes
        with disk.locked(self.directory):
            removed = disk.prune_directory(self.directory, budget, keep)
        self._forget(removed)
        return removed

    def _forget(self, files: Sequence[CacheFile]) -> None:
        for file in files:
            log.info("snapshot pruned", file=file.file, n_bytes=file.n_bytes)
        with self._guard:
            for file in files:
                self._index.pop(file.file, None)

    def _list_files(self) -> tuple[list[CacheFile], int]:
        """Return all our files and the bytes left on the disk; sets ``budget``.  Hold the lock."""
        files, free = disk.list_files(self.directory), disk.free_bytes(self.directory)
        self.budget = min(self.disk_bytes, sum(f.n_bytes for f in files) + free)
        return files, free

    def _make_room(self, n_bytes: int, *, full: bool = False) -> bool:
        """Remove the least recently used snapshots if ``n_bytes`` have no room, at least one if the disk is ``full``;
        False, removing none, if all are not enough."""
        with disk.locked(self.directory):
            files, free = self._list_files()
            lacking = max(n_bytes - free, 1 if full else 0)
            if lacking <= 0:
                return True
            if sum(f.n_bytes for f in files if f.kind is FileKind.SNAPSHOT) < lacking:
                return False
            removed = disk.prune_directory(self.directory, sum(f.n_bytes for f in files) - lacking)
        self._forget(removed)
        return True

    @contextmanager
    def _directory_lock(self) -> Iterator[None]:
        try:
            with disk.locked(self.directory):
                yield
        except OSError as error:
            hint = "name a writable directory"
            raise ConfigError("cache.dir", str(self.directory), describe_error(error), hint) from error


def _label(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "locked"
    if isinstance(error, FileNotFoundError):  # the directory was there when the save began; the next makes it again
        return "removed"
    return "disk_full" if isinstance(error, OSError) and error.errno in _FULL else "io"


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
