"""Copy streams: move segments of state between a snapshot file and the memory of a device.

A cpu pool is read and written in place.  A GPU's bytes go through two pinned buffers on a CUDA
stream of their own: one fills while the other is written out, so memory does not grow with the slot.  A copy stream
belongs to one thread.  Invariants: equal number formats are copied bit for bit; an error names file, errno and tensor,
and leaves the copy stream and the daemon usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from daemons.errors import DaemonError
from daemons.snapshots.state_map import SEGMENT_BYTES, TORCH, Conversion, RowRange, StateSegment
from lucevisor.model.values import Q8_GROUP, SCALE
from lucevisor.protocol.files import ByteFile, FileError, os_reason


class SnapshotIOError(DaemonError):
    """Writing or reading the snapshot file failed."""


class SnapshotIO:
    """A file of state.  ``before_io(tensor)`` runs before each access and may raise to cancel."""

    def __init__(self, file: ByteFile, name: str, before_io: Callable[[str], None] = lambda _: None) -> None:
        self.file, self.name, self.before_io = file, name, before_io

    def write(self, tensor: str, views: Sequence[memoryview], offset: int) -> None:
        """Write the views consecutively, no later than the next ``flush``.  Raises SnapshotIOError."""
        self.before_io(tensor)
        with self._reporting(f"tensor {tensor} of {self.name}", "written"):
            self.file.write(views, offset)

    def read(self, tensor: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill the views consecutively.  Raises SnapshotIOError, also when the file is too short."""
        self.before_io(tensor)
        with self._reporting(f"tensor {tensor} of {self.name}", "read"):
            self.file.read(views, offset)

    def flush(self) -> None:
        """Wait until all is written.  Raises SnapshotIOError."""
        with self._reporting(self.name, "written"):
            self.file.flush()

    @contextmanager
    def _reporting(self, where: str, word: str) -> Iterator[None]:
        try:
            yield
        except FileError as error:
            reason = f"cannot be {word} at byte {error.offset}: {os_reason(error)}"
            advice = "check the disk of cache.dir (space, health); serving goes on without this snapshot"
            raise SnapshotIOError(where, reason, advice) from error


def copy_stream_for(device: torch.device) -> CopyStream:
    return CopyStream() if device.type == "cpu" else DeviceCopyStream(device)


class CopyStream:
    """One thread's copies between files and a pool in host memory, or the host part of a GPU's pool: synchronous."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Make later copies wait for ``event``, recorded by the compute thread."""
        event.synchronize()

    def save(self, segment: StateSegment, file: SnapshotIO) -> None:
        """Write a segment, no later than the next ``finish``."""
        file.write(segment.name, _views(segment), segment.offset)

    def restore(self, segment: StateSegment, file: SnapshotIO) -> None:
        """Read a segment, no later than the next ``finish``."""
        file.read(segment.name, _views(segment), segment.offset)

    def convert(self, conversion: Conversion, file: SnapshotIO) -> None:
        """Read rows of another number format and store them in the pool's."""
        _convert(conversion, file, pinned=False)

    def finish(self, file: SnapshotIO) -> None:
        """Complete all copies."""

    def drop(self) -> None:
        """Discard what a failed transfer left in the buffers."""


