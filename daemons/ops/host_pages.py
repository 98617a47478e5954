"""Pages in host memory: copied there from a device's pools, and read back in chunks beside its computation.

Knows tensors and rows, neither sequences nor what the numbers mean.  On a GPU all copies run on a stream of their own
and pass through two staging buffers on the device, so the page that was copied may be overwritten at once, a chunk is
copied while the one before it is read, and device memory does not grow with the number of pages.

Invariant: copies happen in the order of the calls, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from daemons.device import host_zeros, launching
from lucevisor.model.workspace import HOST_CHUNK_PAGES

PageCopy = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]
"""A device's copy of scattered pages: ``target[:, to[i]] = source[:, of[i]]`` of target, to, source, of, tensors
[layers, units, ...] of which one may be page-locked host memory; None: 0, 1, ...
"""
_ALIGNMENT = 256  # of tensors in a staging buffer, bytes
_MAX_RUNS = 4  # of consecutive rows, up to which a copy by the driver for each in every layer is faster than one launch


def runs_of(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split into runs of consecutive numbers; yield the first index of each and the one behind it."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield start, i
            start = i


@dataclass(frozen=True, slots=True)
class HostLayer:
    """One layer's keys or values in host memory: tensors ``[host pages, 64, ...]``, and where they belong to."""

    parts: list[Tensor]
    pages: HostPages


