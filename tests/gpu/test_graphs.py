"""Captured steps give the numbers of eager steps, bit for bit, and follow what changes between steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from daemons.device import prepare
from daemons.graphs import StepGraphs
from daemons.kv.sequences import MIN_ENTRIES
from daemons.models.shard import ShardOutput
from daemons.models.stage import LoadedStage
from lucevisor.model.values import Backend, Dtype, KvGroup
from lucevisor.protocol.steps import SetPages
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import How, Pipeline, load_stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
EXACT = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA)


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(Backend.CUDA, 0)


def graphs_of(stages: list[LoadedStage]) -> Iterator[StepGraphs]:
    for stage in stages:
        for graphs in stage.graphs:
            assert graphs is not None
            yield graphs


def eager(stages: list[LoadedStage]) -> list[LoadedStage]:
    for stage in stages:
        stage.graphs = [None for _ in stage.graphs]
    return stages


def steps(c: Pipeline, ids: list[int]) -> Tensor:
    """A prompt, then single tokens far enough to need more pages, a second sequence beside the first, short runs."""
    found = [c.run((0, ids[:20]))]
    found += [c.run((0, [token])) for token in (ids * 8)[20:150]]
    c.open(1)
    found += [c.run((1, ids[5:12]))]
    found += [c.run((0, [a]), (1, [b])) for a, b in zip(ids[:12], ids[3:15], strict=True)]
    found += [c.run((1, ids[at : at + 3])) for at in range(0, 15, 3)]
    for n in (16, 32):  # of some models too many pairs to capture
        found += [c.run((1, (ids * 4)[at : at + n])) for at in (0, 3, 5)]
    # as long ones in two sequences whose starts lie differently behind a page border
    found += [c.run((0, (ids * 4)[at : at + 5]), (1, (ids * 4)[at : at + 5])) for at in (0, 7, 9)]
    return torch.cat([x.cpu() for x in found])


@pytest.mark.parametrize("name", FIXTURES)
def test_captured_steps_equal_eager_steps(name: str) -> None:
    golden = opened(name)
    for layer_split in ((), golden.layer_splits()[:1]):
        plain, captured = load_stages(golden.spec, layer_split, EXACT), load_stages(golden.spec, layer_split, EXACT)
        pipelines = Pipeline(golden.spec, eager(plain)), Pipeline(golden.spec, captured)
        for c in pipelines:
            c.open(0)
        wanted, found = (steps(c, golden.ids) for c in pipelines)
        assert torch.equal(found, wanted)
        for graphs in graphs_of(captured):
            runs = {(1, 1), (2, 1), (1, 3), (2, 5), (1, 16), (1, 32)}
            expected = {(b, n) for b, n in runs if b * n <= graphs.max_tokens}
            # torch's form of the delta rule, for head dims that kernels do not take, need not be capturable
            optional = {(1, 32)} if KvGroup.RECURRENT in golden.spec.kv_groups() else set()
            assert {(p.n_slices, p.n_tokens) for p in graphs._uncapturable} <= optional
            assert {(p.n_slices, p.n_tokens) for p in graphs._graphs} | optional == expected | optional


def verified(c: Pipeline, ids: list[int]) -> Tensor:
    """Verify slices of five tokens in two sequences, accepted up to any draft; then a decode.  Logits and captures."""
    found = []
    for s in (0, 1):
        c.open(s)
        c.run((s, ids[: 20 + s]))
    for accepted in (4, 0, 2, 1, 3, 4):
        parts = [(s, (ids * 4)[c.texts[s].length :][:5], 4) for s in (0, 1)]
        found.append(c.verify(*parts))
        found += [x.clone() for x in c.captures if x is not None]  # the next step overwrites them
        for s in (0, 1):
            c.accept(s, 4, (accepted + s) % 5)
        found.append(c.run((0, ids[:1]), (1, ids[1:2])))
    return torch.cat([x.cpu().flatten() for x in found])


@pytest.mark.parametrize("name", FIXTURES)
def test_captured_verify_slices_equal_eager_ones_and_share_their_graph(name: str) -> None:
    """Whatever states they keep; so do the hidden states that a drafter reads."""
    golden = opened(name)
    layers = [0, golden.spec.n_layers - 1]
    plain, captured = (load_stages(golden.spec, (), EXACT, captures=layers) for _ in range(2))
    wanted, found = (verified(Pipeline(golden.spec, stages), golden.ids) for stages in (eager(plain), captured))
    assert torch.equal(found, wanted)
    [graphs] = graphs_of(captured)
    keys = [(key.n_slices, key.n_tokens) for key in graphs._graphs]
    assert set(keys) <= {(2, 1), (2, 5), (1, 20), (1, 21)}
    assert keys.count((2, 5)) == (graphs.max_tokens >= 10)


CUTS = ((64, 64, 33, 1, 100), (49, 47, 60, 2, 128), (33, 96, 48, 1, 97), (60, 70, 1, 40, 111), (57, 33, 34, 35, 120))
"""Lengths of the chunks of sequences; the keys of each column are the same for most of them."""


def chunks(c: Pipeline, ids: list[int]) -> Tensor:
    """Sequences with other ids, pages and states, in chunks of other lengths at other starts, and decodes between."""
    found = []
    for sequence, lengths in enumerate(CUTS * 2):
        c.open(sequence)
        text, at = ids[sequence % 7 :] * 8, 0
        for n in lengths:
            found.append(c.run((sequence, text[at : at + n])))
            at += n
        c.close(sequence)
    return torch.cat([x.cpu() for x in found])


def padded_eagerly(c: Pipeline, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The same without a graph."""
    with monkeypatch.context() as patch:
        patch.setattr("daemons.graphs.CAPTURE_AT", 1 << 30)
        found = chunks(c, ids)
    for graphs in graphs_of(c.stages):
        assert not graphs._chunk_graphs
    return found


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("name", FIXTURES)
def test_captured_chunks_equal_padded_eager_chunks(name: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lengths and starts share a graph, also where a stage reads boundary rows."""
    golden, how = opened(name), How(dtype, dtype, Backend.CUDA)
    for layer_split in ((), golden.layer_splits()[:1]):
        plain, captured = (load_stages(golden.spec, layer_split, how) for _ in range(2))
        wanted = padded_eagerly(Pipeline(golden.spec, plain), golden.ids, monkeypatch)
        found = chunks(Pipeline(golden.spec, captured), golden.ids)
        assert torch.equal(found, wanted)
        for graphs in graphs_of(captured):
            assert graphs.chunk_rows == captured[0].max_step_tokens
            keys = {(key.n_tokens, key.max_length) for key in graphs._chunk_graphs}
            refused = {(key.n_tokens, key.max_length) for key in graphs._uncapturable if key.n_tokens > 32}
            possible = {n for n in (48, 64, 96, 128) if n <= graphs.max_tokens}
            assert {n for n, _ in keys | refused} == possible
            assert not refused or KvGroup.RECURRENT in golden.spec.kv_groups()  # torch's form of the delta rule


@torch.inference_mode()
def fill_pages(stages: list[LoadedStage], value: float) -> None:
    for stage in stages:
        for shard in stage.shards:
            for kv_group, tensors in shard.pools._stacks:
                for tensor in tensors if kv_group is not KvGroup.RECURRENT else []:
                    tensor.fill_(value)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("name", FIXTURES)
def test_pages_of_others_never_come_in(name: str, dtype: Dtype) -> None:
    """Masked positions are the sequence's own: a NaN in another page does not reach it as zero times NaN."""
    golden, how = opened(name), How(dtype, dtype, Backend.CUDA)
    found = []
    for value in (0.0, float("nan")):
        stages = load_stages(golden.spec, (), how)
        fill_pages(stages, value)
        c, rows = Pipeline(golden.spec, stages), []
        for sequence in range(4):
            c.open(sequence)
            rows += [c.run((sequence, part)).cpu() for part in (golden.ids[:35], golden.ids[35:])]
        found.append(torch.cat(rows))
    assert not found[0].isnan().any()
    assert torch.equal(*found)


def test_graphs_are_captured_again_when_a_table_grows() -> None:
    golden = opened(FIXTURES[0])
    plain, captured = load_stages(golden.spec, (), EXACT), load_stages(golden.spec, (), EXACT)
    pipelines = Pipeline(golden.spec, eager(plain)), Pipeline(golden.spec, captured)
    [graphs] = graphs_of(captured)
    found = []
    for c in pipelines:
        c.open(0)
        rows = [c.run((0, [token])).cpu() for token in golden.ids[:6]]
        for n_entries in (MIN_ENTRIES, 3 * MIN_ENTRIES):
            for stage in c.stages:
                stage.apply([SetPages(0, KvGroup.FULL, 1, [1] * n_entries)])  # behind what the sequence has filled
            rows += [c.run((0, [token])).cpu() for token in golden.ids[:6]]
        found.append(torch.cat(rows))
    assert torch.equal(*found)
    assert not graphs._uncapturable
    assert len(graphs._graphs) == 1


def test_a_failed_capture_is_reported_and_the_step_runs_eagerly() -> None:
    golden = opened(FIXTURES[0])
    [stage] = load_stages(golden.spec, (), EXACT)
    [graphs] = graphs_of([stage])
    said: list[str] = []
    stage.warn = said.append
    work = graphs.work

    def waiting(rows: Tensor | None, batch: object) -> ShardOutput:
        out = work(rows, batch)  # type: ignore[arg-type]
        out.rows.sum().item()
        return out

    graphs.work = waiting
    c = Pipeline(golden.spec, [stage])
    c.open(0)
    found = torch.cat([c.run((0, [token])).cpu() for token in golden.ids[:6]])
    golden.assert_logits(found)
    assert len(said) == 1
    assert "capture failed" in said[0]
