"""Layerwise replay: recomputes a lost daemon's state layer by layer while its replacement loads the weights.

Device memory must hold the rows of all tokens beside the weights, otherwise nothing is replayed.  On a GPU a thread
computes a layer while the next one is read.
Invariant: pages, states and tables are as if the steps had run one after the other.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from daemons.device import CPU, launching, memory_free, synchronize, torch_dtype
from daemons.errors import StateError
from daemons.kv.batch import Batch, Layout
from daemons.kv.sequences import Sequences
from daemons.models.blocks import Block, advance_state
from daemons.models.replay_kernels import load_kernels
from daemons.models.row_file import RowFile
from daemons.models.shard import ShardModel
from daemons.ops.selection import KernelSelector
from daemons.pulse import Reporter
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Space
from lucevisor.protocol.loading import Load, StagePlan, StageReplay
from lucevisor.protocol.steps import CopyPage, CopyState, Operation, Slice, Step
from lucevisor.protocol.threads import ThreadExecutor

WORK_BYTES = 1 << 30
"""Workspace for layers that compute as many rows as a step has."""
MAX_STEPS_AT_ONCE = 8
"""Steps of different sequences that a GPU with enough memory computes together, for fewer launches."""
SWITCH_S = 5e-4
"""Interpreter switch interval while one thread loads and the other one computes."""


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
        self.whole = False  # also compute the unused output rows of the last layer, for tests
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
        elif Space.WINDOW in spec.spaces():
            self.problem = "sliding layers take pages in turn"

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
        sys.setswitchinterval(SWITCH_S)
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
        torch.cuda.empty_cache()  # cached blocks of the loading stream cannot be reused by others

    def layer_loaded(self, shard: ShardModel, missing_bytes: int) -> None:
        """Compute what has become possible: the shard has its pools and embedding, or one more layer.

        ``missing_bytes``: weights that are still to be loaded.
        """
        n_layers = len(shard.layers)
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
            if index + 1 == self._layers.stop and not self.whole:
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
            self.max_rows = max(1, min(shares, MAX_STEPS_AT_ONCE)) * self._load.max_step_tokens
        load = self._load
        sequences = self.sequences = Sequences(
            [shard.pools], load.pools, load.max_sequences, attend_host=load.attend_host
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
        case CopyPage(space, source, target, n_tokens):
            shard.pools.copy_page(space, source, target, n_tokens, layer)
        case CopyState(source, target):
            shard.pools.copy_state(source, target, layer)


def layerwise_replays(load: Load, spec: ModelSpec, fd: int) -> dict[int, LayerwiseReplay]:
    """Return the replays of a load by stage.  ``fd``: the file of rows, closed with the last of them."""
    if not load.replay:
        return {}
    rows, plans = RowFile(fd, spec.boundary_width, torch_dtype(load.dtype)), {plan.stage: plan for plan in load.stages}
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
