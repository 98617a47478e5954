"""Snapshot policy: what to save, what to restore, and disk eviction, by sizes and measured speeds.

Decides about files without touching them.  Invariant: evicts the least recently used files, and no more than the
budget requires.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.model.values import Space
from lucevisor.snapshots.file_format import (
    HEADER_BYTES_PER_TOKEN,
    SnapshotHeader,
    StateModel,
    max_header_bytes,
    slot_tensors,
)

LOCK_FILE = "lucevisor.lock"
PARTIAL = ".partial"
REFUSED = ".refused"

_NAME = re.compile(
    r"lucevisor-(?P<model>[0-9a-f]{16})-[0-9a-f]{16}"
    r"(?P<kind>\.safetensors|\.[0-9a-f]{16}\.partial|\.safetensors\.refused(\.[0-9]+)?)"
)


class FileKind(StrEnum):
    """Kinds of files in the directory, by their names."""

    SNAPSHOT = "snapshot"
    PARTIAL = "partial"  # being written, or a leftover
    REFUSED = "refused"  # set aside
    OTHER = "other"  # not ours: never opened or touched


@dataclass(frozen=True, slots=True)
class NameParts:
    """``model``: the first 16 digits of the fingerprint, empty for OTHER."""

    kind: FileKind
    model: str


def read_name(name: str) -> NameParts:
    """Parse a file name of the directory."""
    match = _NAME.fullmatch(name)
    if match is None:
        return NameParts(FileKind.OTHER, "")
    end = match["kind"]
    kind = FileKind.SNAPSHOT
    if end.endswith(PARTIAL):
        kind = FileKind.PARTIAL
    elif REFUSED in end:
        kind = FileKind.REFUSED
    return NameParts(kind, match["model"])


def file_name(snapshot: SnapshotHeader) -> str:
    """Return the name of a slot's file: files of the same tokens in the same number formats replace each other."""
    text = f"{snapshot.dtype.value} {snapshot.kv_dtype.value} ".encode() + snapshot.packed_tokens
    return f"lucevisor-{snapshot.fingerprint[:16]}-{sha256(text).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A complete file in the directory, with its header."""

    file: str
    snapshot: SnapshotHeader
    n_bytes: int
    used_s: float  # Unix time of the last use

    @property
    def n_tokens(self) -> int:
        return self.snapshot.n_tokens


@dataclass(frozen=True, slots=True)
class SnapshotMatch:
    """``entry`` holds the first ``n_tokens`` of a prompt."""

    entry: SnapshotEntry
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the part to read."""
        return self.entry.n_bytes * self.n_tokens // self.entry.n_tokens


# ---- what to save


class SaveTrigger(StrEnum):
    """Occasions on which saving a slot is considered."""

    TURN = "turn"  # a chat turn ended
    EVICTION = "eviction"  # its memory is needed
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SnapshotSpeeds:
    """Measured speeds of computing and of the disk."""

    prefill_tokens_per_s: float
    read_bytes_per_s: float = 1e9
    write_bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """``min_tokens`` and ``disk_bytes`` come from ``[cache]``.

    ``turn_gain``: share of a slot that must be new on disk to save it at the end of a turn.  Saving a conversation at
    every turn would write its length squared.
    """

    min_tokens: int
    disk_bytes: int
    turn_gain: float = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefix slot in memory.  ``n_saved_tokens``: tokens of it that a file can restore already."""

    slot: int
    n_tokens: int
    n_bytes: int
    n_saved_tokens: int = 0
    n_hits: int = 0

    @property
    def gain_tokens(self) -> int:
        return self.n_tokens - self.n_saved_tokens


def reject_save_reason(candidate: Candidate, trigger: SaveTrigger, policy: SavePolicy, speeds: SnapshotSpeeds) -> str:
    """Return why a slot is not worth a file now; empty if it is."""
    c = candidate
    if c.n_tokens < policy.min_tokens:
        return f"{c.n_tokens} tokens are fewer than cache.min_tokens = {policy.min_tokens}"
    if c.n_bytes > policy.disk_bytes:
        return f"{c.n_bytes} bytes are more than the {policy.disk_bytes} of cache.disk or of the disk"
    needed = max(policy.min_tokens, 1)
    if trigger is SaveTrigger.TURN:
        needed = max(needed, int(c.n_tokens * policy.turn_gain))
    if c.gain_tokens < needed:
        return f"{c.n_saved_tokens} of its {c.n_tokens} tokens are on disk; a file needs {needed} new ones"
    compute_s = c.gain_tokens / speeds.prefill_tokens_per_s
    read_s = c.n_bytes / speeds.read_bytes_per_s
    if compute_s <= read_s:
        return f"computing {c.gain_tokens} tokens takes {compute_s:.3f} s, reading them {read_s:.3f} s"
    return ""


def reject_restore_reason(
    n_tokens: int, gain_tokens: int, n_bytes: int, policy: SavePolicy, speeds: SnapshotSpeeds
) -> str:
    """Return why a file with ``n_tokens`` of a prompt, ``gain_tokens`` of them not in memory, is not worth reading;
    empty if it is.
    """
    if n_tokens < policy.min_tokens:
        return f"{n_tokens} tokens are fewer than cache.min_tokens = {policy.min_tokens}"
    compute_s, read_s = gain_tokens / speeds.prefill_tokens_per_s, n_bytes / speeds.read_bytes_per_s
    if compute_s <= read_s:
        return f"computing {gain_tokens} tokens takes {compute_s:.3f} s, reading them {read_s:.3f} s"
    return ""


