"""The snapshot directory: scan, save, restore, prune.  A thin shell around ``policy`` (what to do), ``writer`` (the
write protocol) and ``disk`` (system calls).

Every method blocks on the disk and may be called from any thread; in an event loop use ``AsyncSnapshotStore``.  Knows
no daemons: it hands out descriptors and tensor offsets.  Invariants: a file whose header does not fit the model is
never handed out for a restore; a refused file is never used again; every refusal and failure is logged once, with its
reason.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import structlog

from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.model.values import LayerRange
from lucevisor.protocol.messages import SnapshotTensor
from lucevisor.snapshots import disk
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.index import RemovedFiles, SnapshotIndex
from lucevisor.snapshots.layout import (
    Fault,
    NextToken,
    SlotRecord,
    SnapshotError,
    SnapshotHeader,
    StateModel,
    check_fits,
    holds_draft,
)
from lucevisor.snapshots.policy import (
    LOCK_FILE,
    CacheFile,
    FileKind,
    SnapshotEntry,
    SnapshotMatch,
    read_name,
    victims,
)
from lucevisor.snapshots.writer import PendingSnapshot, SnapshotWriter

log = structlog.get_logger("snapshots")


NOT_RESTORED = "not_restored"
"""Label of a restore that failed in a daemon or timed out; the file stays."""


class SnapshotRefused(LucevisorError):
    """A file is not restored.  ``fault`` says why in a word, ``reason`` in a sentence."""

    def __init__(self, fault: Fault, file: str, reason: str) -> None:
        super().__init__(f"snapshot {file} is refused: {reason}; the prompt is computed instead")
        self.fault, self.file, self.reason = fault, file, reason


@dataclass(slots=True)
class OpenSnapshot:
    """A matching file, open to restore its first ``n_tokens``.  ``check`` verifies its tensors.

    ``converted``: empty if states are restored bit for bit, else what differs.  ``next_token`` is None without a
    record, or if only part of the slot is used.  ``with_draft``: the drafter's state is in it and usable.
    """

    entry: SnapshotEntry
    fd: int
    snapshot: SnapshotHeader
    n_tokens: int
    next_token: NextToken | None
    converted: str
    with_draft: bool = False
    closed: bool = False

    @property
    def file(self) -> str:
        return self.entry.file

    @property
    def tokens(self) -> TokenBuffer:
        return TokenBuffer.from_packed(self.snapshot.packed_tokens[: self.n_tokens * TOKEN_BYTES])

    def tensors(self, layers: LayerRange) -> list[SnapshotTensor]:
        return self.snapshot.of_layers(layers)

    def draft_tensors(self) -> list[SnapshotTensor]:
        return self.snapshot.of_draft() if self.with_draft else []

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int:
        """Bytes that a daemon reads of ``tensors``: the first rows of each if part of the slot is used."""
        return sum(t.n_bytes for t in tensors) * self.n_tokens // self.snapshot.n_tokens


@dataclass(slots=True)
class StoreStatistics:
    """Totals since start, for metrics."""

    n_saved: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    n_restored: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0  # from the decision until the slot is usable
    failures: Counter[str] = field(default_factory=Counter)  # labels of SaveFailed, faults of SnapshotRefused


class SnapshotStore:
    """The snapshots of ``model`` in ``directory``; those of other models only count towards the disk budget.

    ``disk_bytes``: limit for all our files, other models included; ``budget``: the same, or what the disk really has
    room for.  ``at`` is called before each step of the write protocol.  Raises ConfigError naming ``cache.dir``.
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
        self._index = SnapshotIndex()
        self._history = RemovedFiles()
        self._guard = Lock()  # for index and statistics; never held during I/O
        n_threads = min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="snapshot check")
        self._writer = SnapshotWriter(directory, model, at, self.statistics.failures)
        self.budget = disk_bytes
        self._scanned = False
        disk.make_directory(directory)

    def close(self) -> None:
        """End the threads; the caller closes open files."""
        self._writer.close()
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
            return sorted(self._index, key=lambda e: (e.used_s, e.file))

    def scan(self) -> list[SnapshotEntry]:
        """Read the headers of this model's files, remove leftovers of dead writers, set aside what is not a snapshot.

        Reads no tensors.  Raises ConfigError if the directory is unusable.
        """
        started, began_s = time.monotonic(), self._clock()
        with self._directory_lock():
            files, _ = self.look()
            for one in files:
                if one.kind is FileKind.PARTIAL and disk.remove_leftover(self.directory / one.file):
                    log.info("snapshot leftover removed", file=one.file, n_bytes=one.n_bytes)
        found: dict[str, SnapshotEntry] = {}
        for one in files:
            name = read_name(one.file)
            if name.kind is FileKind.SNAPSHOT and name.model == self.model.fingerprint[:16]:
                with suppress(SnapshotRefused):
                    found[one.file] = self._entry(one)
        listed = {one.file for one in files}
        index = SnapshotIndex(found.values())
        with self._guard:  # keep what was saved since the directory was listed
            for entry in self._index:
                if entry.file not in listed and entry.used_s >= began_s:
                    index.put(entry)
            self._index = index
        self._scanned = True
        others = [f.file for f in files if f.kind is FileKind.SNAPSHOT and f.file not in found]
        n_older = sum(map(self._is_older, others))
        if n_older:
            log.warning(
                "snapshots of an earlier version are not used", n=n_older, reason="their fingerprint did not cover all "
                "weights; `lucevisor cache ls` shows them, `cache rm` removes them",
            )  # fmt: skip
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
        return SnapshotEntry(file.file, snapshot, status.st_size, status.st_mtime)

    @property
    def n_files(self) -> int:
        """Number of usable files."""
        return len(self._index)

    def find(self, prompt: Sequence[int], most: int) -> SnapshotMatch | None:
        """The file that restores most of the prompt's first ``most`` tokens.  Safe to call on an event loop."""
        with self._guard:
            return self._index.find(TokenBuffer.of(prompt), most, whole_only=self.model.whole_only)

    # ---- write

    def begin(self, slot: SlotRecord) -> PendingSnapshot:
        """Lay out and allocate a file.  Raises SaveFailed, leaving nothing behind."""
        with suppress(ConfigError):  # the save fails, and says why
            self.renew()
        return self._writer.begin(slot, self.disk_bytes, self)

    def finish(self, pending: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        """Seal and publish a file after the daemons wrote ``n_bytes``, then prune.

        Raises SaveFailed, leaving nothing behind.
        """
        entry = self._writer.seal(pending, n_bytes)
        seconds = time.monotonic() - pending.started_s
        with self._guard:
            self._index.put(entry)
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
        """Abandon a file and remove it.  Idempotent."""
        self._writer.abort(pending, reason)

    # ---- read

    def open_for_restore(self, entry: SnapshotEntry, n_tokens: int | None = None) -> OpenSnapshot:
        """Open a file and check that its header matches this model.  Raises SnapshotRefused.

        ``n_tokens``: use only so many, if the model's slots can be cut.  A file refused for its contents is set aside.
        """
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
                self._index.put(replace(known, used_s=self._clock()))
        record = snapshot.next_token if n == snapshot.n_tokens else None
        with_draft = holds_draft(snapshot, self.model, n)
        return OpenSnapshot(entry, fd, snapshot, n, record, self._converted(snapshot), with_draft)

    def _converted(self, snapshot: SnapshotHeader) -> str:
        pairs = [
            (what, theirs.value, ours.value)
            for what, theirs, ours in (
                ("kv_dtype", snapshot.kv_dtype, self.model.kv_dtype),
                ("dtype", snapshot.dtype, self.model.dtype),
            )
            if theirs != ours
        ]
        return ", ".join(f"{what} {theirs} in the file, {ours} here" for what, theirs, ours in pairs)

    def check(self, opened: OpenSnapshot) -> None:
        """Compare every tensor's checksum, possibly while the daemons read.  Raises SnapshotRefused."""
        with self._refusing(opened.file, opened.fd):
            try:
                disk.compare(disk.checksums(opened.fd, opened.snapshot.tensors, self._pool), opened.snapshot)
            except OSError as error:
                raise disk.unreadable("tensors", error) from error

    def restored(self, opened: OpenSnapshot, seconds: float) -> None:
        """Count a restored file; ``seconds`` since the decision."""
        with self._guard:
            self.statistics.n_restored += 1
            self.statistics.restored_bytes += opened.entry.n_bytes
            self.statistics.restore_s += seconds

    def not_restored(self, entry: SnapshotEntry, reason: str) -> None:
        """Log and count a restore that failed although the file may be intact."""
        with self._guard:
            self.statistics.failures[NOT_RESTORED] += 1
        log.warning("snapshot not restored", file=entry.file, reason=reason)

    @staticmethod
    def close_snapshot(opened: OpenSnapshot) -> None:
        """Close the file.  Idempotent."""
        if not opened.closed:
            opened.closed = True
            os.close(opened.fd)

    def discard(self, entry: SnapshotEntry, reason: str) -> None:
        """Set aside a file that restored a wrong state."""
        self._refuse(entry.file, SnapshotError(Fault.MISFIT, "restored state", reason))

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
            self._index.remove(file)
        self.statistics.failures[error.fault.value] += 1
        kept_name = error.fault in (Fault.GONE, Fault.OTHER_MODEL, Fault.OLDER) or disk.is_our_own(error)
        aside = "" if kept_name else self._set_aside(file, fd)
        log.warning("snapshot refused", file=file, fault=error.fault.value, reason=str(error), set_aside=aside)

    def _set_aside(self, file: str, fd: int) -> str:
        path = self.directory / file
        try:
            with disk.locked(self.directory):
                if fd >= 0 and os.fstat(fd).st_ino != path.stat().st_ino:
                    return ""  # the slot was saved again meanwhile
                return disk.set_aside(path).name
        except OSError as error:
            log.warning("snapshot not set aside", file=file, reason=describe_error(error))
            return ""

    # ---- prune

    def prune(self, disk_bytes: int | None = None, keep: Collection[str] = ()) -> list[CacheFile]:
        """Remove the least recently used files, of any model, until ours fit into the budget.  Raises OSError."""
        budget = self.disk_bytes if disk_bytes is None else disk_bytes
        with disk.locked(self.directory):
            gone = disk.prune_directory(self.directory, budget, keep)
        self.forget(gone)
        return gone

    def forget(self, gone: Sequence[CacheFile]) -> None:
        """Take files that were removed to make room out of the index."""
        for one in gone:
            log.info("snapshot pruned", file=one.file, n_bytes=one.n_bytes)
        with self._guard:
            for one in gone:
                if (entry := self._index.get(one.file)) is not None:
                    self._history.removed(entry)
                    self._index.remove(one.file)

    def look(self) -> tuple[list[CacheFile], int]:
        """Return all our files and the bytes that the disk has left; sets ``budget``.  Hold the directory's lock."""
        files, free = disk.list_files(self.directory), disk.free_bytes(self.directory)
        self.budget = min(self.disk_bytes, sum(f.n_bytes for f in files) + free)
        return files, free

    def keep_out(self, file: str, snapshot: SnapshotHeader) -> str:
        """Return why ``file`` is not worth those that it would push out; empty if it is."""
        try:
            with disk.locked(self.directory):
                files, free = self.look()
        except OSError:  # the save fails, and says why
            return ""
        own = sum(f.n_bytes for f in files if f.file == file)  # it replaces this one
        n_used = sum(f.n_bytes for f in files)
        excess = snapshot.file_bytes - min(free, self.disk_bytes - n_used + own)
        with self._guard:
            tokens = TokenBuffer.from_packed(snapshot.packed_tokens)
            return self._history.keep_out(tokens, victims(files, n_used - excess), self._clock())

    def make_room(self, n_bytes: int, *, full: bool = False) -> bool:
        """Remove the least recently used snapshots if ``n_bytes`` have no room on the disk, at least one if it is
        ``full``; False, removing none, if all are not enough.
        """
        with disk.locked(self.directory):
            files, free = self.look()
            lacking = max(n_bytes - free, 1 if full else 0)
            if lacking <= 0:
                return True
            if sum(f.n_bytes for f in files if f.kind is FileKind.SNAPSHOT) < lacking:
                return False
            gone = disk.prune_directory(self.directory, sum(f.n_bytes for f in files) - lacking)
        self.forget(gone)
        return True

    @contextmanager
    def _directory_lock(self) -> Iterator[None]:
        try:
            with disk.locked(self.directory):
                yield
        except OSError as error:
            hint = "name a writable directory"
            raise ConfigError("cache.dir", str(self.directory), describe_error(error), hint) from error
