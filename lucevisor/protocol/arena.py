"""Boundary memory between two stages, one region per step: ``SharedBuffer``, and the arena, in shared memory.

Invariants: the memory cannot shrink, so reads never raise SIGBUS; it has no name in the file system; access is ordered
by the frames on the links, or by the doorbells in the last page. Each region has a doorbell, with the step whose rows
are there; the reader polls it for a while, then sleeps on an event descriptor. A bell is rung after the rows are there,
and has one writer."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from lucevisor.protocol.errors import ArenaError
from lucevisor.protocol.loading import ArenaPlan

if TYPE_CHECKING:
    from typing import Self

SLOT_BYTES: Final = 64  # a cache line each: the reader of one does not slow the writer of another
ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine's stores become visible in order: a bell must not be seen before the rows."""
PAGE_BYTES = 4096
"""Alignment of regions, as device drivers require of memory they access directly."""

MAX_ARENA_BYTES = 64 * 1024**3  # more is a mistake in the plan: 16 regions of 8,192 rows of 16,384 float32 are 8 GiB
MAX_REGIONS = PAGE_BYTES // SLOT_BYTES
"""A bell each, in one page."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedBuffer(Protocol):
    """The boundary between two stages: a region per step in flight, which the writer fills and announces to the reader,
    and which the supervisor gives out again when its step has ended."""

    plan: ArenaPlan
    shared_memory: bool
    """Writer, reader and supervisor map the same bytes.  Otherwise each has its own, and rows travel."""

    @property
    def wake_fds(self) -> Sequence[int]:
        """Descriptors of which one is readable after a ring, and when rows have arrived that ``drain`` takes."""

    def view(self) -> memoryview:
        """Return all regions, writable, for registration with a device."""

    def region(self, index: int) -> memoryview:
        """Return a region: ``plan.region_bytes`` writable, page-aligned bytes."""

    def ring(self, region: int, step_id: int, n_bytes: int) -> None:
        """Tell the reader that the rows of a step, the first ``n_bytes`` of a region, are there."""

    def rung(self, region: int, step_id: int) -> bool:
        """Return whether the rows of a step are in its region."""

    def placed(self, region: int, step_id: int) -> memoryview | None:
        """Return the rows of a step that the supervisor has sent, which are not in its region; None if it has not."""

    def since_s(self, region: int) -> float:
        """Return the seconds since a region's last ring."""

    def drain(self) -> None:
        """Take what has arrived, and let the next sleep on ``wake_fds`` last until the next ring. Call ``rung`` after
        this."""

    def awaited(self, here: bool) -> None:
        """The calling thread sleeps on ``wake_fds`` from now on, so no other one is woken for what arrives; or not."""

    def close(self) -> None:
        """Release the memory; idempotent.  What a tensor uses stays mapped until the tensor is gone."""


