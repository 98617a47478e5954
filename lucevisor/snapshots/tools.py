"""Maintenance of a snapshot directory, with or without a running supervisor: list, verify, prune, remove.

For the command line and the admin API; needs no model.  Invariants: only files with names of ours are touched; a
partial file with a writer is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.snapshots import disk
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.layout import Fault, SnapshotError, SnapshotHeader
from lucevisor.snapshots.policy import CacheFile, FileKind, read_name


@dataclass(frozen=True, slots=True)
class Listing:
    """A file of ours.  ``snapshot`` is its header, or None, with the ``problem``, if it has no valid one."""

    use: CacheFile
    snapshot: SnapshotHeader | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem``: what is wrong with a file, empty if it is intact.  ``gone``: it was removed or renamed meanwhile.

    ``inode``: of the file that was read if it should be set aside, else 0.
    """

    problem: str = ""
    gone: bool = False
    inode: int = 0


class CacheError(LucevisorError):
    """The operation on the directory failed."""


def check_directory(directory: Path) -> None:
    """Create the directory if need be, and check that files can be listed, read and created.  Raises ConfigError."""
    disk.make_directory(directory)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        why = f"cannot be read and written by user {os.geteuid()}"
        raise ConfigError("cache.dir", str(directory), why, "name a writable directory of yours")


def listing(directory: Path) -> list[Listing]:
    """List our files, most recently used first; reads headers only.  Raises CacheError."""
    found = []
    for use in _files(directory):
        snapshot, problem = None, ""
        if use.kind is FileKind.SNAPSHOT:
            try:
                fd, snapshot, _ = disk.open_snapshot(directory / use.file)
                os.close(fd)
            except SnapshotError as error:
                if error.fault is Fault.GONE:  # removed since the directory was listed
                    continue
                problem = str(error)
        found.append(Listing(use, snapshot, problem))
    return sorted(found, key=lambda one: (-one.use.used_s, one.use.file))


def verify(directory: Path, file: str) -> Verdict:
    """Check a file, tensors included."""
    inode = 0
    try:
        inode = _inode(directory / file)
        fd, snapshot, status = disk.open_snapshot(directory / file)
        inode = status.st_ino
        try:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                disk.compare(disk.checksums(fd, snapshot.tensors, pool), snapshot)
        except OSError as error:
            raise disk.unreadable("tensors", error) from error
        finally:
            os.close(fd)
    except SnapshotError as error:
        if error.fault is Fault.GONE:
            return Verdict(gone=True)
        no_fault_of_its_own = error.fault is Fault.OLDER or disk.is_our_own(error)
        return Verdict(str(error), inode=0 if no_fault_of_its_own else inode)
    return Verdict()


def _inode(path: Path) -> int:
    """Return the inode under this name, not following links; 0 if there is none."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def set_aside(directory: Path, file: str, inode: int) -> str:
    """Rename a file so that no supervisor uses it; return the new name.  Raises CacheError.

    Returns "" and renames nothing unless the name still belongs to ``inode``: the file may have been removed or saved
    again since it was found damaged.
    """
    try:
        with disk.locked(directory):
            return disk.set_aside(directory / file).name if inode and _inode(directory / file) == inode else ""
    except OSError as error:
        raise CacheError(f"{file} cannot be renamed in {directory}: {describe_error(error)}") from error


def prune(directory: Path, disk_bytes: int, *, refused: bool = False) -> list[CacheFile]:
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
        raise CacheError(f"{directory} cannot be pruned: {describe_error(error)}") from error


def remove(directory: Path, files: Iterable[str] | None = None) -> list[CacheFile]:
    """Remove files by name, or all of ours; return those that this call removed.

    Raises CacheError, removing nothing, for a name that is not ours or does not exist.
    """
    there = {use.file: use for use in _files(directory)}
    names = list(dict.fromkeys(files)) if files is not None else None
    for file in names or ():
        if read_name(file).kind is FileKind.OTHER:
            raise CacheError(f"{file} is not the name of a snapshot: it is not lucevisor's to remove")
        if file not in there:
            raise CacheError(f"{file} is not in {directory}: `lucevisor cache ls` shows what is")
    gone: list[CacheFile] = []
    try:
        with disk.locked(directory):
            there = {use.file: use for use in _files(directory)}  # final, under the lock
            gone.extend(
                there[file]
                for file in (there if names is None else names)
                if file in there and _remove(directory / file, there[file].kind)
            )
    except OSError as error:
        raise CacheError(f"files of {directory} cannot be removed: {describe_error(error)}") from error
    return gone


def _remove(path: Path, kind: FileKind) -> bool:
    """Remove one file; False if it is gone already.  Raises CacheError for one that is being written."""
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


def total_bytes(files: Collection[CacheFile]) -> int:
    return sum(f.n_bytes for f in files)
