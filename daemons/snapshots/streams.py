"""How pieces of state move between a snapshot file and the memory of a device.

The kernel gathers from and scatters to a cpu pool, nothing is staged; on a GPU bytes go through two pinned buffers a
lane, one filled while the other is written out, on a stream of its own.  Memory taken is that of the buffers, however
long the slot.  A lane belongs to one thread.  Invariants: equal number formats move bit by bit; an error names file,
errno and tensor, and leaves lane and daemon usable.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from daemons.errors import DaemonError
from daemons.ops.paged import GROUP
from daemons.snapshots.state_map import MAX_RUNS, PIECE_BYTES, TORCH, Conversion, Piece, Run
from lucevisor.model.values import SCALE


class SnapshotIOError(DaemonError):
    """The snapshot file could not be written or read."""


class SnapshotFile:
    """The descriptor, as the daemon uses it.  ``tick`` is told the tensor before each system call; it may raise."""

    def __init__(self, fd: int, name: str, tick: Callable[[str], None] = lambda _: None) -> None:
        self.fd, self.name, self.tick = fd, name, tick

    def write(self, tensor: str, views: Sequence[memoryview], offset: int) -> None:
        """Write the views one after the other.  Raises SnapshotIOError."""
        self._move(tensor, os.pwritev, "written", views, offset)
        _start_writing(self.fd, offset, sum(map(len, views)))

    def read(self, tensor: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill the views one after the other.  Raises SnapshotIOError, also when the file ends before that."""
        self._move(tensor, os.preadv, "read", views, offset)

    def _move(self, tensor: str, call: Callable[..., int], word: str, views: Sequence[memoryview], offset: int) -> None:
        rest = [v for v in views if len(v)]
        while rest:
            self.tick(tensor)
            try:
                n = call(self.fd, rest[:MAX_RUNS], offset)
            except OSError as error:
                number = f"errno {error.errno} {errno.errorcode.get(error.errno or 0, '')}"
                raise self._error(tensor, f"cannot be {word} at byte {offset}: {number}: {error.strerror}") from error
            if n == 0:
                raise self._error(tensor, f"cannot be {word}: the file ends at byte {offset}")
            offset += n
            rest = _behind(rest, n)

    def _error(self, tensor: str, reason: str) -> SnapshotIOError:
        advice = "see to the disk of cache.dir (space, health); serving goes on without this snapshot"
        return SnapshotIOError(f"tensor {tensor} of {self.name}", reason, advice)


_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _start_writing(fd: int, offset: int, n_bytes: int) -> None:
    """Have the kernel write these bytes to the disk from now on, so that the supervisor's fsync finds little to do.

    A hint whose outcome does not matter: what goes wrong on the way is told by that fsync.
    """
    _libc.sync_file_range(fd, offset, n_bytes, _WRITE)


