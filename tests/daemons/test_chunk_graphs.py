"""Steps of one long slice as graphs: a replay reads the metadata and tables of its own step, and nothing else of it.

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
from daemons.kv.batch import Batch, Layout
from daemons.models.stage import LoadedStage
from lucevisor.protocol.steps import Slice
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import Pipeline, load_stages


class Later:
    """The output of a graph: that of its last replay."""

    def __iter__(self):
        return iter(self.value)


class Repeated:
    def __init__(self, work, out):
        self.work, self.out = work, out

    def replay(self):
        self.out.value = self.work()


def capture(device, work, pool):
    out = Later()
    return Repeated(work, out), out


def without_memo(batch: Batch) -> Batch:
    """The batch as it was captured: what layers share is computed by each replay."""
    one = copy(batch)
    one._rope_tables, one.groups = {}, [copy(group) for group in batch.groups]
    for group in one.groups:
        group._memo, group.queries = {}, []
    return one


def repeating(stage: LoadedStage) -> StepGraphs:
    [shard] = stage.shards

    def work(rows: Tensor | None, batch: Batch):
        return shard.run(rows, without_memo(batch))

    stage.graphs = [StepGraphs(shard.device, work, 1 << 30, chunk_rows=64)]
    return stage.graphs[0]


def chunks(c: Pipeline, ids: list[int]) -> Tensor:
    """Three sequences with other ids, pages and states, in chunks of the same lengths."""
    found = []
    for sequence in range(3):
        c.open(sequence)
        text = ids[sequence:] * 2
        for first, last in ((0, 33), (33, 73)):
            found.append(c.run((sequence, text[first:last])))
    return torch.cat(found)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_replayed_chunk_is_that_of_its_own_step(name, monkeypatch):
    monkeypatch.setattr(graphs_module, "capture", capture)
    golden = opened(name)
    wanted = chunks(Pipeline(golden.spec, golden.whole), golden.ids)
    [stage] = stages = load_stages(golden.spec)
    graphs = repeating(stage)
    found = chunks(Pipeline(golden.spec, stages), golden.ids)
    assert [(key.n_tokens, key.start) for key in graphs._graphs] == [(33, 0), (40, 33)]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_which_steps_are_captured():
    golden = opened("qwen35")
    stages = load_stages(golden.spec)
    c = Pipeline(golden.spec, stages)
    for sequence in (0, 1):
        c.open(sequence)
        c.run((sequence, golden.ids[:50]))
        c.run((sequence, golden.ids[:50]))

    def key(*slices: tuple[int, int, int], **options):
        asked = [Slice(sequence, start, golden.ids[:n], sample=False) for sequence, start, n in slices]
        return Layout(asked, stages[0].sequences, golden.spec, **options).chunk_key

    assert key((0, 50, 40))[:2] == (1, 40)
    assert key((0, 50, 40)) == key((1, 50, 40))
    assert len({key((0, 50, 40)), key((0, 51, 40)), key((0, 50, 41))}) == 3
    assert key((0, 50, 32)) is None  # graph_key has those
    assert key((0, 50, 40), (1, 50, 40)) is None
    assert key((0, 50, 40), ranked=[0]) is None
    assert key((0, 50, 40), bounded=True) is None


def test_chunks_run_eagerly_where_nothing_else_was_asked(monkeypatch):
    monkeypatch.setattr(graphs_module, "capture", capture)
    golden = opened("qwen3")
    [stage] = stages = load_stages(golden.spec)
    graphs = repeating(stage)
    graphs.chunk_rows = 39
    chunks(Pipeline(golden.spec, stages), golden.ids)
    assert [(key.n_tokens, key.start) for key in graphs._graphs] == [(33, 0)]
    assert StepGraphs(stage.device, stage.shards[0].run, 1 << 30).chunk_rows == 0
