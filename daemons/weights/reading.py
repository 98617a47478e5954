"""Read weights: file bytes into reused host buffers, and from there to the device.

Knows rows of tensors and bytes, no formats.  Uses pread instead of mmap: no page faults, none of the file in this
process's resident memory, and page-locked buffers for DMA.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from daemons.errors import LoadError
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import TensorInfo
from lucevisor.protocol.threads import ThreadExecutor

REPORT_S = 0.05
HUGE_PAGE_BYTES = 2 << 20
LEAST_SHARE_BYTES = 4 << 20
"""What a thread reads at least: less is not worth handing over."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Rows ``start`` .. ``stop`` of a tensor, restricted to ``columns``; ``pairs``: head dim and rotary dims of heads
    whose rows are to be reordered."""

    tensor: TensorInfo
    start: int
    stop: int
    columns: tuple[int, int]
    pairs: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def byte_columns(self) -> tuple[int, int]:
        """Byte range within a row of the quant blocks that hold the columns."""
        kind = self.tensor.kind
        first, behind = self.columns[0] // kind.block_elements, -(-self.columns[1] // kind.block_elements)
        return first * kind.block_bytes, behind * kind.block_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of its rows in the file."""
        return (self.stop - self.start) * (self.tensor.n_bytes // row_count(self.tensor))


class Read(NamedTuple):
    """Bytes of a tensor from ``skip`` on, to be read into ``target``."""

    target: memoryview
    tensor: TensorInfo
    skip: int


def shares_of(reads: Sequence[Read], n: int) -> list[list[Read]]:
    """The reads in up to ``n`` shares of about as many bytes, of LEAST_SHARE_BYTES at least, in order."""
    total = sum(len(read.target) for read in reads)
    n = max(1, min(n, total // LEAST_SHARE_BYTES))
    shares: list[list[Read]] = [[] for _ in range(n)]
    at = done = 0  # the share, and the bytes before it
    for target, tensor, skip in reads:
        while target:
            n_bytes = min(len(target), total * (at + 1) // n - done)
            shares[at].append(Read(target[:n_bytes], tensor, skip))
            target, skip, done = target[n_bytes:], skip + n_bytes, done + n_bytes
            at += at < n - 1 and done == total * (at + 1) // n
    return shares


class StagingBuffers:
    """Reused host buffers between the files and the device.

    An accelerator has two page-locked ones that alternate, so that reading overlaps copying, and ``n_readers`` threads
    that fill them.
    """

    def __init__(self, files: GgufFiles, device: torch.device, n_readers: int = 0) -> None:
        """``n_readers`` 0: one on a cpu, whose threads are counted; else by the cores of this process.

        Raises MemoryError when a thread does not begin.
        """
        self.files, self.device = files, device
        # A single thread copies less from the page cache than a GPU takes.
        on_device = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self.n_readers = n_readers or (on_device if device.type != "cpu" else 1)
        self._readers = ThreadExecutor(self.n_readers - 1, "weights")  # one more is who loads
        self.accelerated = device.type != "cpu"
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2 if self.accelerated else 1)]
        self.busy: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        self.turn = 0
        self.descriptors = [part.fileno() for part in files.parts]  # of the same open files whose headers were read
        for fd in self.descriptors:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        self._readers.shutdown()
        self.descriptors = []
        self.buffers = []

    def load(self, chunks: Sequence[TensorChunk]) -> list[Tensor]:
        """Raw rows of each chunk on the device, uint8 [rows, row_bytes]; valid until the next call."""
        self.turn = (self.turn + 1) % len(self.buffers)
        event = self.busy[self.turn]
        if event is not None:
            event.synchronize()
        row_bytes = [p.tensor.n_bytes // row_count(p.tensor) for p in chunks]
        sizes = [n * (p.stop - p.start) for n, p in zip(row_bytes, chunks, strict=True)]
        offsets = [0]
        for size in sizes:
            offsets.append(-(-(offsets[-1] + size) // 64) * 64)  # keeps every format aligned
        buffer = self._grown(offsets[-1])
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # torch's stub of numpy() hides the buffer
        self._read_all(
            [
                Read(view[at : at + size], chunk.tensor, chunk.start * n)
                for chunk, n, size, at in zip(chunks, row_bytes, sizes, offsets, strict=False)
            ]
        )
        on_device = buffer.to(self.device, non_blocking=True) if self.accelerated else buffer
        if self.accelerated:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.busy[self.turn] = event
        return [on_device[at : at + size].view(-1, n) for at, size, n in zip(offsets, sizes, row_bytes, strict=False)]

    def _grown(self, n_bytes: int) -> Tensor:
        if self.buffers[self.turn].numel() < n_bytes:
            self.buffers[self.turn] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self.accelerated)
        return self.buffers[self.turn][:n_bytes]

    def _read_all(self, reads: Sequence[Read]) -> None:
        """Read them, in several threads at once.  Nothing is being read any more when this returns or raises."""
        first, *others = shares_of(reads, self.n_readers)
        futures = [self._readers.submit(self._read_each, share) for share in others]
        try:
            self._read_each(first)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _read_each(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self._read(*read)

    def _read(self, target: memoryview, tensor: TensorInfo, skip: int) -> None:
        at = 0
        while at < len(target):
            try:
                n = os.preadv(self.descriptors[tensor.part], [target[at:]], tensor.offset + skip + at)
            except OSError as error:
                reason, advice = f"reading failed: {error.strerror}", "check the disk and the file"
                raise LoadError(self.files.where(tensor), reason, advice) from error
            if n == 0:
                reason = "unexpected end of file: it was truncated after it was opened"
                raise LoadError(self.files.where(tensor), reason, "download the file again")
            at += n


def row_count(tensor: TensorInfo) -> int:
    """Rows of a tensor: the product of all extents but the last."""
    return prod(tensor.shape[:-1])


@dataclass(slots=True)
class ProgressMeter:
    """Counts file bytes and reports them at most every REPORT_S."""

    total_bytes: int
    report: Callable[[int, int], None]
    done_bytes: int = 0
    last_s: float = 0.0

    def add(self, n_bytes: int) -> None:
        self.done_bytes += n_bytes
        now = time.monotonic()
        if now - self.last_s >= REPORT_S or self.done_bytes >= self.total_bytes:
            self.last_s = now
            self.report(self.done_bytes, self.total_bytes)


class HostMemory:
    """One block of cpu memory for the weights of a shard, on huge pages if the kernel has them.

    A decode step reads all weights; with 4 KiB pages the processor's prefetch stops at each page (measured: a sixth
    slower).  Memory is committed when it is written, so reserving too much costs nothing.
    """

    def __init__(self, block: mmap.mmap) -> None:
        self.bytes = torch.frombuffer(block, dtype=torch.uint8)
        self.used = -self.bytes.data_ptr() % HUGE_PAGE_BYTES

    @classmethod
    def reserve(cls, n_bytes: int) -> HostMemory | None:
        """A block of ``n_bytes``; None if the system refuses: a later error about one tensor will say more."""
        try:
            block = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # no huge pages: normal ones work too
                block.madvise(mmap.MADV_HUGEPAGE)
        return cls(block)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for a tensor, aligned to 64 bytes; None when the block is used up."""
        n_bytes = prod(shape) * dtype.itemsize
        start = -(-self.used // 64) * 64
        if start + n_bytes > len(self.bytes):
            return None
        self.used = start + n_bytes
        return self.bytes[start : self.used].view(dtype).view(shape)
