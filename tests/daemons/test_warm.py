"""Warming up runs every kind of step and leaves the stage as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.kv.batch import Batch
from daemons.models.stage import LoadedStage
from daemons.ops.page_sums import TorchPageSums
from daemons.runner import ModelRunner
from daemons.warm import STEP_TOKENS, warm_up, warm_up_draft
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import DraftKind, Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from tests.drafters.drafted import DraftedPipeline, golden, load_draft, wanted_trace
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import How, Pipeline, load_stages, pools_of
from tests.model.drafter_files import MTP, TARGET, UPSTREAM

DEMO = Path(__file__).parents[2] / "etc" / "demo"


@pytest.mark.parametrize("name", FIXTURES)
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


def test_pages_are_scored_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """For KV Flash, policy qk: one page on the device and one in host memory, for a decode and the end of a prompt."""
    fixture, seen = opened(FIXTURES[0]), []

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
    n_layers = sum(layer.space is Space.FULL for layer in fixture.spec.layers)
    assert seen == [("device", 1), ("host", 1)] * 2 * n_layers
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


class ReporterSpy:
    """Records the phases and events reported."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.events: list[str] = []

    def progress(self, progress: Progress) -> None:
        self.phases.append(progress.phase)

    def log(self, level: str, event: str, **fields: object) -> None:
        self.events.append(event)


@pytest.mark.parametrize("captures", [True, False])
def test_a_daemon_warms_up_what_it_captures(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(FIXTURES[0])
    assert golden.spec.files is not None
    whole = [ShardPlan(0, LayerRange(0, golden.spec.n_layers))]
    files = [str(path) for path in golden.spec.files.paths]
    load = Load(
        files,
        Dtype.FLOAT32,
        Dtype.FLOAT32,
        [StagePlan(0, whole, None, None, embedding=True, output=True)],
        [],
        pools_of(golden.spec),
        4,
        64,
        max_drafts=2,
    )
    if captures:  # as a stage on a GPU or in half precision has
        made = LoadedStage.__init__

        def recorded(self, *arguments):
            made(self, *arguments)
            self.graphs = [Plain(self)]

        monkeypatch.setattr(LoadedStage, "__init__", recorded)
    reporter = ReporterSpy()
    runner, loaded = ModelRunner.load(load, Backend.CPU, [], reporter)
    assert ("warm up" in reporter.phases) == captures
    assert ("verify slices are recorded" in reporter.events) == captures
    assert loaded.seconds > 0
    assert not runner.stages[0].sequences.by_id


class Plain:
    """Runs a shard's step without recording it."""

    cold = False

    def __init__(self, stage: LoadedStage) -> None:
        [self.shard] = stage.shards
        self.chunk_rows = 0

    def run(self, rows, layout, tables, await_rows):
        await_rows()
        return self.shard.run(rows, Batch(layout, tables, layout.on(self.shard.device)))
