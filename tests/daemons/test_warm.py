"""Warming up runs every kind of step and leaves the stage as it was."""

from __future__ import annotations

import pytest

from daemons.kv.batch import Batch
from daemons.models.stage import LoadedStage
from daemons.runner import ModelRunner
from daemons.warm import STEP_TOKENS, warm_up
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.loading import Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import Pipeline, load_stages, pools_of


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


def test_a_small_pool_is_warmed_as_far_as_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(FIXTURES[0])
    [stage] = load_stages(golden.spec)
    stage.max_step_tokens = 40
    stage.sequences.units = {space: min(n, 1) for space, n in stage.sequences.units.items()}
    warm_up(stage)
    assert not stage.sequences.by_id


class ReporterSpy:
    """Records the phases and events reported."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.events: list[str] = []

    def progress(self, progress: Progress) -> None:
        self.phases.append(progress.phase)

    def log(self, level: str, event: str, **fields: object) -> None:
        self.events.append(event)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_daemon_warms_up_what_it_compiles(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    )
    if compiles:  # a stage on a GPU has a recorder for each shard
        made = LoadedStage.__init__

        def recorded(self, *arguments):
            made(self, *arguments)
            self.graphs = [Plain(self)]

        monkeypatch.setattr(LoadedStage, "__init__", recorded)
    reporter = ReporterSpy()
    runner, loaded = ModelRunner.load(load, Backend.CPU, [], reporter)
    assert ("warm up" in reporter.phases) == compiles
    assert ("kernels are ready" in reporter.events) == compiles
    assert loaded.seconds > 0
    assert not runner.stages[0].sequences.by_id


class Plain:
    """Runs a shard's step without recording it."""

    def __init__(self, stage: LoadedStage) -> None:
        [self.shard] = stage.shards

    def run(self, rows, layout, tables):
        return self.shard.run(rows, Batch(layout, tables, layout.on(self.shard.device)))