def plan_shutdown_saves(
    candidates: Iterable[Candidate], policy: SavePolicy, speeds: SnapshotSpeeds, deadline_s: float
) -> list[Candidate]:
    """Select what to save before a stop, in order: most computing saved per byte, then the newest, as much as fits into
    the deadline and, beside better slots that are on disk already, into the budget.
    """

    def order(c: Candidate) -> tuple[float, int]:
        n_tokens = c.gain_tokens if c.gain_tokens > 0 else c.n_tokens
        return -n_tokens * (1 + c.n_hits) / max(c.n_bytes, 1), -c.slot

    left, left_on_disk = deadline_s * speeds.write_bytes_per_s, policy.disk_bytes
    chosen = []
    for c in sorted(candidates, key=order):
        if c.n_bytes > left_on_disk:
            continue
        if c.gain_tokens <= 0:
            left_on_disk -= c.n_bytes
        elif c.n_bytes <= left and not reject_save_reason(c, SaveTrigger.SHUTDOWN, policy, speeds):
            chosen.append(c)
            left -= c.n_bytes
            left_on_disk -= c.n_bytes
    return chosen


# ---- sizes and speeds


class FileSizes:
    """Largest sizes of one model's files, the drafter's tensors included, from the length of a slot alone."""

    def __init__(self, model: StateModel) -> None:
        self._fixed_bytes = max_header_bytes(model)
        self._token_bytes = HEADER_BYTES_PER_TOKEN
        self._window_bytes: Counter[int] = Counter()  # by window: bytes of one position
        for layer in (*model.layers, *(model.draft.layers if model.draft is not None else ())):
            n_bytes = sum(tensor.n_bytes for tensor in slot_tensors([layer], 1, model.kv_dtype))
            if layer.space is Space.RECURRENT:
                self._fixed_bytes += n_bytes
            elif layer.space is Space.WINDOW and layer.window:
                self._window_bytes[layer.window] += n_bytes
            else:
                self._token_bytes += n_bytes

    def max_bytes(self, n_tokens: int) -> int:
        """Return the most bytes that the file of a slot takes."""
        windows = sum(n_bytes * min(n_tokens, window - 1) for window, n_bytes in self._window_bytes.items())
        return self._fixed_bytes + n_tokens * self._token_bytes + windows


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


class SpeedMeter:
    """Speeds of prefill and of reads from disk, measured while serving."""

    def __init__(self) -> None:
        self._n_tokens, self._prefill_s = 0, 0.0
        self.read_bytes, self._read_s = 0, 0.0

    def add(self, result: PipelineResult) -> None:
        """Count a step.  Long ones measure prefill by their slowest stage."""
        if result.step.n_tokens >= 32:
            self._n_tokens += result.step.n_tokens
            self._prefill_s += max(answer.compute_s for answer in result.results)

    def add_read(self, n_bytes: int, seconds: float) -> None:
        """Count a restore, up to the last shard and checksum."""
        self.read_bytes += n_bytes
        self._read_s += seconds

    def speeds(self, seen: StoreStatistics) -> SnapshotSpeeds:
        """Return current speeds, with guesses for what was not measured yet.

        Reads count as fast until measured, since what is never saved is never measured.  Before the first restore a
        slow disk shows in the speed of writes; reads need no fsync and hit the page cache in part.
        """

        def per_s(n: int, seconds: float, guess: float) -> float:
            return n / seconds if n and seconds > 0 else guess

        written = per_s(seen.saved_bytes, seen.save_s, 1e9)
        likely = min(4e9, 2 * written) if seen.n_saved else 4e9
        return SnapshotSpeeds(
            prefill_tokens_per_s=per_s(self._n_tokens, self._prefill_s, 500.0),
            read_bytes_per_s=per_s(self.read_bytes, self._read_s, likely),
            write_bytes_per_s=written,
        )


# ---- what to remove


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of ours, of any model."""

    file: str
    n_bytes: int
    used_s: float
    kind: FileKind = FileKind.SNAPSHOT


def files_to_evict(files: Iterable[CacheFile], disk_bytes: int, keep: Collection[str] = ()) -> list[CacheFile]:
    """Select snapshots to remove, least recently used first, until all files together fit into ``disk_bytes``.

    Files that were set aside count but are never selected: they are evidence for the operator.  Nor are those in
    ``keep``.
    """
    files = list(files)
    excess = sum(f.n_bytes for f in files) - disk_bytes
    chosen = []
    for f in sorted(files, key=lambda f: (f.used_s, f.file)):
        if excess <= 0:
            break
        if f.kind is FileKind.SNAPSHOT and f.file not in keep:
            chosen.append(f)
            excess -= f.n_bytes
    return chosen


# ---- when to try again


@dataclass(slots=True)
class Backoff:
    """Pauses after failures of the disk; each is twice as long as the one before, until a success."""

    first_s: float = 60.0
    most_s: float = 3600.0
    _pause_s: float = 0.0
    _until_s: float = 0.0

    def failed(self, now: float) -> None:
        """Record a failure."""
        self._pause_s = min(self.most_s, max(self.first_s, 2 * self._pause_s))
        self._until_s = now + self._pause_s

    def succeeded(self) -> None:
        """End the pauses."""
        self._pause_s = self._until_s = 0.0

    def left_s(self, now: float) -> float:
        """Return the rest of the present pause."""
        return max(0.0, self._until_s - now)
