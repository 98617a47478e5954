"""Runs steps of a stage layer by layer, as its layers are loaded: what a lost daemon had computed is there with the
weights.

All rows wait before each layer, in device memory that holds them beside the weights to come, or nothing is replayed.
Knows no links.  Invariant: pages, states and tables are as if the steps had run one after the other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from daemons.device import CPU, launching, memory_free, synchronize, torch_dtype
from daemons.errors import StateError
from daemons.kv.batch import Batch, Layout
from daemons.kv.sequences import Sequences
from daemons.models.shard import ShardModel
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Space
from lucevisor.protocol.loading import Load, StagePlan, StageReplay
from lucevisor.protocol.steps import CopyPage, CopyState, Operation, Step

WORK_BYTES = 1 << 30
"""Device memory left to the layers beside rows and weights."""


class RowFile:
    """Boundary rows ``[n, width]`` in a file, by index of the first one."""

    def __init__(self, fd: int, width: int, dtype: torch.dtype) -> None:
        """``fd`` is closed with this object."""
        self._fd, self._width, self._dtype = fd, width, dtype
        weakref.finalize(self, os.close, fd)

    def read(self, first: int, n: int, device: torch.device) -> Tensor:
        """``[n, width]`` on a device.  Raises OSError if the file is shorter."""
        rows = torch.empty(n, self._width, dtype=self._dtype, pin_memory=device.type != "cpu")
        view, at = memoryview(rows.view(torch.uint8).numpy()).cast("B"), first * self._width * rows.itemsize  # type: ignore[arg-type]  # torch's stub of numpy() hides the buffer
        while view:
            n_read = os.preadv(self._fd, [view], at)
            if not n_read:
                raise OSError(f"the file of rows ends before row {first + n}")
            view, at = view[n_read:], at + n_read
        return rows.to(device, non_blocking=True)


@dataclass(slots=True)
class _Chunk:
    """A step with slices: its rows before the next layer, and what is copied behind it."""

    layout: Layout
    metadata: Tensor
    first_row: int
    rows: Tensor | None = None
    copies: list[Operation] = field(default_factory=list)


class LayerwiseReplay:
    """The steps of ``replay`` over one stage.  ``problem`` says why they were not computed; then nothing of them is in
    the shard's pools that anybody reads.
    """

    def __init__(self, replay: StageReplay, plan: StagePlan, load: Load, spec: ModelSpec, rows: RowFile) -> None:
        self.steps: Sequence[Step] = replay.steps
        self.sequences: Sequences | None = None
        self.problem = ""
        self._replay, self._load, self._spec, self._rows = replay, load, spec, rows
        self._chunks: list[_Chunk] = []
        self._layer = -1
        self._loading: torch.cuda.Stream | None = None
        if len(plan.shards) > 1:
            self.problem = "the stage runs on several devices"
        elif Space.WINDOW in spec.spaces():
            self.problem = "sliding layers take pages in turn"

    @contextmanager
    def loading(self, device: torch.device) -> Iterator[None]:
        """Load weights beside what is computed meanwhile, on a stream of their own."""
        if device.type == "cpu" or self.problem:
            yield
            return
        stream = self._loading = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.empty_cache()  # what loading took for a while belongs to its stream

    def layer_loaded(self, shard: ShardModel, missing_bytes: int) -> None:
        """The shard has one layer more; ``missing_bytes`` of its weights are still to be loaded."""
        if self.problem:
            return
        try:
            self._computing(shard, lambda: self._advance(shard, missing_bytes))
        except (torch.OutOfMemoryError, MemoryError, OSError, StateError) as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def finish(self, shard: ShardModel) -> Sequences | None:
        """Wait until all is computed; the open sequences, or None with a ``problem``."""
        self._chunks.clear()
        if self.problem:
            return None
        synchronize(shard.device)
        return self.sequences

    # ---- inside

    def _computing(self, shard: ShardModel, work: Callable[[], None]) -> None:
        """Do ``work`` on the stream of steps, behind the weights that are there."""
        if self._loading is None:
            work()
            return
        steps = torch.cuda.default_stream(shard.device)
        steps.wait_stream(self._loading)
        with torch.cuda.stream(steps), launching(shard.device):
            work()

    def _advance(self, shard: ShardModel, missing_bytes: int) -> None:
        self._layer += 1
        first = self._layer == 0
        if first:
            self._begin(shard, missing_bytes)
        if self.problem:
            return
        assert self.sequences is not None
        layer, tables = shard.layers[-1], self.sequences.tables(shard.device)
        index = shard.plan.layers.start + self._layer
        for chunk in self._chunks:
            batch = Batch(chunk.layout, tables, chunk.metadata)
            if first:
                chunk.rows = self._first_rows(shard, chunk, batch)
            assert chunk.rows is not None
            chunk.rows = layer(chunk.rows, batch)
            for operation in chunk.copies:
                _copy(shard, operation, index)

    def _begin(self, shard: ShardModel, missing_bytes: int) -> None:
        """Open the sequences, and arrange the steps; decline if their rows have no room."""
        n_rows = sum(step.n_tokens for step in self.steps)
        width = max(self._spec.hidden_size, self._spec.boundary_width)
        needed = n_rows * width * torch_dtype(self._load.dtype).itemsize + missing_bytes + WORK_BYTES
        if shard.device != CPU and needed > (free := memory_free(shard.device)):
            self._give_up(f"rows and weights take {needed} bytes, {free} are free")
            return
        load = self._load
        sequences = self.sequences = Sequences(
            [shard.pools], load.pools, load.max_sequences, attend_host=load.attend_host
        )
        row = self._replay.first_row
        for step in self.steps:
            for operation in step.operations:
                if not isinstance(operation, CopyPage | CopyState):
                    sequences.apply(operation)
                elif self._chunks:
                    self._chunks[-1].copies.append(operation)
            if step.slices:
                sequences.flush()
                layout = Layout(step.slices, sequences, self._spec)
                self._chunks.append(_Chunk(layout, layout.on(shard.device), row))
                row += step.n_tokens

    def _first_rows(self, shard: ShardModel, chunk: _Chunk, batch: Batch) -> Tensor:
        """The residual stream before the shard's first layer."""
        if shard.embedding is not None:
            rows = shard.embedding(batch)
        else:
            rows = self._rows.read(chunk.first_row, chunk.layout.n_rows, shard.device)
        return shard.from_boundary(rows, batch)

    def _give_up(self, problem: str) -> None:
        self.problem, self.sequences = problem, None
        self._chunks.clear()


def _copy(shard: ShardModel, operation: Operation, layer: int) -> None:
    match operation:
        case CopyPage(space, source, target, n_tokens):
            shard.pools.copy_page(space, source, target, n_tokens, layer)
        case CopyState(source, target):
            shard.pools.copy_state(source, target, layer)


def layerwise_replays(load: Load, spec: ModelSpec, fd: int) -> dict[int, LayerwiseReplay]:
    """The replays of a load by stage.  ``fd``: of the file of rows, which is closed with the last of them."""
    if not load.replay:
        return {}
    rows, plans = RowFile(fd, spec.boundary_width, torch_dtype(load.dtype)), {plan.stage: plan for plan in load.stages}
    return {one.stage: LayerwiseReplay(one, plans[one.stage], load, spec, rows) for one in load.replay}