def _behind(views: list[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of the views behind their first ``n_bytes``."""
    for i, view in enumerate(views):
        if n_bytes < len(view):
            return [view[n_bytes:], *views[i + 1 :]]
        n_bytes -= len(view)
    return []


class Lane(Protocol):
    """One thread's way between files and the memory of one device."""

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Begin only when what the compute thread had queued is done."""

    def save(self, piece: Piece, file: SnapshotFile) -> None:
        """Write a piece, at the latest at the next ``finish``."""

    def restore(self, piece: Piece, file: SnapshotFile) -> None:
        """Read a piece, at the latest at the next ``finish``."""

    def convert(self, conversion: Conversion, file: SnapshotFile) -> None:
        """Read rows of another number format and store them as the pool's."""

    def finish(self, file: SnapshotFile) -> None:
        """Return when everything given is where it belongs."""

    def drop(self) -> None:
        """Forget what a transfer that failed left behind."""


def lane_for(device: torch.device) -> Lane:
    return HostLane() if device.type == "cpu" else DeviceLane(device)


class HostLane:
    """The pool is ordinary memory, or what a GPU's pool keeps there."""

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """On a cpu an operation is done when it returns; a GPU may still be copying."""
        if event is not None:
            event.synchronize()

    def save(self, piece: Piece, file: SnapshotFile) -> None:
        file.write(piece.name, _views(piece), piece.offset)

    def restore(self, piece: Piece, file: SnapshotFile) -> None:
        file.read(piece.name, _views(piece), piece.offset)

    def convert(self, conversion: Conversion, file: SnapshotFile) -> None:
        _convert(conversion, file, pinned=False)

    def finish(self, file: SnapshotFile) -> None:
        """Everything was done at once."""

    def drop(self) -> None:
        """Nothing is kept between calls."""


def _views(piece: Piece) -> list[memoryview]:
    row_bytes = piece.memory.shape[1]
    memory = _bytes(piece.memory)
    return [memory[first * row_bytes : (first + n) * row_bytes] for first, n in piece.runs]


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer.  ``piece``: what was copied here from the device and waits to be written."""

    memory: Tensor
    event: torch.cuda.Event
    piece: Piece | None = None

    def room(self, n_bytes: int) -> Tensor:
        """Its first ``n_bytes``; call when the device is done with it."""
        if self.memory.numel() < n_bytes:  # a single row longer than a piece
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        return self.memory[:n_bytes]


class DeviceLane:
    """The pool lies on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            _Buffer(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), _event()) for _ in range(2)
        ]

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self.stream.wait_event(event)

    def save(self, piece: Piece, file: SnapshotFile) -> None:
        buffer = self._next()
        self._write(buffer, file)  # while the other one is being filled
        memory = _widest(piece.memory)
        host = buffer.room(piece.n_bytes)
        with torch.cuda.stream(self.stream):
            rows = memory.narrow(0, *piece.runs[0]) if len(piece.runs) == 1 else memory.index_select(0, self._at(piece))
            host.view(memory.dtype).view(rows.shape).copy_(rows, non_blocking=True)
            buffer.event.record(self.stream)
        buffer.piece = piece

    def restore(self, piece: Piece, file: SnapshotFile) -> None:
        buffer = self._next()
        buffer.event.synchronize()
        memory = _widest(piece.memory)
        host = buffer.room(piece.n_bytes)
        file.read(piece.name, [_bytes(host)], piece.offset)
        rows = host.view(memory.dtype).view(piece.n_rows, -1)
        with torch.cuda.stream(self.stream):
            if len(piece.runs) == 1:
                memory.narrow(0, *piece.runs[0]).copy_(rows, non_blocking=True)
            else:
                memory.index_copy_(0, self._at(piece), rows.to(self.device, non_blocking=True))
            buffer.event.record(self.stream)

    def convert(self, conversion: Conversion, file: SnapshotFile) -> None:
        with torch.cuda.stream(self.stream):
            _convert(conversion, file, pinned=True)

    def finish(self, file: SnapshotFile) -> None:
        for _ in self._buffers:
            self._write(self._next(), file)
        self.stream.synchronize()

    def drop(self) -> None:
        self.stream.synchronize()
        for buffer in self._buffers:
            buffer.piece = None

    def _next(self) -> _Buffer:
        """The buffer that was used longest ago."""
        self._buffers.reverse()
        return self._buffers[0]

    def _write(self, buffer: _Buffer, file: SnapshotFile) -> None:
        piece, buffer.piece = buffer.piece, None
        if piece is not None:
            buffer.event.synchronize()
            file.write(piece.name, [_bytes(buffer.memory[: piece.n_bytes])], piece.offset)

    def _at(self, piece: Piece) -> Tensor:
        return slots(piece.runs).to(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared."""
    return tensor.view(torch.uint8).view(-1).numpy().data


def slots(runs: Sequence[Run]) -> Tensor:
    """Every row of the runs, int64."""
    return torch.from_numpy(np.concatenate([np.arange(first, first + n) for first, n in runs]))


def _widest(memory: Tensor) -> Tensor:
    """The same bytes in the widest items that divide a row: a GPU copies by items."""
    for kind in (torch.int64, torch.int32, torch.int16):
        if memory.shape[1] % kind.itemsize == 0 and memory.storage_offset() % kind.itemsize == 0:
            return memory.view(kind)
    return memory


def _convert(c: Conversion, file: SnapshotFile, *, pinned: bool) -> None:
    def read(name: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        rows = torch.empty(shape, dtype=TORCH[dtype], pin_memory=pinned)
        file.read(name, [_bytes(rows)], offset)
        return rows.to(c.device, non_blocking=True)

    rows = read(c.name, c.offset, c.dtype, (c.n_rows, *c.shape))
    if c.scale_offset >= 0:
        shape = (c.n_rows, *c.shape[:-1], c.shape[-1] // GROUP)
        scales = read(c.name + SCALE, c.scale_offset, "F16", shape)
        groups = rows.to(torch.float32).view(*shape, GROUP) * scales.to(torch.float32).unsqueeze(-1)
        rows = groups.flatten(-2).narrow(-1, 0, c.width)
    c.target.write(slots(c.runs).to(c.device), rows)
