"""Layerwise replay: recomputes a lost daemon's state layer by layer while its replacement loads the weights.

Device memory must hold the rows of all tokens beside the weights, otherwise nothing is replayed.  On a GPU a thread
computes a layer while the next one is read.
Invariant: pages, states and tables are as if the steps had run one after the other.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from daemons.device import CPU, empty_cache, launching, memory_free, synchronize, torch_dtype
from daemons.errors import StateError
from daemons.heartbeat import Reporter
from daemons.kv.batch import Batch, Layout
from daemons.kv.sequences import Sequences
from daemons.models.blocks import Block, advance_state
from daemons.models.shard import ShardModel
from daemons.ops.attention import Causal, attention
from daemons.ops.operations import SHORT_SLICE, DeltaNetPools, GatedDeltaNetParams
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import TILES, empty_packed
from lucevisor.model.quant_types import TILE_ROWS
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import KvGroup, LayerRange
from lucevisor.protocol.files import ByteFile, FileError
from lucevisor.protocol.loading import Load, StagePlan, StageReplay
from lucevisor.protocol.steps import CopyPage, CopyState, Operation, Slice, Step
from lucevisor.protocol.threads import ThreadExecutor

EPSILON = 1e-6


def load_kernels(spec: ModelSpec, layers: LayerRange, selector: KernelSelector, n_rows: int) -> None:
    """Launch what ``n_rows`` rows of these layers need, on the current stream of ``selector``'s device.

    Raises RuntimeError, as torch does.
    """
    own = spec.layers[layers.start : layers.stop]
    rows = torch.zeros(n_rows, spec.hidden_size, dtype=selector.dtype, device=selector.device)
    norm = selector.operations.norm(torch.ones(spec.hidden_size, device=selector.device), spec.hidden_size, EPSILON)
    norm.fused_add(rows, rows)
    if selector.kernels:
        _products(spec, own, selector, rows)
    _attention(own, selector)
    if layers.start == 0:
        _lookup(spec, selector, n_rows)
    recurrent = next((layer for layer in own if layer.kv_group is KvGroup.RECURRENT), None)
    if recurrent is not None:
        _delta_net(recurrent, selector, n_rows)


def _products(spec: ModelSpec, layers: tuple[LayerSpec, ...], selector: KernelSelector, rows: torch.Tensor) -> None:
    from daemons.ops.packed_linear import PackedLinear

    tensors = (spec.files.tensors[name] for layer in layers for name in layer.tensors if name in spec.files.tensors)
    kinds = {t.kind.name: t.kind for t in tensors if len(t.shape) == 2 and t.kind.name in TILES}
    for kind in kinds.values():
        packed = empty_packed(kind, TILE_ROWS, spec.hidden_size, selector.device)
        packed.tiles.zero_()
        selector.operations.act_and_mul(PackedLinear(packed, spec.hidden_size)(rows), "silu")


def _lookup(spec: ModelSpec, selector: KernelSelector, n_rows: int) -> None:
    """Rows of the token table, which nothing else needs before the first layer."""
    for kind, shape in ((spec.files.tensors[name].kind, shape) for name, shape in spec.embedding_tensors.items()):
        if kind.name in TILES and selector.kernels:
            packed = empty_packed(kind, TILE_ROWS, shape[-1], selector.device)
            packed.tiles.zero_()
            ids = torch.zeros(n_rows, dtype=torch.int64, device=selector.device)
            selector.table(kind, packed, shape[-1])(ids)


def _delta_net(layer: LayerSpec, selector: KernelSelector, n_rows: int) -> None:
    convolution, matrices = (part.shape for part in layer.state)
    n_value, dim = matrices[:2]
    n_key = (convolution[1] // dim - n_value) // 2

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=selector.device)

    norm = selector.operations.norm(zeros(dim), dim, EPSILON)
    taps = zeros(convolution[0] + 1, convolution[1])
    params = GatedDeltaNetParams(n_key, n_value, dim, taps, zeros(n_value), zeros(n_value), norm)
    compute = selector.operations.gated_delta_net(params)
    if compute is not None and compute.max_tokens is None:
        ids, kept = zeros(1, dtype=torch.int64), zeros(1, 0, dtype=torch.int64)
        spans = torch.tensor([[0, n_rows]], device=selector.device)
        inputs = zeros(n_rows, params.columns, dtype=selector.dtype)
        pools = DeltaNetPools(zeros(1, *convolution), zeros(1, *matrices), zeros(1, layer.state[1].update_width))
        compute(inputs, pools, ids, kept, spans)
        selector.operations.apply_updates(pools.states[None], pools.updates[None], 0, ids, 0)


def _attention(layers: tuple[LayerSpec, ...], selector: KernelSelector) -> None:
    """Few rows do: the library's kernels are loaded together."""
    paged = next((layer for layer in layers if layer.kv_group is KvGroup.FULL and layer.state), None)
    if paged is not None:
        heads, dim = paged.state[0].shape[-2:]
        x = torch.zeros(1, SHORT_SLICE, heads, dim, dtype=selector.dtype, device=selector.device)
        attention(x, x, x, Causal(), scale=1.0)


