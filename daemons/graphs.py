"""Graphs of short steps: a shard's kernel launches are captured once and then replayed with one call.

A step of a large model is hundreds of launches of a few microseconds each; issued one by one from Python they cost more
than they compute.  A graph is a CUDA graph, also on HIP, or on a cpu a list of calls of C++ kernels (recording.py).  It
is valid for one key (number of slices, tokens of each, bound of the attended length); ids, positions, slots and pages
are read from memory that each step refills.  One long slice, a chunk of a prompt, is padded: few keys serve all lengths
and starts.  Invariants: a replay gives the same numbers as the eager step; capturing computes nothing; nothing that
synchronises with the device is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.cuda_graphs import captured, not_captured
from daemons.kv.batch import Batch, Layout
from daemons.kv.sequences import Tables
from daemons.kv.slice_group import GraphKey
from daemons.ops.compile_only import compile_only
from daemons.ops.cpu.recording import RecordedMemory, UnrecordableError, record
from daemons.ops.operations import SHORT_SLICE

CAPTURE_AT = 2
"""Occurrence of a key at which it is captured; the first one compiles kernels and fills caches."""
CAPTURED = "captured"
"""Status of a step that is captured on a cpu."""
MAX_GRAPHS = 64
"""Size of the LRU cache of graphs of short slices."""
STAGED = 4
"""Number of page-locked metadata buffers: one step runs and one is queued behind it."""

Output = TypeVar("Output")


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launch it, in stream order on a GPU."""


def memory_pool(device: torch.device) -> Any:
    """Return memory shared by graphs that run one after the other."""
    return RecordedMemory() if device.type == "cpu" else torch.cuda.graph_pool_handle()


def capture(device: torch.device, work: Callable[[], Output], pool: Any) -> tuple[Graph, Output]:
    """Capture the launches of ``work`` without running them; its result lies in ``pool``'s memory.

    Raises RuntimeError when ``work`` synchronises with the device or memory runs out, on a cpu UnrecordableError when
    it computes without kernels.
    """
    if device.type == "cpu":
        return record(work, pool)
    return captured(device, work, pool)


@dataclass(slots=True)
class CapturedGraph(Generic[Output]):
    """A graph with its static inputs, its output, and its batch, in which layers record their queries."""

    graph: Graph
    batch: Batch
    rows: Tensor | None
    out: Output
    refill: Callable[[Layout], None]

    def replay(self, rows: Tensor | None, layout: Layout, await_rows: Callable[[], None]) -> Output:
        self.refill(layout)
        static = pads = None
        if rows is not None and self.rows is not None:
            n, static = rows.shape[0], self.rows
            if n < static.shape[0]:
                static, pads = static[:n], static[n:]
        await_rows()
        if rows is not None and static is not None:
            static.copy_(rows, non_blocking=True)
        if pads is not None:
            pads.zero_()  # as in the eager step
        self.graph.replay()
        return self.out


class Staging:
    """Page-locked buffers for copies of metadata to a GPU, used in turn so that the host waits for no copy."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def refill(self, metadata: Tensor, layout: Layout) -> None:
        """Overwrite a graph's metadata with those of another step of the same key."""
        if metadata.device.type == "cpu":
            metadata.numpy()[:] = layout.numbers
            layout.fill(metadata)
            return
        n = len(layout.numbers)
        if not self._parts or len(self._parts[0][0]) < n:
            memory = torch.empty(STAGED, max(n, 512), dtype=torch.int64, pin_memory=True)  # 16 slices of 4
            self._parts = [(part, torch.cuda.Event()) for part in memory]  # type: ignore[no-untyped-call]
        self._turn = (self._turn + 1) % STAGED
        part, copied = self._parts[self._turn]
        copied.synchronize()  # a copy of some steps ago
        part.numpy()[:n] = layout.numbers
        metadata.copy_(part[:n], non_blocking=True)
        copied.record(torch.cuda.current_stream(metadata.device))
        layout.fill(metadata)


