"""A pipeline of stages in one process, with page ids allocated as a supervisor would; the tensor tests drive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import CloseSequence, OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState

POOLS = PoolSizes(full_pages=96, window_pages=0, states=24)


def load_stages(
    spec: ModelSpec,
    layer_split: Sequence[Sequence[int]] = ((),),
    dtype: Dtype = Dtype.FLOAT32,
    kv_dtype: Dtype = Dtype.FLOAT32,
    backend: Backend = Backend.CPU,
) -> list[LoadedStage]:
    """Stages of a pipeline.  ``layer_split``: for each stage the layers its shards end before, except the last one."""
    stops = [stop for cut in layer_split for stop in cut] + [spec.n_layers]
    load = Load([], dtype, kv_dtype, [], [], POOLS, max_sequences=16, max_step_tokens=512, threads=0)
    stages, start, at = [], 0, 0
    for i, cut in enumerate(layer_split):
        shards = []
        for _ in range(len(cut) + (i == len(layer_split) - 1)):
            shards.append(ShardPlan(0, LayerRange(start, stops[at])))
            start, at = stops[at], at + 1
        first, last = i == 0, i == len(layer_split) - 1
        plan = StagePlan(i, shards, None if first else i - 1, None if last else i, first, last)
        stages.append(LoadedStage.load(spec, plan, load, backend, lambda _: None))
    return stages


@dataclass
class Pipeline:
    """Runs slices through all stages.

    Pages come scattered on purpose: neighbours in a text are not neighbours in a pool.
    """

    stages: list[LoadedStage]
    free_pages: list[int] = field(
        default_factory=lambda: [(i * 37 + 5) % POOLS.full_pages for i in range(POOLS.full_pages)]
    )
    lengths: dict[int, int] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)

    def apply(self, operations: list[Operation]) -> None:
        for stage in self.stages:
            stage.apply(operations)

    def open(self, sequence: int, state: int) -> None:
        self.lengths[sequence], self.pages[sequence], self.states[sequence] = 0, [], state
        self.apply([OpenSequence(sequence, state, Sampling()), ZeroState(state)])

    def close(self, sequence: int) -> None:
        self.free_pages += self.pages.pop(sequence)
        self.apply([CloseSequence(sequence)])

    def run(self, *parts: tuple[int, Sequence[int]], want_hidden: bool = False) -> Tensor:
        """Append tokens to sequences in one step; logits [T, V] of every row, in the order of the parts."""
        slices, operations = [], []
        for sequence, tokens in parts:
            start = self.lengths[sequence]
            slices.append(Slice(sequence, start, list(tokens), True))
            pages = self.pages[sequence]
            missing = -(-(start + len(tokens)) // PAGE_TOKENS) - len(pages)
            if missing > 0:
                new = [self.free_pages.pop() for _ in range(missing)]
                operations.append(SetPages(sequence, Space.FULL, len(pages), new))
                pages += new
            self.lengths[sequence] = start + len(tokens)
        step = Step(1, 0, operations, slices, want_hidden=want_hidden)
        rows: Tensor | None = None
        self.hidden = []
        for stage in self.stages:
            stage.apply(step.operations)
            out = stage.forward(step, rows)
            rows = out.rows
            self.hidden += out.hidden
        assert rows is not None
        return self.stages[-1].logits(rows, None)

    def run_in_chunks(self, sequence: int, tokens: Sequence[int], size: int) -> Tensor:
        parts = [self.run((sequence, tokens[i : i + size])) for i in range(0, len(tokens), size)]
        return torch.cat(parts)

    def greedy(self, sequence: int, prompt: Sequence[int], n: int) -> list[int]:
        token = int(self.run((sequence, prompt))[-1].argmax())
        out = [token]
        while len(out) < n:
            token = int(self.run((sequence, [token]))[-1].argmax())
            out.append(token)
        return out


def pipeline(path: Path, **options: object) -> Pipeline:
    return Pipeline(load_stages(open_spec(path), **options))  # type: ignore[arg-type]