MAX_ROW_READERS = 4
MIN_PART_BYTES = 4 << 20
"""Smallest part for a thread.  One thread alone copies slower than a GPU receives."""
SLOT_BYTES = 32 << 20


class RowFile:
    """Boundary rows ``[n, width]`` in a file.  They may still be being written."""

    def __init__(self, file: ByteFile, width: int, dtype: torch.dtype) -> None:
        """``file`` is closed with this object."""
        self._file, self._width, self._dtype = file, width, dtype
        weakref.finalize(self, file.close)

    def read(self, first: int, n: int, device: torch.device) -> Tensor:
        """Return rows ``[n, width]`` on a device, waiting until they are written; the copies run on the current stream.

        Raises OSError if the file ends before them, MemoryError if memory cannot be page-locked or a thread does not
        begin.
        """
        row_bytes = self._width * self._dtype.itemsize
        at, slots = first * row_bytes, list[_PinnedBuffer]()
        if device == CPU:
            # by numpy, which raises MemoryError where torch raises a RuntimeError
            found = torch.from_numpy(np.empty(n * row_bytes, dtype=np.uint8))
        else:
            found = torch.empty(n * row_bytes, dtype=torch.uint8, device=device)
            slots += [_PinnedBuffer() for _ in range(2)]  # one page-locked buffer is filled while the other is copied
        n_readers = min(MAX_ROW_READERS, len(found) // MIN_PART_BYTES)
        with ThreadExecutor(n_readers if n_readers > 1 else 0, "row reader") as readers:
            for part in torch.split(found, SLOT_BYTES):
                while not self._is_written(at + len(part)):
                    time.sleep(1e-3)  # rows that are still being written
                if slots:
                    slots.append(slot := slots.pop(0))
                    self._fill(readers, slot.take(len(part)), at)
                    slot.copy_to(part)
                else:
                    self._fill(readers, part, at)
                at += len(part)
        return found.view(self._dtype).view(n, self._width)

    def _fill(self, readers: Executor, target: Tensor, at: int) -> None:
        """Read written bytes into host memory, with several threads if they are many."""
        view = memoryview(target.numpy())  # type: ignore[arg-type]  # torch's stub of numpy() hides the buffer
        n = min(MAX_ROW_READERS, len(view) // MIN_PART_BYTES)
        if n < 2:
            self._read(view, at)
            return
        borders = [len(view) * i // n for i in range(n + 1)]
        for done in [readers.submit(self._read, view[a:b], at + a) for a, b in pairwise(borders)]:
            done.result()

    def _read(self, view: memoryview, at: int) -> None:
        try:
            self._file.read([view], at)
        except FileError as error:
            raise OSError(f"the file of rows cannot be read: {error.reason}") from error

    def _is_written(self, n_bytes: int) -> bool:
        """Return whether the file has so many bytes yet.  Raises OSError if it never will."""
        try:
            size, complete = self._file.status()
        except FileError as error:
            raise OSError(f"the file of rows cannot be read: {error.reason}") from error
        if size >= n_bytes:
            return True
        if complete:
            raise OSError(f"the file of rows ends before row {n_bytes // (self._width * self._dtype.itemsize)}")
        return False


class _PinnedBuffer:
    """A page-locked buffer between the file and a GPU; torch caches its memory for the next one."""

    def __init__(self) -> None:
        """Raises MemoryError."""
        try:
            self._memory = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(f"{SLOT_BYTES} bytes cannot be page-locked: {error}") from error
        self._copied: torch.cuda.Event | None = None

    def take(self, n_bytes: int) -> Tensor:
        """Return the first ``n_bytes``, once their last copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory[:n_bytes]

    def copy_to(self, target: Tensor) -> None:
        """Copy the first bytes to a GPU, on its current stream."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        self._copied = torch.cuda.current_stream(target.device).record_event()


WORK_BYTES = 1 << 30
"""Workspace for layers that compute as many rows as a step has."""


@dataclass(slots=True)
class _Chunk:
    """Slices that are computed together.

    ``places``: first row in the file and number of rows; ``rows``: input of the next layer; ``copies``: operations
    after it.
    """

    slices: list[Slice]
    places: list[tuple[int, int]]
    rows: Tensor | None = None
    copies: list[Operation] = field(default_factory=list)
    arranged: tuple[Layout, Tensor] | None = None  # with the metadata on the device

    def join(self, other: _Chunk) -> None:
        """Add another chunk's slices."""
        self.slices += other.slices
        self.places += other.places
        self.copies += other.copies


class LayerwiseReplay:
    """The steps of ``replay`` over one stage.  ``problem``: why they were not computed; empty if they were."""

    def __init__(self, replay: StageReplay, plan: StagePlan, load: Load, spec: ModelSpec, rows: RowFile) -> None:
        self.steps: Sequence[Step] = replay.steps
        self.sequences: Sequences | None = None
        self.problem = ""
        self.max_rows = 0  # rows computed together; 0: those of a step
        self._replay, self._load, self._spec, self._rows = replay, load, spec, rows
        self._layers = plan.shards[0].layers
        self._chunks: list[_Chunk] = []
        self._thread: ThreadExecutor | None = None
        self._reader: ThreadExecutor | None = None
        self._all_rows: Future[Tensor] | None = None  # from the file, until the first layer is computed
        self._submitted: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None  # on which weights are loaded
        self._missing_bytes = 0  # of weights, when the last layer was loaded
        if len(plan.shards) > 1:
            self.problem = "the stage runs on several devices"
        elif KvGroup.WINDOW in spec.kv_groups():
            self.problem = "window pages are reused as a text goes on, so layers cannot be replayed one by one"

    @contextmanager
    def loading(self, selector: KernelSelector) -> Iterator[None]:
        """Load weights on a CUDA stream of higher priority while another thread computes.

        The memory of the rows is released at the end.
        """
        device = selector.device
        if device.type == "cpu" or self.problem or (threads := self._begin_threads()) is None:
            yield
            self._chunks.clear()
            return
        stream = self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(5e-4)
        self._thread, self._reader = threads
        self._submitted.append(self._thread.submit(self._load_kernels, selector))
        try:
            with torch.cuda.stream(stream):
                yield
            for future in self._submitted:
                future.result()  # raises unexpected errors, as without a thread
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._reader.shutdown(cancel_futures=True)
            sys.setswitchinterval(interval)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._chunks.clear()
        empty_cache(device)  # cached blocks of the loading stream cannot be reused by others

    def layer_loaded(self, shard: ShardModel, missing_bytes: int) -> None:
        """Compute what has become possible: the shard has its pools and embedding, or one more layer.

        ``missing_bytes``: weights that are still to be loaded.
        """
        n_layers = len(shard.layers)
        if not self.problem:
            shard.selector.finish()  # the layer runs before the others are loaded
        self._missing_bytes = missing_bytes
        if self._thread is None or self._stream is None:
            self._try(shard, n_layers)
            return
        loaded = self._stream.record_event()

        @torch.inference_mode()
        def compute() -> None:
            """Run on the stream of steps, after the layer's weights."""
            steps = torch.cuda.default_stream(shard.device)
            steps.wait_event(loaded)
            with torch.cuda.stream(steps), launching(shard.device):
                self._try(shard, n_layers)

        self._submitted.append(self._thread.submit(compute))

    def finish(self, shard: ShardModel) -> Sequences | None:
        """Wait until all is computed; return the open sequences, or None with a ``problem``."""
        if self.problem:
            return None
        synchronize(shard.device)
        if self.sequences is not None:
            for step in self.steps:  # steps in flight may have verify slices
                self.sequences.record_updates(step.slices)
        return self.sequences

    # ---- inside

    def _begin_threads(self) -> tuple[ThreadExecutor, ThreadExecutor] | None:
        """Start the threads that compute and read rows; decline and return None if there is no memory for them."""
        try:
            return ThreadExecutor(1, "replay"), ThreadExecutor(1, "replay rows")
        except MemoryError as error:
            self._decline(str(error))
            return None

    @torch.inference_mode()
    def _load_kernels(self, selector: KernelSelector) -> None:
        device = selector.device
        try:
            with torch.cuda.stream(torch.cuda.default_stream(device)), launching(device):
                load_kernels(self._spec, self._layers, selector, self._load.max_step_tokens)
        except RuntimeError:
            pass  # also a lack of memory: what cannot run fails in the layers, where it is reported

    def _try(self, shard: ShardModel, n_layers: int) -> None:
        """Compute all rows of layer ``n_layers - 1``, or prepare them if it is 0; decline if that fails."""
        try:
            if not self.problem and n_layers:
                self._advance(shard, shard.layers[n_layers - 1], n_layers - 1)
            elif not self.problem:
                self._begin(shard)
        except (torch.OutOfMemoryError, MemoryError, OSError, StateError) as error:
            self._decline(f"{type(error).__name__}: {error}")

    def _advance(self, shard: ShardModel, layer: Block, at: int) -> None:
        assert self.sequences is not None
        tables, index = self.sequences.tables(shard.device), shard.plan.layers.start + at
        for chunk in self._chunks:
            assert chunk.arranged is not None
            layout, metadata = chunk.arranged
            batch = Batch(layout, tables, metadata)
            if chunk.rows is None:
                chunk.rows = self._first_rows(shard, chunk, batch)
            # the last kernel is torch's, which waits for all earlier ones: the next chunk reads what they wrote
            with shard.lora.of(batch.lora):
                if index + 1 == self._layers.stop:
                    advance_state(layer, chunk.rows, batch)  # the output rows of the last layer are not needed
                    chunk.rows = chunk.rows[:1].clone()
                else:
                    chunk.rows = layer(chunk.rows, batch)
            for operation in chunk.copies:
                _copy(shard, operation, index)
        self._all_rows = None

    def _begin(self, shard: ShardModel) -> None:
        """Open the sequences and lay out the steps; decline if memory is short."""
        n_rows = sum(step.n_tokens for step in self.steps)
        width = max(self._spec.hidden_size, self._spec.boundary_width)
        if shard.embedding is None:
            width += self._spec.boundary_width  # the rows read from the file
        # layers loaded meanwhile are counted twice: as missing, and in memory that is not free
        needed = n_rows * width * torch_dtype(self._load.dtype).itemsize + self._missing_bytes
        if shard.device != CPU:
            free = memory_free(shard.device)
            if needed + WORK_BYTES > free:
                self._decline(f"rows and weights take {needed} bytes, {free} are free")
                return
            shares = (free - needed) // WORK_BYTES - 1  # one is for the loading thread
            self.max_rows = max(1, min(shares, 8)) * self._load.max_step_tokens  # for fewer launches
        load = self._load
        sequences = self.sequences = Sequences(
            [shard.pools],
            load.pools,
            load.max_sequences,
            attend_host=load.attend_host,
            adapters=[one.name for one in self._spec.adapters],
        )
        self._chunks = self._joined(self._arranged(sequences))
        sequences.flush()
        if shard.embedding is None and self._reader is not None:
            self._all_rows = self._reader.submit(self._read_rows, n_rows, shard.device)
        for chunk in self._chunks:
            layout = Layout(chunk.slices, sequences, self._spec)
            chunk.arranged = layout, layout.on(shard.device)
            if shard.embedding is not None:
                batch = Batch(layout, sequences.tables(shard.device), chunk.arranged[1])
                chunk.rows = self._first_rows(shard, chunk, batch)

    def _arranged(self, sequences: Sequences) -> list[_Chunk]:
        """Apply all operations except copies, which are added to the preceding chunk."""
        chunks: list[_Chunk] = []
        row = self._replay.first_row
        for step in self.steps:
            for operation in step.operations:
                if not isinstance(operation, CopyPage | CopyState):
                    sequences.apply(operation)
                elif chunks:
                    chunks[-1].copies.append(operation)
            if step.slices:
                chunks.append(_Chunk([*step.slices], [(row, step.n_tokens)]))
                row += step.n_tokens
        return chunks

    def _joined(self, chunks: list[_Chunk]) -> list[_Chunk]:
        """Join chunks of different sequences up to ``max_rows``, keeping the order within each sequence.

        Chunks from the first one with several sequences on are steps that were in flight, and stay as they are.
        """
        n_alone = next((i for i, chunk in enumerate(chunks) if len(chunk.slices) > 1), len(chunks))
        waiting: dict[int, deque[_Chunk]] = {}
        for chunk in chunks[:n_alone]:
            waiting.setdefault(chunk.slices[0].sequence, deque()).append(chunk)
        joined: list[_Chunk] = []
        while waiting:
            open_rows = 0
            for sequence in [*waiting]:
                chunk = waiting[sequence].popleft()
                if not waiting[sequence]:
                    del waiting[sequence]
                n = sum(n for _, n in chunk.places)
                if open_rows and open_rows + n <= self.max_rows:
                    joined[-1].join(chunk)
                    open_rows += n
                else:
                    joined.append(chunk)
                    open_rows = n
        return joined + chunks[n_alone:]

    @torch.inference_mode()
    def _read_rows(self, n: int, device: torch.device) -> Tensor:
        """Read all rows from the file, in a thread and on a CUDA stream of its own, while layers are loaded."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            rows = self._rows.read(self._replay.first_row, n, device)
        stream.synchronize()
        rows.record_stream(torch.cuda.default_stream(device))
        return rows

    def _first_rows(self, shard: ShardModel, chunk: _Chunk, batch: Batch) -> Tensor:
        """Return the residual stream before the shard's first layer."""
        if shard.embedding is not None:
            with shard.lora.of(batch.lora):
                return shard.from_boundary(shard.embedding(batch), batch)
        if self._all_rows is None:
            parts = [self._rows.read(first, n, shard.device) for first, n in chunk.places]
        else:
            found, start = self._all_rows.result(), self._replay.first_row
            parts = [found[first - start : first - start + n] for first, n in chunk.places]
        return shard.from_boundary(torch.cat(parts), batch)

    def _decline(self, problem: str) -> None:
        self.problem, self.sequences, self._all_rows = problem, None, None
        self._chunks.clear()


def _copy(shard: ShardModel, operation: Operation, layer: int) -> None:
    match operation:
        case CopyPage(kv_group, source, target, n_tokens):
            shard.pools.copy_page(kv_group, source, target, n_tokens, layer)
        case CopyState(source, target):
            shard.pools.copy_state(source, target, layer)


def layerwise_replays(load: Load, spec: ModelSpec, file: ByteFile) -> dict[int, LayerwiseReplay]:
    """Return the replays of a load by stage.  ``file``: of the rows, closed with the last of them."""
    rows, plans = (
        RowFile(file, spec.boundary_width, torch_dtype(load.dtype)),
        {plan.stage: plan for plan in load.stages},
    )
    return {one.stage: LayerwiseReplay(one, plans[one.stage], load, spec, rows) for one in load.replay}


def report_replays(replays: Sequence[LayerwiseReplay], reporter: Reporter, seconds: float, *, ended: bool) -> None:
    """Log the tokens that were replayed while loading, or, if not all replays ``ended``, why none counts."""
    seconds = round(seconds, 3)
    if ended:
        n_tokens = sum(step.n_tokens for replay in replays for step in replay.steps)
        reporter.log("info", "replayed while loading", n_tokens=n_tokens, seconds=seconds)
    else:
        problem = next(replay.problem for replay in replays if replay.problem)
        reporter.log("info", "nothing was replayed while loading", reason=problem, seconds=seconds)
