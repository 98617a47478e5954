"""Host memory budget: what each owner of state takes outside of devices.

Boundaries and the journal lease what the plan gave them; others open a memfd when they need it.  Invariant: the files
of an owner stay within its limit, and none takes more than half of what is free.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from weakref import WeakSet

import psutil

from lucevisor.errors import LucevisorError
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.result import HostOwner


class HostMemoryShort(LucevisorError):
    """Host memory has no room for a file, or the system gives none."""


class HostLease:
    """Memory that its owner takes by itself, ``n_bytes`` so far."""

    closed = False

    def __init__(self, owner: HostOwner, n_bytes: int) -> None:
        self.owner, self.n_bytes = owner, n_bytes

    def close(self) -> None:
        self.closed = True


class HostFile(io.FileIO):
    """A memfd for ``n_bytes``, which grows as it is written.  Raises OSError."""

    def __init__(self, owner: HostOwner, n_bytes: int) -> None:
        super().__init__(os.memfd_create(f"lucevisor-{owner}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
        self.owner, self.n_bytes = owner, n_bytes


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory that is free, of the machine and of this process's cgroups."""
    return min([int(psutil.virtual_memory().available), *_left_in_cgroups(proc, cgroups)])


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes that each cgroup (v2) with a limit has left; its page cache counts as free."""
    with suppress(OSError):
        own = (proc / "self" / "cgroup").read_text(encoding="utf-8").rpartition("0::/")[2].strip()
        for path in (Path(own), *Path(own).parents):
            with suppress(OSError, ValueError):  # "max": without a limit
                limit, used = (int((cgroups / path / f"memory.{name}").read_text()) for name in ("max", "current"))
                rows = (cgroups / path / "memory.stat").read_text().splitlines()
                stat = {name: int(n) for name, n in map(str.split, rows)}
                yield max(0, limit - used + stat.get("file", 0) - stat.get("shmem", 0))


class HostMemory:
    """The host memory of one supervisor."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self._available = available
        self._held: WeakSet[HostLease | HostFile] = WeakSet()

    def used(self, owner: HostOwner) -> int:
        return sum(held.n_bytes for held in self._held if held.owner is owner and not held.closed)

    def share(self, owner: HostOwner) -> int:
        """Return half of what an owner has and what is free."""
        return (self.used(owner) + self._available()) // 2

    def release(self, file: HostFile) -> None:
        """Count a file no more and close it in a thread, as freeing memory takes a while."""
        if file in self._held:
            self._held.discard(file)
            Thread(target=file.close, name="free host memory").start()

    def lease(self, owner: HostOwner, n_bytes: int = 0) -> HostLease:
        lease = HostLease(owner, n_bytes)
        self._held.add(lease)
        return lease

    def open(self, owner: HostOwner, n_bytes: int, limit_bytes: int | None = None) -> HostFile:
        """Open a file that takes memory until it is closed, within ``limit_bytes`` of its owner.  Raises
        HostMemoryShort."""
        used, available = self.used(owner), self._available()
        what = f"{format_bytes(n_bytes)} of host memory for {owner}"
        if limit_bytes is not None and used + n_bytes > limit_bytes:
            limit = f"{format_bytes(used)} of its {format_bytes(limit_bytes)} are used"
            raise HostMemoryShort(f"{what}: {limit}; raise {owner.key or 'its limit'}")
        if 2 * n_bytes > available:
            free = f"{format_bytes(available)} that are free"
            raise HostMemoryShort(f"{what} are more than half of the {free}; run fewer long requests, or free memory")
        try:
            file = HostFile(owner, n_bytes)
        except OSError as error:
            raise HostMemoryShort(f"{what}: {error.strerror}") from error
        self._held.add(file)
        return file
