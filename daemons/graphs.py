"""Steps of few tokens as graphs: what a shard launches is recorded once and then started with one call.

A step of a large model is hundreds of launches of a few microseconds each; started one by one from Python they cost
more than they compute.  A recording is for one pattern (how many slices of how many tokens, how far their attention
reaches); ids, positions, slots and pages are read from memory that each step fills anew.  Invariants: a recorded step
gives the numbers of the same step launched one by one; nothing is recorded that waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from daemons.kv.batch import Batch, Layout, Pattern
from lucevisor.model.values import Space

CAPTURE_AT = 2
"""The time a pattern is seen at which it is recorded: the first one compiles and fills caches."""
MAX_GRAPHS = 64
"""Graphs that are kept; the one that was not used for longest goes."""

Work = Callable[[Tensor | None, Batch], Tensor]
"""What is recorded: rows of a boundary (None at the head) and a batch, to the rows of the shard's end."""


def record(device: torch.device, work: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The launches of ``work`` on a GPU, none of which runs, and its result, which lies in ``pool``'s memory.

    Raises RuntimeError (torch's) when it waits for the device or needs memory that is not there.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # other threads of the daemon copy snapshots meanwhile: theirs are no business of this recording
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            out = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, out


@dataclass(slots=True)
class CapturedGraph:
    """A recorded step and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    rows: Tensor | None
    out: Tensor

    def replay(self, rows: Tensor | None, layout: Layout) -> Tensor:
        self.packed.copy_(layout.pinned(), non_blocking=True)
        if rows is not None and self.rows is not None:
            self.rows.copy_(rows, non_blocking=True)
        self.graph.replay()
        return self.out


@dataclass(slots=True)
class CudaGraphs:
    """The recorded steps of one shard on one GPU.  A result is good until the next step."""

    device: torch.device
    work: Work
    most_tokens: int  # of a step that is recorded: longer ones wait for the device
    warn: Callable[[str], None] = lambda _: None
    _seen: dict[Pattern, int] = field(default_factory=dict)
    _kept: OrderedDict[Pattern, CapturedGraph] = field(default_factory=OrderedDict)
    _tables: dict[Space, tuple[int, int]] = field(default_factory=dict)
    _pool: Any = None  # torch's handle of the memory that all graphs share
    _refused: set[Pattern] = field(default_factory=set)

    def run(self, rows: Tensor | None, layout: Layout, tables: dict[Space, Tensor]) -> Tensor:
        """The shard's rows of a step, from a recording if there is one; makes one when the pattern comes back."""
        pattern = layout.pattern
        if pattern is None or layout.n_rows > self.most_tokens or pattern in self._refused:
            return self.work(rows, Batch(layout, tables, layout.on(self.device)))
        places = {space: (table.data_ptr(), table.stride(0)) for space, table in tables.items()}
        if places != self._tables:  # tables grow
            self._kept.clear()
            self._pool = None  # torch gives the memory back with its last recording
            self._tables = places
        found = self._kept.get(pattern)
        if found is None:
            self._seen[pattern] = self._seen.get(pattern, 0) + 1
            if self._seen[pattern] >= CAPTURE_AT:
                found = self._record(pattern, rows, layout, tables)
            if found is None:
                return self.work(rows, Batch(layout, tables, layout.on(self.device)))
            self._kept[pattern] = found
            if len(self._kept) > MAX_GRAPHS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(pattern)
        return found.replay(rows, layout)

    def _record(
        self, pattern: Pattern, rows: Tensor | None, layout: Layout, tables: dict[Space, Tensor]
    ) -> CapturedGraph | None:
        """Record the step, without running it."""
        packed = layout.on(self.device)
        fixed = None if rows is None else torch.empty_like(rows, device=self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph, out = record(self.device, lambda: self.work(fixed, Batch(layout, tables, packed)), self._pool)
        except RuntimeError as error:  # of whatever kind, out of memory too: the step can still be launched one by one
            self._refused.add(pattern)
            self._pool = None  # a recording that was cut off never gives it back
            what = f"steps of {pattern.n_slices} x {pattern.n_tokens} tokens on {self.device} are launched one by one"
            advice = "if its memory was full, set engine.pages lower, else report this"
            self.warn(f"{what}, which is slower: they cannot be recorded: {error}; {advice}")
            return None
        return CapturedGraph(graph, packed, fixed, out)