def _views(segment: StateSegment) -> list[memoryview]:
    row_bytes = segment.memory.shape[1]
    memory = _bytes(segment.memory)
    return [memory[first * row_bytes : (first + n) * row_bytes] for first, n in segment.ranges]


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer.  ``segment``: copied here from the device and not yet written."""

    memory: Tensor
    event: torch.cuda.Event
    segment: StateSegment | None = None

    def take(self, n_bytes: int) -> Tensor:
        """Its first ``n_bytes``; the device must be done with it."""
        if self.memory.numel() < n_bytes:  # a single row longer than a segment
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        return self.memory[:n_bytes]


class DeviceCopyStream(CopyStream):
    """Copies for a pool on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            _Buffer(torch.empty(SEGMENT_BYTES, dtype=torch.uint8, pin_memory=True), _event()) for _ in range(2)
        ]

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def save(self, segment: StateSegment, file: SnapshotIO) -> None:
        buffer = self._next()
        self._write(buffer, file)  # while the other one fills
        memory = _widest(segment.memory)
        host = buffer.take(segment.n_bytes)
        with torch.cuda.stream(self.stream):
            rows = (
                memory.narrow(0, *segment.ranges[0])
                if len(segment.ranges) == 1
                else memory.index_select(0, self._at(segment))
            )
            host.view(memory.dtype).view(rows.shape).copy_(rows, non_blocking=True)
            buffer.event.record(self.stream)
        buffer.segment = segment

    def restore(self, segment: StateSegment, file: SnapshotIO) -> None:
        buffer = self._next()
        buffer.event.synchronize()
        memory = _widest(segment.memory)
        host = buffer.take(segment.n_bytes)
        file.read(segment.name, [_bytes(host)], segment.offset)
        rows = host.view(memory.dtype).view(segment.n_rows, -1)
        with torch.cuda.stream(self.stream):
            if len(segment.ranges) == 1:
                memory.narrow(0, *segment.ranges[0]).copy_(rows, non_blocking=True)
            else:
                memory.index_copy_(0, self._at(segment), rows.to(self.device, non_blocking=True))
            buffer.event.record(self.stream)

    def convert(self, conversion: Conversion, file: SnapshotIO) -> None:
        with torch.cuda.stream(self.stream):
            _convert(conversion, file, pinned=True)

    def finish(self, file: SnapshotIO) -> None:
        for _ in self._buffers:
            self._write(self._next(), file)
        self.stream.synchronize()

    def drop(self) -> None:
        self.stream.synchronize()
        for buffer in self._buffers:
            buffer.segment = None

    def _next(self) -> _Buffer:
        """The least recently used buffer."""
        self._buffers.reverse()
        return self._buffers[0]

    def _write(self, buffer: _Buffer, file: SnapshotIO) -> None:
        segment, buffer.segment = buffer.segment, None
        if segment is not None:
            buffer.event.synchronize()
            file.write(segment.name, [_bytes(buffer.memory[: segment.n_bytes])], segment.offset)

    def _at(self, segment: StateSegment) -> Tensor:
        return slots(segment.ranges).to(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy."""
    return tensor.view(torch.uint8).view(-1).numpy().data


def slots(ranges: Sequence[RowRange]) -> Tensor:
    """Every row of the ranges, int64."""
    return torch.from_numpy(np.concatenate([np.arange(first, first + n) for first, n in ranges]))


def _widest(memory: Tensor) -> Tensor:
    """View bytes as the widest integers that divide a row: index kernels copy item by item."""
    for kind in (torch.int64, torch.int32, torch.int16):
        if memory.shape[1] % kind.itemsize == 0 and memory.storage_offset() % kind.itemsize == 0:
            return memory.view(kind)
    return memory


def _convert(c: Conversion, file: SnapshotIO, *, pinned: bool) -> None:
    def read(name: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        rows = torch.empty(shape, dtype=TORCH[dtype], pin_memory=pinned)
        file.read(name, [_bytes(rows)], offset)
        return rows.to(c.device, non_blocking=True)

    rows = read(c.name, c.offset, c.dtype, (c.n_rows, *c.shape))
    if c.scale_offset >= 0:
        shape = (c.n_rows, *c.shape[:-1], c.shape[-1] // Q8_GROUP)
        scales = read(c.name + SCALE, c.scale_offset, "F16", shape)
        groups = rows.to(torch.float32).view(*shape, Q8_GROUP) * scales.to(torch.float32).unsqueeze(-1)
        rows = groups.flatten(-2).narrow(-1, 0, c.width)
    c.target.write(slots(c.ranges).to(c.device), rows)
