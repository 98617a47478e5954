"""What to save to disk, what to use again, what to throw away: decisions over snapshot files, without touching any.

Pure: sizes, times and tokens in, choices out; ``now`` is an argument.  Knows no directory and no page.  Invariants: a
match never reaches beyond the prompt, a slot with a recurrent state or a window matches whole or not at all; victims
are the least recently used files, and no more than the budget asks for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from lucevisor.snapshots.layout import SnapshotHeader

LOCK_FILE = "lucevisor.lock"
PARTIAL = ".partial"
REFUSED = ".refused"

_NAME = re.compile(
    r"lucevisor-(?P<model>[0-9a-f]{16})-[0-9a-f]{16}"
    r"(?P<kind>\.safetensors|\.[0-9a-f]{16}\.partial|\.safetensors\.refused(\.[0-9]+)?)"
)


class FileKind(StrEnum):
    """What a name in the directory says about its file."""

    SNAPSHOT = "snapshot"
    PARTIAL = "partial"  # being written, or left over
    REFUSED = "refused"  # set aside
    OTHER = "other"  # not ours: never opened, never touched


@dataclass(frozen=True, slots=True)
class NameParts:
    """``model``: the first 16 digits of the fingerprint; empty for a stranger."""

    kind: FileKind
    model: str


def read_name(name: str) -> NameParts:
    """Say whose file of the directory ``name`` is."""
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
    """The name of a slot's file: the same tokens in the same number formats replace each other."""
    text = f"{snapshot.dtype.value} {snapshot.kv_dtype.value} ".encode() + snapshot.packed_tokens
    return f"lucevisor-{snapshot.fingerprint[:16]}-{sha256(text).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A complete file in the directory, by its header."""

    file: str
    snapshot: SnapshotHeader
    n_bytes: int
    used_s: float  # Unix time of the last use

    @property
    def n_tokens(self) -> int:
        return self.snapshot.n_tokens


@dataclass(frozen=True, slots=True)
class SnapshotMatch:
    """The first ``n_tokens`` of a prompt are in ``entry``."""

    entry: SnapshotEntry
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        """Of the part that would be read."""
        return self.entry.n_bytes * self.n_tokens // self.entry.n_tokens


# ---- what to save


class SaveTrigger(StrEnum):
    """Why a slot might be saved now."""

    TURN = "turn"  # a chat turn ended
    EVICTION = "eviction"  # memory is needed for another slot
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SnapshotSpeeds:
    """What things cost here, measured by the caller."""

    prefill_tokens_per_s: float
    read_bytes_per_s: float = 1e9
    write_bytes_per_s: float = 1e9
    step_s: float = 0.0  # a step of one token, by which a restored state is judged


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """``min_tokens`` and ``disk_bytes`` of ``[cache]``.

    ``turn_gain``: at the end of a turn, the share of a slot that must be new on disk; a conversation that is saved anew
    each turn would write its length squared.
    """

    min_tokens: int
    disk_bytes: int
    turn_gain: float = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefix slot in memory.  ``n_saved_tokens``: how much of it a file on disk would give back already."""

    slot: int
    n_tokens: int
    n_bytes: int
    n_saved_tokens: int = 0
    n_hits: int = 0

    @property
    def gain_tokens(self) -> int:
        return self.n_tokens - self.n_saved_tokens


def reject_save_reason(candidate: Candidate, trigger: SaveTrigger, policy: SavePolicy, speeds: SnapshotSpeeds) -> str:
    """Why a slot is not worth a file now; empty when it is."""
    c = candidate
    if c.n_tokens < policy.min_tokens:
        return f"{c.n_tokens} tokens are less than cache.min_tokens = {policy.min_tokens}"
    if c.n_bytes > policy.disk_bytes:
        return f"{c.n_bytes} bytes are more than cache.disk = {policy.disk_bytes}"
    needed = max(policy.min_tokens, 1)
    if trigger is SaveTrigger.TURN:
        needed = max(needed, int(c.n_tokens * policy.turn_gain))
    if c.gain_tokens < needed:
        return f"{c.n_saved_tokens} of its {c.n_tokens} tokens are on disk; {needed} new ones would be worth a file"
    compute_s = c.gain_tokens / speeds.prefill_tokens_per_s
    read_s = speeds.step_s + c.n_bytes / speeds.read_bytes_per_s
    if compute_s <= read_s:
        return f"computing {c.gain_tokens} tokens takes {compute_s:.3f} s, reading them {read_s:.3f} s"
    return ""


def reject_restore_reason(
    n_tokens: int, gain_tokens: int, n_bytes: int, policy: SavePolicy, speeds: SnapshotSpeeds
) -> str:
    """Why a file that gives back ``n_tokens`` of a prompt is not read for the ``gain_tokens`` that memory has not;
    empty when it is.
    """
    if n_tokens < policy.min_tokens:
        return f"{n_tokens} tokens are less than cache.min_tokens = {policy.min_tokens}"
    compute_s, read_s = gain_tokens / speeds.prefill_tokens_per_s, speeds.step_s + n_bytes / speeds.read_bytes_per_s
    if compute_s <= read_s:
        return f"computing {gain_tokens} tokens takes {compute_s:.3f} s, reading them {read_s:.3f} s"
    return ""


def plan_shutdown_saves(
    candidates: Iterable[Candidate], policy: SavePolicy, speeds: SnapshotSpeeds, deadline_s: float
) -> list[Candidate]:
    """What to save before a stop, in order: what saves most computing per byte, as much as can be written in time."""
    worth = [c for c in candidates if not reject_save_reason(c, SaveTrigger.SHUTDOWN, policy, speeds)]
    worth.sort(key=lambda c: (-c.gain_tokens * (1 + c.n_hits) / max(c.n_bytes, 1), c.slot))
    left = deadline_s * speeds.write_bytes_per_s
    chosen = []
    for c in worth:
        if c.n_bytes <= left:
            chosen.append(c)
            left -= c.n_bytes
    return chosen


# ---- what to throw away


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One snapshot file, of any model, or one that was set aside."""

    file: str
    n_bytes: int
    used_s: float
    kind: FileKind = FileKind.SNAPSHOT


def victims(files: Iterable[CacheFile], disk_bytes: int, keep: Collection[str] = ()) -> list[CacheFile]:
    """The snapshots to remove, least recently used first, until all files together take ``disk_bytes`` at most.

    Files that were set aside count but are never chosen: they are evidence, and the operator's.  Nor are those of
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
