"""Padded steps of one long slice as graphs: a replay reads the metadata and tables of its own step, and nothing else of
it.

A cpu does not capture such steps.  Here a graph calls the layers again, on the batch of the step that was captured and
with the metadata of the step that is run, as a GPU's does.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from daemons import graphs as graphs_module
from daemons.graphs import StepGraphs
from daemons.kv.batch import Batch, Layout
from daemons.kv.slice_group import PADDED_ROWS
from daemons.models.shard import ShardOutput
from daemons.models.stage import LoadedStage
from daemons.ops.operations import SHORT_SLICE
from lucevisor.model.values import PAGE_TOKENS, LayerRange
from lucevisor.model.workspace import CHUNK_GRAPHS, GRAPH_LENGTH, GRAPH_ROWS
from lucevisor.protocol.steps import Slice
from tests.families.golden import FIXTURES, opened
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


def repeating(stages: list[LoadedStage], chunk_rows: int = 128) -> list[StepGraphs]:
    """The stages' graphs from now on."""
    found = []
    for stage in stages:
        [shard] = stage.shards

        def work(rows: Tensor | None, batch: Batch, shard=shard) -> ShardOutput:
            return shard.run(rows, without_memo(batch))

        stage.graphs = [StepGraphs(shard.device, work, 1 << 30, chunk_rows=chunk_rows)]
        found += stage.graphs
    return found


def keys(graphs: StepGraphs) -> list[tuple[int, int]]:
    """Rows and bound of the attended length of each chunk's graph."""
    return [(key.n_tokens, key.max_length) for key in graphs._chunk_graphs]


PROMPTS = ((33, 40, 5, 58), (48, 35, 1, 64), (70, 50, 21, 49), (49, 34, 33, 96), (64, 44, 2, 60))


def prompts(c: Pipeline, ids: list[int]) -> Tensor:
    """Sequences with other ids, pages and states, in chunks of other lengths at other starts."""
    found = []
    for sequence, lengths in enumerate(PROMPTS):
        c.open(sequence)
        text = ids[sequence:] * 8
        at = 0
        for n in lengths:
            found.append(c.run((sequence, text[at : at + n])))
            at += n
    return torch.cat(found)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_replayed_chunk_is_that_of_its_own_step(name):
    golden = opened(name)
    for split in ((), golden.layer_splits()[:1]):
        stages = load_stages(golden.spec, split)
        wanted = prompts(Pipeline(golden.spec, load_stages(golden.spec, split)), golden.ids)
        all_graphs = repeating(stages)
        found = prompts(Pipeline(golden.spec, stages), golden.ids)
        for graphs in all_graphs:
            assert keys(graphs) == [(48, 128), (64, 256)] or set(keys(graphs)) >= {(48, 128), (64, 256)}
            assert not graphs._uncapturable
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
