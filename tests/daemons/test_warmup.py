"""Warming up runs every kind of step and leaves the stage as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.models.stage import LoadedStage
from daemons.ops.page_sums import TorchPageSums
from daemons.sampling import Sampler
from daemons.warmup import STEP_TOKENS, warm_up, warm_up_draft
from lucevisor.model.families import open_spec
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import DraftedPipeline, golden, load_draft, wanted_trace
from tests.families.golden import KINDS, opened
from tests.families.pipeline import How, Pipeline, load_stages
from tests.model.drafter_files import MTP, TARGET, UPSTREAM


@pytest.mark.parametrize("name", KINDS)
def test_a_warm_chain_is_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(name)
    stages = load_stages(golden.spec, golden.layer_splits()[:1])
    lengths: list[int] = []
    forward = LoadedStage.forward

    def watched(self, step, rows):
        lengths.append(step.n_tokens)
        return forward(self, step, rows)

    monkeypatch.setattr(LoadedStage, "forward", watched)
    for stage in stages:
        lengths.clear()
        warm_up(stage)
        assert set(lengths) == set(STEP_TOKENS)
        assert not stage.sequences.by_id
    c = Pipeline(golden.spec, stages)
    c.open(0)
    golden.assert_logits(c.run((0, golden.ids)))


@pytest.mark.parametrize("name", KINDS)
def test_the_largest_step_runs_at_the_end_of_the_longest_sequence_and_is_sampled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where pages of all these positions are more than a pool has."""
    [stage] = load_stages(opened(name).spec, how=How(max_attended=4096))
    seen: list[tuple[int, int]] = []
    drawn: list[int] = []
    forward, sample = LoadedStage.forward, Sampler.sample

    def watched(self, step, rows):
        seen.append((step.slices[0].start, step.n_tokens))
        return forward(self, step, rows)

    def counted(self, slices, logits):
        drawn.append(len(logits))
        return sample(self, slices, logits)

    monkeypatch.setattr(LoadedStage, "forward", watched)
    monkeypatch.setattr(Sampler, "sample", counted)
    warm_up(stage)
    assert seen.count((4096 - 512, 512)) == 1
    assert drawn == [16]  # one for each sequence
    assert not stage.sequences.by_id


def test_a_largest_step_that_does_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    [stage] = load_stages(opened("llama").spec, how=How(max_attended=4096))
    warnings: list[str] = []
    stage.warn = warnings.append
    forward = LoadedStage.forward

    def full(self, step, rows):
        if step.slices[0].start > 2048:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none")
        return forward(self, step, rows)

    monkeypatch.setattr(LoadedStage, "forward", full)
    warm_up(stage)
    [warning] = warnings
    assert "512 tokens at position 4096" in warning
    assert "Tried to allocate 2.00 GiB; lower engine.pages" in warning
    assert not stage.sequences.by_id


@pytest.mark.parametrize(("name", "wanted"), [("qwen35", [0, 3]), ("gemma3", [0, 5]), ("llama", [0])])
def test_layers_of_a_kind_are_run_once(name: str, wanted: list[int]) -> None:
    [stage] = load_stages(opened(name).spec)
    [shard], graphs = stage.shards, stage.graphs
    layers = shard.layers
    with stage.shortened():
        assert [layers.index(layer) for layer in shard.layers] == wanted
        assert stage.graphs is not graphs
    assert shard.layers is layers
    assert stage.graphs is graphs


def test_pages_are_scored_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """For KV Flash, policy qk: one page on the device and one in host memory, for a decode and the end of a prompt."""
    fixture, seen = opened(KINDS[0]), []

    class Watched(TorchPageSums):
        def of_keys(self, q, keys, pages):
            seen.append(("device", len(pages)))
            return super().of_keys(q, keys, pages)

        def of_sketches(self, q, sketches, rows):
            seen.append(("host", len(rows)))
            return super().of_sketches(q, sketches, rows)

    monkeypatch.setattr("daemons.ops.operations.TorchPageSums", Watched)
    [stage] = load_stages(fixture.spec, how=How(host_pages=4, rank_pages=True))
    warm_up(stage)
    assert seen == [("device", 1), ("host", 1)] * 2
    assert not stage.sequences.by_id


@pytest.mark.parametrize(
    ("name", "model", "path", "kind", "n"),
    [("dflash", TARGET, UPSTREAM, DraftKind.DFLASH, 7), ("qwen35_mtp_draft", MTP, MTP, DraftKind.MTP, 4)],
)
def test_a_warm_drafter_drafts_the_golden_trace(name: str, model: Path, path: Path, kind: DraftKind, n: int) -> None:
    target = open_spec(model)
    draft = load_draft(target, path, kind)
    draft.max_drafts = n
    warm_up_draft(draft)
    assert not draft.sequences.by_id
    pipeline = DraftedPipeline(target, load_stages(target, captures=draft.spec.captures), draft)
    wanted = wanted_trace(name)
    assert pipeline.trace(golden(name)["input_ids"].tolist()[:40], 64, n)[: len(wanted)] == wanted
