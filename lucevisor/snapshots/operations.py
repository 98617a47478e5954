"""The operations behind ``lucevisor cache``, answering in JSON: shared by the command line and the admin API.

Everything blocks on the disk.  Knows neither models nor supervisors.  Invariant: a name that is not one of our files in
the directory is refused before anything is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lucevisor.snapshots import tools
from lucevisor.snapshots.policy import CacheFile, FileKind
from lucevisor.snapshots.tools import CacheError, Listing

JsonObject = dict[str, Any]


def files(directory: Path) -> list[JsonObject]:
    """List our files, most recently used first; reads headers only.  Raises CacheError."""
    return [_file(one) for one in tools.listing(directory)]


def to_verify(directory: Path, wanted: Sequence[str]) -> list[str]:
    """Return the snapshots to check: those named, or all.  Raises CacheError for a name that is not a snapshot."""
    found = [one.use.file for one in tools.listing(directory) if one.use.kind is FileKind.SNAPSHOT]
    for file in wanted:
        if file not in found:
            raise CacheError(f"{file} is not a snapshot in {directory}: `lucevisor cache ls` shows what is there")
    return list(dict.fromkeys(wanted)) or found


def verify(directory: Path, file: str, *, set_aside: bool) -> JsonObject:
    """Compare every checksum of one file.  ``problem`` is empty if it is intact, ``gone`` says that it was removed in
    the meantime, ``set_aside`` is its new name, if any.
    """
    found = tools.verify(directory, file)
    aside = tools.set_aside(directory, file, found.inode) if found.problem and set_aside else ""
    return {"file": file, "problem": found.problem, "gone": found.gone, "set_aside": aside}


def prune(directory: Path, disk_bytes: int, *, refused: bool) -> list[JsonObject]:
    """Remove leftovers, then the least recently used files until the rest fits; return them.  Raises CacheError."""
    return [_use(one) for one in tools.prune(directory, disk_bytes, refused=refused)]


def remove(directory: Path, wanted: Sequence[str], *, everything: bool) -> list[JsonObject]:
    """Remove files by name, or all of ours; return them.  Raises CacheError."""
    return [_use(one) for one in tools.remove(directory, None if everything else wanted)]


def _use(use: CacheFile) -> JsonObject:
    return {"file": use.file, "state": use.kind.value, "n_bytes": use.n_bytes, "used_s": use.used_s}


def _file(one: Listing) -> JsonObject:
    row = _use(one.use) | {"problem": one.problem}
    if one.problem:
        row["state"] = "damaged"
    if one.snapshot is not None:
        s = one.snapshot
        row |= {
            "model": s.model,
            "architecture": s.architecture,
            "fingerprint": s.fingerprint,
            "n_tokens": s.n_tokens,
            "dtype": s.dtype.value,
            "kv_dtype": s.kv_dtype.value,
            "created_s": s.created_s,
        }
    return row
