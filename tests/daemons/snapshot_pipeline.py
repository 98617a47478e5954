"""Pipelines that save slots to a real store and restore them, in the role of a supervisor."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import torch
from msgspec.structs import replace

from daemons.models.stage import LoadedStage
from daemons.snapshots.state_map import StateMap
from daemons.snapshots.transfers import TransferExecutor
from lucevisor.deployment.weights import digest_tensors
from lucevisor.model.extents import extent_of
from lucevisor.model.families import open_spec
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.pages import first_visible_page
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.files import LocalFile
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Restore, Save, SlotPlace, TransferFailed
from lucevisor.protocol.steps import CopyState, OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState
from lucevisor.snapshots.file_format import SlotRecord, StateModel
from lucevisor.snapshots.store import SnapshotStore

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PAGED = (KvGroup.FULL, KvGroup.WINDOW)


def golden_spec(name):
    return open_spec(GOLDEN / name / "model.gguf")


def state_model(spec, kv_dtype=Dtype.FLOAT32, dtype=Dtype.FLOAT32):
    return StateModel(
        fingerprint(spec, digest_tensors(spec.files)), spec.architecture, spec.name, dtype, kv_dtype, spec.layers
    )


class SlotPipeline:
    """``layer_split``: for each stage the layers its shards end before, except the last one; pages come shuffled.

    Of the 8 recurrent states the last ``host_states`` lie in host memory.  ``one_memory``: they lie in that of pages.
    """

    def __init__(
        self,
        spec,
        layer_split=((),),
        *,
        kv_dtype=Dtype.FLOAT32,
        dtype=Dtype.FLOAT32,
        n_pages=40,
        host_states=0,
        seed=0,
        backend=Backend.CPU,
        one_memory=False,
    ):
        self.spec = spec
        kv_groups = spec.kv_groups()
        pools = PoolSizes(
            n_pages if KvGroup.FULL in kv_groups else 0,
            n_pages if KvGroup.WINDOW in kv_groups else 0,
            8 if KvGroup.RECURRENT in kv_groups else 0,
            host_states,
        )
        n_before = 0  # pages in the memory of states
        if one_memory and (extent := extent_of(spec, kv_dtype)) is not None:
            n_before = pools.device_states * extent.pages
            pools = replace(pools, full_pages=n_before + n_pages, state_pages=extent.pages)
        load = Load([], dtype, kv_dtype, [], [], pools, max_sequences=4, max_step_tokens=1024, threads=1)
        stops = [stop for cut in layer_split for stop in cut] + [spec.n_layers]
        self.stages, start, at = [], 0, 0
        for i, cut in enumerate(layer_split):
            shards = []
            for _ in range(len(cut) + (i == len(layer_split) - 1)):
                shards.append(ShardPlan(0, LayerRange(start, stops[at])))
                start, at = stops[at], at + 1
            first, last = i == 0, i == len(layer_split) - 1
            plan = StagePlan(i, shards, None if first else i - 1, None if last else i, first, last)
            self.stages.append(LoadedStage.load(spec, plan, load, backend, lambda _: None))
        self.free = {kv_group: random.Random(seed).sample(range(n_pages), n_pages) for kv_group in PAGED}
        self.free[KvGroup.FULL] = [n_before + page for page in self.free[KvGroup.FULL]]
        self.pages = {}
        self.lengths = {}
        self.answers = []
        self._came = threading.Condition()
        self.transfers = [
            TransferExecutor(StateMap(spec, [shard.pools for shard in stage.shards]), self._answer)
            for stage in self.stages
        ]

    # ---- sequences

    def apply(self, *operations):
        for stage in self.stages:
            stage.apply(operations)

    def open(self, sequence, state=0):
        self.pages[sequence] = {kv_group: [] for kv_group in PAGED if kv_group in self.spec.kv_groups()}
        self.lengths[sequence] = 0
        self.apply(OpenSequence(sequence, state, SamplingParams()))
        if KvGroup.RECURRENT in self.spec.kv_groups():
            self.apply(ZeroState(state))

    def run(self, sequence, tokens):
        """Append tokens; the logits of the last one."""
        start = self.lengths[sequence]
        operations = []
        for kv_group, pages in self.pages[sequence].items():
            missing = -(-(start + len(tokens)) // PAGE_TOKENS) - len(pages)
            new = [self.free[kv_group].pop() for _ in range(missing)]
            if new:
                operations.append(SetPages(sequence, kv_group, len(pages), new))
                pages += new
        self.lengths[sequence] = start + len(tokens)
        step = Step(1, 0, operations, [Slice(sequence, start, list(tokens), True)])
        rows = None
        for stage in self.stages:
            stage.apply(step.operations)
            rows = stage.forward(step, rows).rows
        return self.stages[-1].logits(rows, [len(tokens) - 1])[0]

    def greedy(self, sequence, tokens, n):
        out = [int(self.run(sequence, tokens).argmax())]
        while len(out) < n:
            out.append(int(self.run(sequence, out[-1:]).argmax()))
        return out

    # ---- slots

    def place(self, sequence, state=-1):
        """The slot of all of a sequence's tokens; ``state`` holds its checkpoint."""
        n, pages = self.lengths[sequence], self.pages[sequence]
        first = first_visible_page(n, self.spec.window) if KvGroup.WINDOW in pages else 0
        return SlotPlace(n, list(pages.get(KvGroup.FULL, [])), pages.get(KvGroup.WINDOW, [])[first:], first, state)

    def fresh_place(self, n_tokens, state=-1):
        """Free pages for a slot to restore."""
        n = -(-n_tokens // PAGE_TOKENS)
        has = self.spec.kv_groups()
        first = first_visible_page(n_tokens, self.spec.window) if KvGroup.WINDOW in has else 0
        full = [self.free[KvGroup.FULL].pop() for _ in range(n)] if KvGroup.FULL in has else []
        window = [self.free[KvGroup.WINDOW].pop() for _ in range(n - first)] if KvGroup.WINDOW in has else []
        return SlotPlace(n_tokens, full, window, first, state)

    def save(self, store: SnapshotStore, tokens, place, *, with_draft=False):
        """Save a slot; returns the entry."""
        writing = store.begin(SlotRecord(list(tokens), 100.0, with_draft))
        answers = self.transfer(Save, writing, place)
        return store.finish(writing, sum(a.n_bytes for a in answers))

    def restore(self, store: SnapshotStore, entry, place):
        """Restore into ``place``; returns the daemons' answers."""
        n_tokens = None if place.n_tokens == entry.n_tokens else place.n_tokens
        reading = store.open_for_restore(entry, n_tokens)
        try:
            store.check(reading)
            answers = self.transfer(Restore, reading, place)
            parts = [reading.tensors(shard.layers) for stage in self.stages for shard in stage.plan.shards]
            n_bytes = sum(map(reading.n_bytes, [*parts, reading.draft_tensors()]))
            assert any(isinstance(a, TransferFailed) for a in answers) or sum(a.n_bytes for a in answers) == n_bytes
            return answers
        finally:
            store.close_snapshot(reading)

    def adopt(self, sequence, place, live_state=0):
        """Start a sequence from a restored slot."""
        self.open(sequence, live_state)
        operations = [CopyState(place.state, live_state)] if place.state >= 0 else []
        for kv_group, first, pages in (
            (KvGroup.FULL, 0, place.full),
            (KvGroup.WINDOW, place.first_window, place.window),
        ):
            if kv_group in self.pages[sequence]:
                self.pages[sequence][kv_group] = [-1] * first + list(pages)
                operations.append(SetPages(sequence, kv_group, first, list(pages)))
        self.lengths[sequence] = place.n_tokens
        self.apply(*operations)

    def transfer(self, kind, file, place):
        """Send every daemon its order and wait for all answers; the drafter is in the last one."""
        self.answers = []
        parts = [[t for shard in stage.plan.shards for t in file.tensors(shard.layers)] for stage in self.stages]
        parts += [[] for _ in self.transfers[len(parts) :]]
        parts[-1] += file.draft_tensors()
        for tensors, transfers in zip(parts, self.transfers, strict=True):
            transfers.submit(kind(7, file.file, place, tensors), LocalFile(os.dup(file.fd)))
        with self._came:
            assert self._came.wait_for(lambda: len(self.answers) == len(parts), 30)
        return self.answers

    def _answer(self, message, request_id):
        with self._came:
            assert request_id == 7
            self.answers.append(message)
            self._came.notify_all()

    def bytes_of(self, kv_group):
        """All bytes of a KV group's pools, to see what a restore touched."""
        return [t.clone() for s in self.stages for k in s.shards for t in k.pools._of(kv_group)]


def states_of(pipeline, state):
    """A copy of one recurrent state: (layer, name) -> its numbers, on the host."""
    found = {}
    for pools in (shard.pools for stage in pipeline.stages for shard in stage.shards):
        for layer in pipeline.spec.layers[pools.layers.start : pools.layers.stop]:
            for t in layer.state if layer.kv_group is KvGroup.RECURRENT else ():
                rows, row = pools.rows_with(layer.index, t.name, state)
                found[layer.index, t.name] = rows[row].detach().to("cpu", copy=True)
    return found


def ids_of(spec, n, seed=1):
    return torch.randint(0, spec.vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def checkpoint(pipeline, sequence, state):
    """The place of a slot of all the sequence's tokens, its recurrent state copied aside."""
    if KvGroup.RECURRENT not in pipeline.spec.kv_groups():
        return pipeline.place(sequence)
    pipeline.apply(CopyState(0, state))
    return pipeline.place(sequence, state)
