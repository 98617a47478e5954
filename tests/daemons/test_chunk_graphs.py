"""Padded steps of one long slice as graphs: a replay reads the metadata and tables of its own step, and nothing else of
it.

A cpu does not capture such steps.  Here a graph calls the layers again, on the batch of the step that was captured and
with the metadata of the step that is run, as a GPU's does.
"""

from __future__ import annotations

from copy import copy

import pytest
import torch
from torch import Tensor

from daemons import graphs as graphs_module
from daemons.graphs import StepGraphs
from daemons.kv.batch import Batch
from daemons.models.shard import ShardOutput, SharedOutput
from daemons.models.stage import LoadedStage
from daemons.ops.operations import SHORT_SLICE
from lucevisor.model.values import KvGroup
from tests.families.golden import KINDS, opened
from tests.families.pipeline import Pipeline, load_stages


class Repeated:
    """A graph, and its output: that of the last replay."""

    def __init__(self, work):
        self.work = work
        self.rows, self.captures = torch.empty(0), None

    def replay(self):
        self.rows, self.captures = self.work()


def capture(device, work, pool):
    graph = Repeated(work)
    return graph, graph


def without_memo(batch: Batch) -> Batch:
    """The batch as it was captured: what layers share is computed by each replay."""
    one = copy(batch)
    one._rope_tables, one.groups = {}, [copy(group) for group in batch.groups]
    for group in one.groups:
        group._memo, group.queries = {}, []
    return one


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(graphs_module, "capture", capture)


class ChunkGraphs(StepGraphs):
    """Captures no short slices: plain torch reads their lengths on the host."""

    def _capture(self, key, *step):
        return super()._capture(key, *step) if key.n_tokens > SHORT_SLICE else None


def repeating(stages: list[LoadedStage], chunk_rows: int = 128, kind: type[StepGraphs] = ChunkGraphs):
    """The stages' graphs from now on."""
    found = []
    for stage in stages:
        [shard] = stage.shards

        def work(rows: Tensor | None, batch: Batch, shard=shard) -> ShardOutput:
            return shard.run(rows, without_memo(batch))

        shared = SharedOutput(chunk_rows)
        stage.graphs = [kind(shard.device, work, 1 << 30, chunk_rows=chunk_rows, share_output=shared)]
        found += stage.graphs
    return found


def keys(graphs: StepGraphs) -> list[tuple[int, int]]:
    """Rows and bound of the attended length of each chunk's graph."""
    return [(key.n_tokens, key.max_length) for key in graphs._chunk_graphs]


CUTS = ((33, 39), (48,), (39, 33), (36, 36), (1, 45, 26), (3, 35, 34))
"""Lengths of the chunks of each of six sequences; a last one ends the text."""


def prompts(c: Pipeline, ids: list[int]) -> list[Tensor]:
    """The logits of sequences with other pages and states, in chunks of other lengths at other starts."""
    found = []
    for sequence, lengths in enumerate(CUTS):
        c.open(sequence)
        at, rows = 0, []
        for n in (*lengths, len(ids) - sum(lengths)):
            if n:
                rows.append(c.run((sequence, ids[at : at + n])))
            at += n
        found.append(torch.cat(rows))
    return found


def parts_of(name: str) -> list[tuple[int, ...]]:
    """Layer splits of a fixture: one stage, and two, of which the second reads boundary rows."""
    return [(), tuple(opened(name).layer_splits()[:1])]


@pytest.mark.parametrize("name", KINDS)
def test_a_replayed_chunk_is_that_of_its_own_step(name, monkeypatch):
    golden = opened(name)
    for split in parts_of(name):
        stages = load_stages(golden.spec, split)
        all_graphs = repeating(stages)
        with monkeypatch.context() as patch:
            patch.setattr(graphs_module, "CAPTURE_AT", 1 << 30)
            eager = prompts(Pipeline(golden.spec, stages), golden.ids)
        assert not any(graphs._chunk_graphs for graphs in all_graphs)
        found = prompts(Pipeline(golden.spec, stages), golden.ids)
        for graphs in all_graphs:
            assert set(keys(graphs)) == {(48, 128)}
            assert not graphs._uncapturable
        for a, b in zip(found, eager, strict=True):
            assert torch.equal(a, b)
            golden.assert_logits(a)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_other_sequences_never_come_in(name):
    """Not as zero times NaN either: all pages are NaN, but for what the sequence wrote."""
    golden = opened(name)
    [stage] = stages = load_stages(golden.spec)
    repeating(stages)
    for pool_group, tensors in stage.shards[0].pools._stacks:
        if pool_group is not KvGroup.RECURRENT:
            for tensor in tensors:
                with torch.inference_mode():
                    tensor.fill_(float("nan"))
    c = Pipeline(golden.spec, stages)
    for sequence in range(3):
        c.open(sequence)
        golden.assert_logits(torch.cat([c.run((sequence, part)) for part in (golden.ids[:35], golden.ids[35:])]))
