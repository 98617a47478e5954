"""Maintenance of a snapshot directory without a model: list, verify, prune, remove, in JSON.  Blocks on the disk.

Invariants: only files with names of ours are touched; a partial file with a writer is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.snapshots import disk
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.file_format import Fault, SnapshotError
from lucevisor.snapshots.policy import CacheFile, FileKind, kind_of

JsonObject = dict[str, Any]


class CacheError(LucevisorError):
    """The operation on the directory failed."""


def check_directory(directory: Path) -> None:
    """Create the directory if need be, and check access.  Raises ConfigError."""
    disk.make_directory(directory)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        why = f"cannot be read and written by user {os.geteuid()}"
        raise ConfigError("cache.dir", str(directory), why, "name a writable directory of yours")


def files(directory: Path) -> list[JsonObject]:
    """List our files, most recently used first; reads headers only.  Raises CacheError."""
    rows = []
    for file in sorted(_files(directory), key=lambda file: (-file.used_s, file.file)):
        row = _row(file) | {"problem": ""}
        if file.kind is FileKind.SNAPSHOT:
            try:
                fd, header, _ = disk.open_snapshot(directory / file.file)
                os.close(fd)
            except SnapshotError as error:
                if error.fault is Fault.GONE:  # removed since the directory was listed
                    continue
                row |= {"problem": str(error), "state": "damaged"}
            else:
                row |= {
                    "model": header.model,
                    "architecture": header.architecture,
                    "fingerprint": header.fingerprint,
                    "n_tokens": header.n_tokens,
                    "dtype": header.dtype.value,
                    "kv_dtype": header.kv_dtype.value,
                    "created_s": header.created_s,
                }
        rows.append(row)
    return rows


def to_verify(directory: Path, names: Sequence[str]) -> list[str]:
    """Return the snapshots to check: those named, or all.  Raises CacheError for another name."""
    recent_first = sorted(_files(directory), key=lambda file: (-file.used_s, file.file))
    snapshots = [file.file for file in recent_first if file.kind is FileKind.SNAPSHOT]
    for name in names:
        if name not in snapshots:
            raise CacheError(f"{name} is not a snapshot in {directory}: `lucevisor cache ls` shows what is there")
    return list(dict.fromkeys(names)) or snapshots


def verify(directory: Path, file: str, *, set_aside: bool) -> JsonObject:
    """Compare every checksum of one file.  Raises CacheError.

    ``problem`` is empty for an intact file, ``gone`` true for a removed one; ``set_aside``: its new name if renamed.
    """
    problem, is_gone, new_name, path = "", False, "", directory / file
    inode = path.lstat().st_ino if path.is_symlink() or path.exists() else None
    try:
        fd, header, status = disk.open_snapshot(path)
        inode = status.st_ino
        try:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                disk.compare(disk.checksums(fd, header.tensors, pool), header)
        except OSError as error:
            raise disk.unreadable("tensors", error) from error
        finally:
            os.close(fd)
    except SnapshotError as error:
        is_gone = error.fault is Fault.GONE
        problem = "" if is_gone else str(error)
        may_be_intact = is_gone or error.fault is Fault.OLDER or disk.is_our_own(error)
        if set_aside and not may_be_intact:
            try:
                new_name = disk.set_aside(path, inode)
            except FileNotFoundError:  # removed meanwhile
                pass
            except OSError as failure:
                reason = describe_error(failure)
                raise CacheError(f"{file} cannot be renamed in {directory}: {reason}") from failure
    return {"file": file, "problem": problem, "gone": is_gone, "set_aside": new_name}


def prune(directory: Path, disk_bytes: int, *, refused: bool) -> list[JsonObject]:
    """Remove leftovers, with ``refused`` files set aside too, then the least recently used ones beyond ``disk_bytes``.

    Returns what was removed.  Raises CacheError.
    """
    try:
        with disk.locked(directory):
            removed = []
            for file in _files(directory):
                if file.kind is FileKind.PARTIAL and disk.remove_leftover(directory / file.file):
                    removed.append(file)
                elif file.kind is FileKind.REFUSED and refused:
                    (directory / file.file).unlink(missing_ok=True)
                    removed.append(file)
            return [_row(file) for file in removed + disk.prune_directory(directory, disk_bytes)]
    except OSError as error:
        raise CacheError(f"{directory} cannot be pruned: {describe_error(error)}") from error


def remove(directory: Path, requested: Sequence[str], *, everything: bool) -> list[JsonObject]:
    """Remove files by name, or all of ours; return those removed.  Raises CacheError, removing nothing, for others."""
    held = {file.file for file in _files(directory)}
    for name in () if everything else requested:
        if kind_of(name) is FileKind.OTHER:
            raise CacheError(f"{name} is not the name of a snapshot: it is not lucevisor's to remove")
        if name not in held:
            raise CacheError(f"{name} is not in {directory}: `lucevisor cache ls` shows what is")
    try:
        with disk.locked(directory):
            files = {file.file: file for file in _files(directory)}  # final, under the lock
            names = files if everything else dict.fromkeys(requested)
            return [
                _row(files[name]) for name in names if name in files and _remove(directory / name, files[name].kind)
            ]
    except OSError as error:
        raise CacheError(f"files of {directory} cannot be removed: {describe_error(error)}") from error


def _remove(path: Path, kind: FileKind) -> bool:
    """Remove one file; False if it is gone.  Raises CacheError for one that is being written."""
    if kind is not FileKind.PARTIAL:
        path.unlink(missing_ok=True)
    elif not disk.remove_leftover(path):
        if path.exists():
            raise CacheError(f"{path.name} is being written: stop its supervisor first")
        return False  # its writer aborted
    return True


def _files(directory: Path) -> list[CacheFile]:
    try:
        return disk.list_files(directory)
    except OSError as error:
        raise CacheError(f"cache.dir {directory} cannot be read: {describe_error(error)}") from error


def _row(file: CacheFile) -> JsonObject:
    return {"file": file.file, "state": file.kind.value, "n_bytes": file.n_bytes, "used_s": file.used_s}
