"""System calls on the snapshot directory: lock, headers, names, and verifying tensor checksums (xxh3).

Files are read, not mapped: an unreadable mapped page would kill the process with SIGBUS.  Invariant: files without a
name of ours are never opened or changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from lucevisor.errors import ConfigError
from lucevisor.protocol.messages import TransferTensor
from lucevisor.snapshots.file_format import LENGTH_BYTES, Fault, SnapshotError, SnapshotHeader, header_bytes, parse
from lucevisor.snapshots.policy import LOCK_FILE, REFUSED, CacheFile, FileKind, files_to_evict, kind_of

CHUNK_BYTES = 1 << 20
"""Bytes read and hashed at a time: they stay in the CPU cache, and the GIL is released meanwhile."""
LOCK_S = 5.0
"""Timeout of the lock in seconds.  It is only held briefly; a longer wait means that its holder is suspended."""

_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errno values of failures of this process, not of the file."""

Hook = Callable[[str], None]
"""Called with its name before each step of the write protocol; tests kill the process or raise OSError there."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: no other supervisor creates, renames or removes files in the meantime.

    Raises TimeoutError, or OSError if there can be no lock file.
    """
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                reason = f"another process has held its lock for {LOCK_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(directory / LOCK_FILE))
            time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock a file for this descriptor and its duplicates; False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def list_files(directory: Path) -> list[CacheFile]:
    """List our regular files of every model: complete, set aside and partial."""
    found = []
    with os.scandir(directory) as rows:
        for row in rows:
            kind = kind_of(row.name)
            if kind is FileKind.OTHER:
                continue
            with suppress(FileNotFoundError):  # removed by another supervisor
                status = row.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(CacheFile(row.name, status.st_size, status.st_mtime, kind))
    return sorted(found, key=lambda f: f.file)


def remove_leftover(path: Path) -> bool:
    """Remove a partial file; False if it has a writer, which locks it.  Hold the directory's lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(fd):
            return False
        with suppress(FileNotFoundError):
            path.unlink()
        return True
    finally:
        os.close(fd)


def set_aside(path: Path, inode: int | None) -> str:
    """Rename a file that no supervisor is to read again; return the new name, "" if another file than ``inode`` has its
    name by now.  Raises OSError."""
    with locked(path.parent):
        if inode is not None and path.lstat().st_ino != inode:
            return ""
        target, n = path.with_name(path.name + REFUSED), 0
        while target.exists():
            n += 1
            target = path.with_name(f"{path.name}{REFUSED}.{n}")
        return path.rename(target).name


def open_snapshot(path: Path) -> tuple[int, SnapshotHeader, os.stat_result]:
    """Open a file and read its header.  Raises SnapshotError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SnapshotError(Fault.GONE, "file", "no longer exists") from error
    except OSError as error:
        raise unreadable("file", error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(Fault.FOREIGN, "file", "is not a regular file")
        return fd, read_header(fd, status.st_size), status
    except BaseException:
        os.close(fd)
        raise


def read_header(fd: int, file_bytes: int) -> SnapshotHeader:
    try:
        length = os.pread(fd, LENGTH_BYTES, 0)
        n = header_bytes(length, file_bytes)
        header = bytearray(n)
        read_into(fd, memoryview(header), 0)
    except OSError as error:
        raise unreadable("header", error) from error
    return parse(bytes(header), file_bytes)


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from the file.  Raises SnapshotError if the file ends too early, and OSError."""
    at = 0
    while at < len(buffer):
        n = os.preadv(fd, [buffer[at:]], offset + at)
        if n == 0:
            raise SnapshotError(Fault.TRUNCATED, "file", f"ends at byte {offset + at}")
        at += n


def unreadable(where: str, error: OSError) -> SnapshotError:
    name = errno.errorcode.get(error.errno or 0, "error")
    return SnapshotError(Fault.UNREADABLE, where, f"cannot be read: {name}, {error.strerror}")


def is_our_own(error: SnapshotError) -> bool:
    """Return whether a file was unreadable only for lack of descriptors or memory."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _OURS


def checksums(fd: int, tensors: Iterable[TransferTensor], pool: ThreadPoolExecutor) -> dict[str, str]:
    """Return the xxh3_64 of every tensor's bytes, several at a time.  Raises OSError, SnapshotError."""
    tensors = list(tensors)
    found = pool.map(lambda t: checksum(fd, t.offset, t.n_bytes), tensors)
    return dict(zip((t.name for t in tensors), found, strict=True))


def checksum(fd: int, offset: int, n_bytes: int) -> str:
    """Return the xxh3_64 of a part of a file, 16 hex digits."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, n_bytes)))
    for at in range(0, n_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, n_bytes - at)]
        read_into(fd, chunk, offset + at)
        digest.update(chunk)
    return digest.hexdigest()


def compare(found: Mapping[str, str], snapshot: SnapshotHeader) -> None:
    """Raise SnapshotError naming the first tensor whose checksum differs from the recorded one."""
    for tensor in snapshot.tensors:
        if found[tensor.name] != snapshot.checksums[tensor.name]:
            raise SnapshotError(
                Fault.DAMAGED,
                f"tensor {tensor.name}",
                f"checksum is {found[tensor.name]}, recorded is {snapshot.checksums[tensor.name]}",
            )


def write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(directory: Path) -> int:
    """Return the bytes that snapshots may still take: a twentieth of the disk, at most 1 GiB, is left to others."""
    found = os.statvfs(directory)
    left_free = min(found.f_blocks * found.f_frsize // 20, 1 << 30)
    return max(0, found.f_bavail * found.f_frsize - left_free)


def prune_directory(directory: Path, disk_bytes: int, keep: Collection[str] = ()) -> list[CacheFile]:
    """Remove and return what :func:`files_to_evict` selects.  Hold the directory's lock."""
    gone = []
    for one in files_to_evict(list_files(directory), disk_bytes, keep):
        (directory / one.file).unlink(missing_ok=True)
        gone.append(one)
    return gone


def make_directory(directory: Path) -> None:
    """Create the directory, private to this user.  Raises ConfigError if that fails."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "is a file, not a directory" if directory.is_file() else f"cannot be made: {error.strerror}"
        raise ConfigError("cache.dir", str(directory), why, "name a writable directory") from error


def describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f" ({Path(str(error.filename)).name})" if error.filename else ""
        return f"{errno.errorcode.get(error.errno, 'errno')} {error.errno}: {error.strerror}{where}"
    return str(error)
