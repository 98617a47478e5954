"""The directory of snapshots, beside a running supervisor or without one: check, list, verify, prune, remove.

For the command line and the admin API; needs no model.  Invariants: only files with names of ours are opened or
touched; a partial file that somebody writes is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.memory import snapshot_disk as disk
from lucevisor.memory.snapshot_disk import say
from lucevisor.memory.snapshots import FileKind, FileUse, read_name
from lucevisor.wire.snapshot_layout import Snapshot, SnapshotError


@dataclass(frozen=True, slots=True)
class Listing:
    """A file of ours.  ``snapshot`` is its header; None with the ``problem`` for one that has no good header."""

    use: FileUse
    snapshot: Snapshot | None
    problem: str = ""


class CacheError(LucevisorError):
    """What was asked of the directory cannot be done."""


def check_directory(directory: Path) -> None:
    """Make the directory if need be, and see that files can be listed, read and made there.  Raises ConfigError."""
    disk.make_directory(directory)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        why = f"cannot be read and written by user {os.geteuid()}"
        raise ConfigError("cache.dir", str(directory), why, "name a directory of yours that can be written")


def listing(directory: Path) -> list[Listing]:
    """Every file of ours, the last used first; reads headers only.  Raises CacheError."""
    found = []
    for use in _files(directory):
        snapshot, problem = None, ""
        if use.kind is FileKind.SNAPSHOT:
            try:
                fd, snapshot, _ = disk.open_snapshot(directory / use.file)
                os.close(fd)
            except SnapshotError as error:
                problem = str(error)
        found.append(Listing(use, snapshot, problem))
    return sorted(found, key=lambda one: (-one.use.used_s, one.use.file))


def verify(directory: Path, file: str) -> str:
    """What is wrong with a file, tensors included; empty when it is good."""
    try:
        fd, snapshot, _ = disk.open_snapshot(directory / file)
        try:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                disk.compare(disk.checksums(fd, snapshot.tensors, pool), snapshot)
        except OSError as error:
            raise disk.unreadable("tensors", error) from error
        finally:
            os.close(fd)
    except SnapshotError as error:
        return str(error)
    return ""


def set_aside(directory: Path, file: str) -> str:
    """Rename a file so that no supervisor uses it; its new name.  Raises CacheError."""
    try:
        with disk.locked(directory):
            return disk.set_aside(directory / file).name
    except OSError as error:
        raise CacheError(f"{file} cannot be renamed in {directory}: {say(error)}") from error


def prune(directory: Path, disk_bytes: int, *, refused: bool = False) -> list[FileUse]:
    """Remove leftovers, with ``refused`` files that were set aside too, then the least recently used until the rest
    takes ``disk_bytes`` at most.  Returns what was removed.  Raises CacheError.
    """
    try:
        with disk.locked(directory):
            gone = []
            for use in _files(directory):
                if use.kind is FileKind.PARTIAL and disk.remove_leftover(directory / use.file):
                    gone.append(use)
                elif use.kind is FileKind.REFUSED and refused:
                    (directory / use.file).unlink(missing_ok=True)
                    gone.append(use)
            return gone + disk.prune_directory(directory, disk_bytes)
    except OSError as error:
        raise CacheError(f"{directory} cannot be pruned: {say(error)}") from error


def remove(directory: Path, files: Iterable[str]) -> list[FileUse]:
    """Remove files by name.  Raises CacheError for a name that is not ours or not there; then nothing was removed."""
    there = {use.file: use for use in _files(directory)}
    wanted = list(dict.fromkeys(files))
    for file in wanted:
        if read_name(file).kind is FileKind.STRANGER:
            raise CacheError(f"{file} is not the name of a snapshot: it is not lucevisor's to remove")
        if file not in there:
            raise CacheError(f"{file} is not in {directory}: `lucevisor cache ls` shows what is")
    gone = []
    try:
        with disk.locked(directory):
            for file in wanted:
                if there[file].kind is not FileKind.PARTIAL:
                    (directory / file).unlink(missing_ok=True)
                elif not disk.remove_leftover(directory / file):
                    raise CacheError(f"{file} is being written: stop its supervisor first")
                gone.append(there[file])
    except OSError as error:
        raise CacheError(f"files of {directory} cannot be removed: {say(error)}") from error
    return gone


def _files(directory: Path) -> list[FileUse]:
    try:
        return disk.list_files(directory)
    except OSError as error:
        raise CacheError(f"cache.dir {directory} cannot be read: {say(error)}") from error


def total_bytes(files: Collection[FileUse]) -> int:
    return sum(f.n_bytes for f in files)
