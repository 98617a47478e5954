"""Timing of layers on a device, for the planner's automatic split.

Loads one span of layers with the blocks and pools used for serving, times it and releases it.  Invariant: a time covers
the layers alone, without the fixed costs of a step (its metadata, its boundary copies).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from daemons import device as devices
from daemons.graphs import Graph, capture, memory_pool
from daemons.kv.batch import Batch, Layout
from daemons.models.shard import stream_dtype
from daemons.models.stage import LoadedStage
from daemons.ops.cpu.recording import UnrecordableError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, KvGroup
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Check, Measure, Span, Timing
from lucevisor.protocol.steps import OpenSequence, Operation, SamplingParams, SetPages, Slice, ZeroState

N_ROUNDS = 5
ROUND_S = 0.01
MAX_CALLS = 32
"""The fastest of N_ROUNDS rounds counts, since other load only slows one down; a round makes as many calls as fit
ROUND_S, at most MAX_CALLS."""


@torch.inference_mode()
def time_span(spec: ModelSpec, order: Check, measure: Measure, backend: Backend, span: Span) -> Timing:
    """Load ``span`` on its device and time it.  Raises the errors of loading and running."""
    plan = StagePlan(
        1,
        [ShardPlan(span.device, span.layers)],
        source=None if span.embedding else 0,
        target=None if span.output else 1,
        embedding=span.embedding,
        output=span.output,
    )
    n_pages = measure.n_rows // PAGE_TOKENS + 1
    pools = PoolSizes(n_pages, n_pages, 1)
    load = Load(
        order.files, order.dtype, measure.kv_dtype, [plan], [], pools, 1, measure.n_rows,
        measure.threads, measure.options,
    )  # fmt: skip
    stage = LoadedStage.load(spec, plan, load, backend, lambda _: None)
    pages = list(range(n_pages))
    tables: list[Operation] = [
        SetPages(0, s, 0, pages) for s in (KvGroup.FULL, KvGroup.WINDOW) if s in spec.kv_groups()
    ]
    states: list[Operation] = [ZeroState(0)] if KvGroup.RECURRENT in spec.kv_groups() else []
    stage.apply([*states, OpenSequence(0, 0, SamplingParams()), *tables])
    with devices.launching(stage.device):
        prefill = _timed(spec, stage, Slice(0, 0, [i % spec.vocabulary for i in range(measure.n_rows)], False))
        decode = _timed(spec, stage, Slice(0, measure.n_rows, [0], False))
    return Timing(decode[0], prefill[0], decode[1], prefill[1])


def _timed(spec: ModelSpec, stage: LoadedStage, slice_: Slice) -> tuple[float, float]:
    """Seconds of the layers, and of embedding and output, for one slice."""
    [shard] = stage.shards
    stage.sequences.flush()
    layout = Layout([slice_], stage.sequences, spec)
    batch = Batch(layout, stage.sequences.tables(shard.device), layout.on(shard.device))
    n = len(slice_.tokens)
    noise = torch.Generator().manual_seed(n)
    boundary = stream_dtype(torch.randn(n, spec.boundary_width, generator=noise), stage.dtype, shard.device)
    shard.from_boundary(shard.embedding(batch) if shard.embedding is not None else boundary, batch)
    # a token uses few experts: a different token per call, so that no cache holds its experts
    inputs = torch.randn(max(n, MAX_CALLS), spec.hidden_size, generator=noise)
    inputs = stream_dtype(inputs, stage.dtype, shard.device)

    def layers(call: int) -> Tensor:
        h = inputs[:n] if n > 1 else inputs[call : call + 1]
        for layer in shard.layers:
            h = layer(h, batch)
        return h

    ends = 0.0
    if (embedding := shard.embedding) is not None:
        ends += seconds(lambda _: embedding(batch), shard.device)
    if (output := shard.output) is not None and spec.pooling.generates:
        ends += seconds(lambda call: output(inputs[call : call + 1]), shard.device)
    captured = stage.graphs[0] is not None and layout.graph_key is not None
    return seconds(Captured(shard.device, layers) if captured else layers, shard.device), ends


class Captured:
    """Work as in a short step: eager the first time, then a graph."""

    def __init__(self, device: torch.device, work: Callable[[int], Tensor]) -> None:
        self.device, self.work = device, work
        self.graphs: dict[int, Graph] = {}
        self.pool = memory_pool(device)

    def __call__(self, call: int) -> None:
        if not self.graphs:
            self.work(call)  # compiles
        if call not in self.graphs:
            try:
                self.graphs[call], _ = capture(self.device, lambda: self.work(call), self.pool)
            except UnrecordableError:
                return
        self.graphs[call].replay()


def seconds(work: Callable[[int], object], device: torch.device) -> float:
    """Per call, queued behind each other as in a step: synchronises once a round."""

    def once(n_calls: int) -> float:
        devices.synchronize(device)
        started = time.perf_counter()
        for call in range(n_calls):
            work(call)
        devices.synchronize(device)
        return (time.perf_counter() - started) / n_calls

    warm = min(once(1) for _ in range(2))
    n_calls = max(1, min(MAX_CALLS, round(ROUND_S / max(warm, 1e-9))))
    return min(once(n_calls) for _ in range(N_ROUNDS))