@dataclass(slots=True)
class StepGraphs(Generic[Output]):
    """The graphs of one shard on one device.  ``work``: boundary rows (None with an embedding) and a batch to the
    shard's output, which is valid until the next step, and has pad rows behind those of a padded step.
    """

    device: torch.device
    work: Callable[[Tensor | None, Batch], Output]
    max_tokens: int  # longer steps synchronise with the device and run eagerly
    warn: Callable[[str], None] = lambda _: None
    chunk_rows: int = 0
    """Rows up to which steps of one long slice are padded and captured; 0: none are."""
    share_output: Callable[[Output], Output] = lambda out: out
    """Moves their output to memory that all of them share: the pool would keep one for each graph."""
    cold: bool = False
    """The last run's key is captured, and had no graph yet: the next ones are faster."""
    _seen: dict[GraphKey, int] = field(default_factory=dict)
    _graphs: OrderedDict[GraphKey, CapturedGraph[Output]] = field(default_factory=OrderedDict)
    _chunk_graphs: OrderedDict[GraphKey, CapturedGraph[Output]] = field(default_factory=OrderedDict)
    _chunk_input: Tensor | None = None  # [chunk_rows, boundary width], the static input of all chunk graphs
    _tables: Tables = field(default_factory=dict)
    _staging: Staging = field(default_factory=Staging)
    _batch: Batch | None = None
    _pool: Any = None  # torch's handle of the memory that all graphs share
    _uncapturable: set[GraphKey] = field(default_factory=set)

    @property
    def batch(self) -> Batch:
        """The batch of the last run, with the queries that its layers recorded."""
        assert self._batch is not None
        return self._batch

    def run(
        self,
        rows: Tensor | None,
        layout: Layout,
        tables: Tables,
        await_rows: Callable[[], None] = lambda: None,
    ) -> Output:
        """Return the shard's output of a step: replayed if its key has a graph, else eager.  Captures a repeated key.

        ``rows`` may be in host memory, and are read when ``await_rows`` has returned.
        """
        layout, self.cold = self._padded(layout), False
        key = layout.graph_key
        if key is not None and self.device.type == "cpu" and not layout.is_padded:
            key = key._replace(max_length=0)  # its kernels read lengths from memory
        if key is None or layout.n_rows > self.max_tokens or key in self._uncapturable or compile_only():
            return self._run_eagerly(rows, layout, tables, await_rows)
        if not self._reads(tables):  # a table grew and moved
            self._graphs.clear()
            self._chunk_graphs.clear()
            self._pool = None  # torch frees the memory with its last graph
            self._tables = {**tables}
        # two caches, so that neither kind evicts the other
        graphs, max_graphs = (self._chunk_graphs, 16) if layout.is_padded else (self._graphs, MAX_GRAPHS)
        found = graphs.get(key)
        if found is None:
            self.cold = True
            if len(self._seen) >= 4096:
                self._seen.clear()
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] >= CAPTURE_AT:
                found = self._capture(key, rows, layout, tables)
            if found is None:
                return self._run_eagerly(rows, layout, tables, await_rows)
            graphs[key] = found
            if len(graphs) > max_graphs:
                dropped, _ = graphs.popitem(last=False)
                self._seen[dropped] = 0  # so that alternating keys are not captured at each occurrence
        graphs.move_to_end(key)
        self._batch = found.batch
        return found.replay(rows, layout, await_rows)

    def has(self, layout: Layout, tables: Tables) -> bool:
        """Return whether a step of a few tokens a slice would be replayed."""
        return self._reads(tables) and layout.graph_key in self._graphs

    def _reads(self, tables: Tables) -> bool:
        """Return whether the graphs read these tables."""
        return len(tables) == len(self._tables) and all(map(is_, tables.values(), self._tables.values()))

    def capture_status(self, rows: Tensor | None, layout: Layout, tables: Tables) -> str:
        """Return whether a step is captured on a cpu, and if not, why; computes nothing."""
        batch = Batch(layout, tables, layout.on(self.device), captured=True)
        try:
            capture(self.device, lambda: self.work(rows, batch), memory_pool(self.device))
        except UnrecordableError as reason:
            return f"call by call: {reason}"
        return CAPTURED

    def _padded(self, layout: Layout) -> Layout:
        """Return the step padded as for capture, also the first time, so that kernels compile for these shapes."""
        padded = layout.padded(self.chunk_rows) if layout.n_rows > SHORT_SLICE else None
        if padded is None or padded.n_rows > self.max_tokens or padded.graph_key in self._uncapturable:
            return layout
        return padded

    def _run_eagerly(
        self, rows: Tensor | None, layout: Layout, tables: Tables, await_rows: Callable[[], None]
    ) -> Output:
        batch = self._batch = Batch(layout, tables, layout.on(self.device))
        await_rows()
        if rows is not None:
            rows = rows.to(self.device, non_blocking=True)
            if layout.is_padded:  # others may have fewer rows than tokens: a chain of drafts starts from one
                rows = F.pad(rows, (0, 0, 0, layout.n_rows - len(rows)))
        return self._work(rows, batch, layout)

    def _work(self, rows: Tensor | None, batch: Batch, layout: Layout) -> Output:
        out = self.work(rows, batch)
        return self.share_output(out) if layout.is_padded else out

    def _capture(
        self, key: GraphKey, rows: Tensor | None, layout: Layout, tables: Tables
    ) -> CapturedGraph[Output] | None:
        """Capture the step without running it; None when torch refuses."""
        metadata = layout.on(self.device)
        static_rows = None if rows is None else self._static_rows(rows, layout)
        if self._pool is None:
            self._pool = memory_pool(self.device)
        try:
            batch = Batch(layout, tables, metadata, captured=True)
            graph, out = capture(self.device, lambda: self._work(static_rows, batch, layout), self._pool)
        except UnrecordableError:  # of many tokens, or experts
            self._uncapturable.add(key)
            return None
        except RuntimeError as error:  # any kind, out of memory too: the step still runs eagerly
            self._uncapturable.add(key)
            self._pool = None  # an aborted capture never frees its pool
            self.warn(not_captured(f"steps of {key.n_slices} x {key.n_tokens} tokens on {self.device} run", error))
            return None
        return CapturedGraph(graph, batch, static_rows, out, partial(self._staging.refill, metadata))

    def _static_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        """Return memory from which a graph reads its boundary rows."""
        if not layout.is_padded:
            return torch.empty_like(rows, device=self.device)
        if self._chunk_input is None:
            self._chunk_input = torch.empty(self.chunk_rows, *rows.shape[1:], dtype=rows.dtype, device=self.device)
        return self._chunk_input[: layout.n_rows]
