"""Snapshot policy: what to save, and disk eviction, by numbers of tokens and bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.kv_transfer.host_tier import HostSlot
from lucevisor.snapshots.file_format import SnapshotHeader

LOCK_FILE = "lucevisor.lock"
PARTIAL = ".partial"
REFUSED = ".refused"

_NAME = re.compile(
    r"lucevisor-[0-9a-f]{16}-[0-9a-f]{16}"
    r"(?P<kind>\.safetensors|\.[0-9a-f]{16}\.partial|\.safetensors\.refused(\.[0-9]+)?)"
)


class FileKind(StrEnum):
    """Kinds of files in the directory, by their names."""

    SNAPSHOT = "snapshot"
    PARTIAL = "partial"  # being written, or a leftover
    REFUSED = "refused"  # set aside
    OTHER = "other"  # not ours: never opened or touched


def kind_of(name: str) -> FileKind:
    match = _NAME.fullmatch(name)
    if match is None:
        return FileKind.OTHER
    if match["kind"].endswith(PARTIAL):
        return FileKind.PARTIAL
    return FileKind.REFUSED if REFUSED in match["kind"] else FileKind.SNAPSHOT


def file_name(snapshot: SnapshotHeader) -> str:
    """Return the name of a slot's file: the same for the same tokens in the same number formats."""
    text = f"{snapshot.dtype.value} {snapshot.kv_dtype.value} ".encode() + snapshot.packed_tokens
    return f"{name_prefix(snapshot.fingerprint)}{sha256(text).hexdigest()[:16]}.safetensors"


def name_prefix(fingerprint: str) -> str:
    return f"lucevisor-{fingerprint[:16]}-"


@dataclass(frozen=True)
class SnapshotEntry:
    """A complete file in the directory, with its header."""

    file: str
    snapshot: SnapshotHeader
    n_bytes: int
    used_s: float  # Unix time of the last use
    adapter: str = ""  # as of TokenBuffer

    @cached_property
    def tokens(self) -> TokenBuffer:
        return TokenBuffer.from_packed(self.packed_tokens, self.adapter)

    @property
    def n_tokens(self) -> int:
        return self.snapshot.n_tokens

    @property
    def packed_tokens(self) -> bytes:
        return self.snapshot.packed_tokens

    @property
    def paged_out(self) -> PagedOut | None:
        return self.snapshot.paged_out


@dataclass(frozen=True, slots=True)
class SnapshotMatch:
    """``entry``, in host memory or on disk, holds the first ``n_tokens`` of a prompt."""

    entry: SnapshotEntry | HostSlot
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        return self.entry.n_bytes * self.n_tokens // self.entry.n_tokens


def longest_match(
    entries: Iterable[SnapshotEntry | HostSlot], prompt: Sequence[int], most: int, *, whole_only: bool
) -> SnapshotMatch | None:
    """Return the match with most of the prompt's first ``most`` tokens; of several, the first.

    ``whole_only``: all tokens of a slot must be a prefix of the prompt.
    """
    tokens = TokenBuffer.of(prompt)
    most = min(most, len(tokens))
    entries = (entry for entry in entries if entry.adapter == tokens.adapter)
    text = tokens.packed(0, most)
    best, beaten_by = None, text[:TOKEN_BYTES]  # entries of which less matches need no look at the rest
    for entry in entries if most else ():
        if not entry.packed_tokens.startswith(beaten_by) or (whole_only and not text.startswith(entry.packed_tokens)):
            continue
        n = (
            entry.n_tokens
            if whole_only
            else tokens.n_common(TokenBuffer.from_packed(entry.packed_tokens, entry.adapter), most)
        )
        best, beaten_by = SnapshotMatch(entry, n), text[: (n + 1) * TOKEN_BYTES]
        if n == most:
            break
    return best


# ---- what to save


class SaveTrigger(StrEnum):
    """Occasions on which saving a slot is considered."""

    TURN = "turn"  # a chat turn ended
    EVICTION = "eviction"  # its memory is needed
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """``turn_gain``: share of a slot that must be new on disk at the end of a turn; else a chat writes its length
    squared."""

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

    @property
    def gain_tokens(self) -> int:
        return self.n_tokens - self.n_saved_tokens


def reject_save_reason(c: Candidate, trigger: SaveTrigger, policy: SavePolicy) -> str:
    """Return why a slot is not worth a file now; empty if it is."""
    if c.n_tokens < policy.min_tokens:
        return f"{c.n_tokens} tokens are fewer than cache.min_tokens = {policy.min_tokens}"
    if c.n_bytes > policy.disk_bytes:
        return f"{c.n_bytes} bytes are more than the {policy.disk_bytes} of cache.disk or of the disk"
    needed = max(policy.min_tokens, 1)
    if trigger is SaveTrigger.TURN:
        needed = max(needed, int(c.n_tokens * policy.turn_gain))
    if c.gain_tokens < needed:
        return f"{c.n_saved_tokens} of its {c.n_tokens} tokens are on disk; a file needs {needed} new ones"
    return ""


def plan_shutdown_saves(candidates: Iterable[Candidate], policy: SavePolicy) -> list[Candidate]:
    """Select what to save before a stop, of slots in order of their last use: as many as fit the budget beside what is
    saved already."""
    left, chosen = policy.disk_bytes, []
    for c in candidates:
        if c.n_bytes <= left and (c.gain_tokens <= 0 or not reject_save_reason(c, SaveTrigger.SHUTDOWN, policy)):
            left -= c.n_bytes
            if c.gain_tokens > 0:
                chosen.append(c)
    return chosen


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


# ---- what to remove


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of ours, of any model."""

    file: str
    n_bytes: int
    used_s: float
    kind: FileKind = FileKind.SNAPSHOT


def files_to_evict(files: Iterable[CacheFile], disk_bytes: int, keep: Collection[str] = ()) -> list[CacheFile]:
    """Select snapshots to remove, least recently used first, until all files fit into ``disk_bytes``.

    Files that were set aside count but stay: they are evidence for the operator.
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