class HostPages:
    """The host pages of one shard.  Tensors of layers that are allocated together are copied together."""

    def __init__(self, device: torch.device, n_pages: int, copy: PageCopy | None = None) -> None:
        self.device, self.n_pages, self._copy_pages = device, n_pages, copy
        self.page_locked = True
        self._stacks: list[tuple[Tensor, Tensor]] = []  # [layers, pages, 64, ...] on the device and in host memory
        self._staging: _Staging | None = None

    def prepare(self) -> None:
        """Allocate what copies need on the device, after the last ``add``."""
        if self._stacks and self.device.type != "cpu":
            layer_bytes = sum(_page_bytes(stack) // stack.shape[0] for stack, _ in self._stacks)
            stack_bytes = max(_page_bytes(stack) for stack, _ in self._stacks)
            n_bytes = max(HOST_CHUNK_PAGES * layer_bytes, stack_bytes) + 8 * _ALIGNMENT
            self._staging = _Staging(self.device, n_bytes)

    def add(self, stack: Tensor) -> Tensor:
        """Allocate for a pool ``[layers, pages, 64, ...]``; return the same in host memory."""
        advice = "lower kvflash.host, or set kvflash.pool_tokens higher"
        extent = (stack.shape[0], self.n_pages, *stack.shape[2:])
        host, locked = host_zeros(extent, stack.dtype, self.device, f"pages of {self.device}", advice)
        self.page_locked &= locked
        self._stacks.append((stack, host))
        return host

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(host.nbytes for _, host in self._stacks)

    def page_out(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy device pages to host rows, in every layer."""
        self._copy(pages, rows, out=True)

    def page_in(self, rows: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host rows to device pages, in every layer."""
        self._copy(pages, rows, out=False)

    def finish(self) -> None:
        """Make the computation wait for all copies: before it reads host memory itself."""
        if self._staging is not None:
            self._staging.finish()

    def _copy(self, pages: Sequence[int], rows: Sequence[int], *, out: bool) -> None:
        pairs = sorted(zip(rows, pages, strict=True))
        rows, index = [row for row, _ in pairs], torch.tensor([page for _, page in pairs])
        if self.device.type == "cpu":
            at = torch.tensor(rows)
            for stack, host in self._stacks:
                (target, to), (source, of) = ((host, at), (stack, index)) if out else ((stack, index), (host, at))
                target.index_copy_(1, to, source.index_select(1, of))
            return
        index = index.pin_memory().to(self.device, non_blocking=True)
        if not out and self._copy_pages is not None and self.page_locked:
            self.finish()  # of these rows, too
            at = torch.tensor(rows).pin_memory().to(self.device, non_blocking=True)
            with launching(self.device):
                for stack, host in self._stacks:
                    self._copy_pages(stack, index, host, at)
            return
        for stack, host in self._stacks:
            n = max(1, self._ring().n_bytes // _page_bytes(stack))
            for first in range(0, len(rows), n):
                self._stage(stack, host, index[first : first + n], rows[first : first + n], out=out)

    def _stage(self, stack: Tensor, host: Tensor, index: Tensor, rows: Sequence[int], *, out: bool) -> None:
        """Copy through a staging buffer."""
        ring, shape = self._ring(), [((stack.shape[0], len(rows), *stack.shape[2:]), stack.dtype)]

        def copy(views: list[Tensor]) -> None:
            runs = list(runs_of(rows))
            if out and len(runs) > _MAX_RUNS and self._copy_pages is not None and self.page_locked:
                at = torch.tensor(rows).pin_memory().to(self.device, non_blocking=True)
                self._copy_pages(host, at, views[0], None)
                return
            for layer, memory in enumerate(host):
                for start, stop in runs:
                    pair = memory[rows[start] : rows[start] + stop - start], views[0][layer, start:stop]
                    (pair[0] if out else pair[1]).copy_(pair[1] if out else pair[0], non_blocking=True)

        if out:
            views = ring.take(shape, None)
            torch.index_select(stack, 1, index, out=views[0])
            ring.give(lambda: copy(views))
        else:
            [view] = ring.take(shape, copy)
            stack.index_copy_(1, index, view)
            ring.give(None)

    def chunks(self, layers: Sequence[HostLayer], rows: Sequence[int]) -> Iterator[tuple[list[list[Tensor]], Tensor]]:
        """Yield the tensors of some layers, as ``[n, 64, ...]``, with the rows in them to read, int32.

        They are valid until the next chunk is asked for.
        """
        for first in range(0, len(rows), HOST_CHUNK_PAGES):
            part = rows[first : first + HOST_CHUNK_PAGES]
            if self.device.type == "cpu":
                yield [layer.parts for layer in layers], torch.tensor(part, dtype=torch.int32)
                continue
            ring, hosts = self._ring(), [tensor for layer in layers for tensor in layer.parts]

            def copy(views: list[Tensor], part: Sequence[int] = part, hosts: list[Tensor] = hosts) -> None:
                for host, view in zip(hosts, views, strict=True):
                    for start, stop in runs_of(part):
                        source = host[part[start] : part[start] + stop - start]
                        view[start:stop].copy_(source, non_blocking=True)

            views = iter(ring.take([((len(part), *host.shape[1:]), host.dtype) for host in hosts], copy))
            yield [[next(views) for _ in layer.parts] for layer in layers], ring.places[: len(part)]
            ring.give(None)

    def _ring(self) -> _Staging:
        assert self._staging is not None
        return self._staging


def _page_bytes(stack: Tensor) -> int:
    """Bytes of a page in all layers of a stack."""
    return stack[:, 0].numel() * stack.element_size()


class _Staging:
    """Two buffers on a GPU, used in turn by its computation and by copies on a stream of their own."""

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        self.n_bytes, self.device = n_bytes, device
        self.places = torch.arange(HOST_CHUNK_PAGES, dtype=torch.int32, device=device)
        self._buffers = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._used: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._ready: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(device))
        self._at = 0

    def take(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], fill: Callable[[list[Tensor]], None] | None
    ) -> list[Tensor]:
        """Views of the next buffer for the computation, filled by copies on the side stream if ``fill`` is given."""
        current, at = torch.cuda.current_stream(self.device), self._at
        views, offset = [], 0
        for shape, dtype in shapes:
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            views.append(self._buffers[at][offset : offset + n_bytes].view(dtype).view(*shape))
            offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        if fill is None:
            current.wait_event(self._used[at])
            return views
        self._side.wait_event(self._used[at])
        with torch.cuda.stream(self._side):
            fill(views)
        self._ready[at].record(self._side)
        current.wait_event(self._ready[at])
        return views

    def finish(self) -> None:
        """Make the computation wait for all copies there are."""
        for used in self._used:
            torch.cuda.current_stream(self.device).wait_event(used)

    def give(self, copy: Callable[[], None] | None) -> None:
        """The computation has done with the buffer of the last ``take``; ``copy`` reads it on the side stream."""
        current, at = torch.cuda.current_stream(self.device), self._at
        self._used[at].record(current)
        if copy is not None:
            self._side.wait_event(self._used[at])
            with torch.cuda.stream(self._side):
                copy()
            self._used[at].record(self._side)
        self._at = 1 - at