def stride_bytes(plan: ArenaPlan) -> int:
    """Distance between the starts of two regions."""
    return -(-plan.region_bytes // PAGE_BYTES) * PAGE_BYTES


def arena_bytes(plan: ArenaPlan) -> int:
    """Size of the shared memory of ``plan``.  ArenaError for an invalid plan."""
    n_bytes = stride_bytes(plan) * plan.n_regions + PAGE_BYTES
    if plan.region_bytes < 1 or not 1 <= plan.n_regions <= MAX_REGIONS or n_bytes > MAX_ARENA_BYTES:
        fewer = f"use fewer groups: a pipeline has {MAX_REGIONS // 2} stages at most"
        raise ArenaError(
            f"{plan.n_regions} regions of {plan.region_bytes} bytes: not 1 to {MAX_REGIONS} regions, "
            f"or not 1 to {MAX_ARENA_BYTES} bytes in total",
            _where(plan),
            fewer if plan.n_regions > MAX_REGIONS else "lower engine.prefill_chunk",
        )
    return n_bytes


class Arena:
    """One mapping of the memory. ``fd`` is the descriptor to pass on; -1 for an attached arena. ``wake_fd``, an
    eventfd, is the object's own; -1: nobody sleeps here."""

    shared_memory = True

    def __init__(self, plan: ArenaPlan, fd: int, mapping: mmap.mmap, wake_fd: int) -> None:
        self.plan = plan
        self.fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._stride = stride_bytes(plan)
        self._bells = memoryview(mapping)[self._stride * plan.n_regions :].cast("Q")
        self.wake_fd = wake_fd

    @classmethod
    def create(cls, plan: ArenaPlan) -> Self:
        """Allocate, seal and map the memory.  ArenaError when the plan is invalid or memory is short."""
        n_bytes = arena_bytes(plan)
        fd = os.memfd_create(f"lucevisor-arena-{plan.boundary}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, n_bytes)
            os.posix_fallocate(fd, 0, n_bytes)  # fail here with an error, not at first touch with a signal
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(plan, fd, _map(fd, n_bytes), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"{n_bytes} bytes of shared memory could not be allocated: {error}",
                _where(plan),
                "free host memory or raise the memory limit of the service; lower engine.prefill_chunk",
            ) from error

    @classmethod
    def attach(cls, fd: int, plan: ArenaPlan, wake_fd: int = -1) -> Self:
        """Map the memory of a received descriptor, which it takes over, also on failure. Raises ArenaError unless it is
        a memfd of the planned size, sealed against resizing."""
        try:
            n_bytes = arena_bytes(plan)
            _refuse_other(fd, plan, n_bytes)
            try:
                return cls(plan, -1, _map(fd, n_bytes), wake_fd)
            except OSError as error:
                raise ArenaError(
                    f"{n_bytes} bytes could not be mapped: {error}",
                    _where(plan),
                    "raise the limit on address space or memory",
                ) from error
        finally:
            os.close(fd)  # the mapping has its own

    def view(self) -> memoryview:
        if self._mapping is None:
            raise ArenaError("the arena is closed", _where(self.plan), "attach it again")
        return memoryview(self._mapping)

    def region(self, index: int) -> memoryview:
        """Region ``index``. Tensors over it keep the memory mapped, even after ``close``."""
        if not 0 <= index < self.plan.n_regions:
            raise ArenaError(
                f"region {index} does not exist; there are {self.plan.n_regions}",
                _where(self.plan),
                "report this: a step refers to it",
            )
        start = index * self._stride
        return self.view()[start : start + self.plan.region_bytes]

    def ring(self, region: int, step_id: int, n_bytes: int) -> None:
        at = region * (SLOT_BYTES // 8)
        self._bells[at + 1] = time.monotonic_ns()
        self._bells[at] = step_id
        if self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)

    def rung(self, region: int, step_id: int) -> bool:
        return self._bells[region * (SLOT_BYTES // 8)] == step_id

    def placed(self, region: int, step_id: int) -> memoryview | None:
        return None  # the supervisor writes to the region, too

    def since_s(self, region: int) -> float:
        return (time.monotonic_ns() - self._bells[region * (SLOT_BYTES // 8) + 1]) / 1e9

    @property
    def wake_fds(self) -> Sequence[int]:
        return (self.wake_fd,)

    def drain(self) -> None:
        with suppress(BlockingIOError):  # nobody rang
            os.eventfd_read(self.wake_fd)

    def awaited(self, here: bool) -> None:
        pass  # nobody else is woken

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._bells.release()
        if self.wake_fd >= 0:
            os.close(self.wake_fd)
            self.wake_fd = -1
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # exported views: the mapping ends with them
                mapping.close()


def descriptors(arenas: Sequence[Arena]) -> list[int]:
    """Return the descriptors sent with a Load: the memory of each arena, then the eventfd of each reader."""
    return [*(arena.fd for arena in arenas), *(arena.wake_fd for arena in arenas)]


def open_arenas(plans: Sequence[ArenaPlan], fds: Sequence[int]) -> list[Arena]:
    """Attach the arenas of a Load by its descriptors.  Raises ArenaError, and ValueError for another number."""
    if len(fds) != 2 * len(plans):
        raise ValueError(f"Load names {len(plans)} arenas, {len(fds)} descriptors arrived")
    return [Arena.attach(*one) for one in zip(fds[: len(plans)], plans, fds[len(plans) :], strict=True)]


def _map(fd: int, n_bytes: int) -> mmap.mmap:
    # MAP_POPULATE: no page faults in the first steps; a fault per 4 KiB costs more than the copy
    return mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _refuse_other(fd: int, plan: ArenaPlan, n_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(
            f"descriptor {fd} is not a memfd: {error}", _where(plan), "restart the group; report it if it happens again"
        ) from error
    size = os.fstat(fd).st_size
    if seals & SEALS != SEALS:
        raise ArenaError(
            f"the memory is not sealed against resizing (seals {seals:#x}, expected {SEALS:#x})",
            _where(plan),
            "its creator must seal it: a peer that shrinks it would kill the reader",
        )
    if size != n_bytes:
        raise ArenaError(
            f"the memory has {size} bytes, the plan says {n_bytes}",
            _where(plan),
            "supervisor and daemon differ: restart the group",
        )


def _where(plan: ArenaPlan) -> str:
    return f"arena between stages {plan.boundary} and {plan.boundary + 1}"
