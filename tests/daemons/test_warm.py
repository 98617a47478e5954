"""Warming up runs every kind of step and leaves the stage as it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from daemons import warm
from daemons.draft.stage import DraftStage
from daemons.graphs import CAPTURE_AT, StepGraphs
from daemons.kv.batch import Batch
from daemons.kv.slice_group import PADDED_ROWS
from daemons.models.stage import LoadedStage
from daemons.ops.operations import SHORT_SLICE
from daemons.ops.page_sums import TorchPageSums
from daemons.runner import ModelRunner
from daemons.warm import DRAFTING, GRAPH_ENDS, STEP_TOKENS, WARM_GRAPHS, WarmStep, warm_up, warm_up_draft
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import DraftKind, Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import Slice
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.drafters.drafted import DraftedPipeline, golden, load_draft, wanted_trace
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import STATES, How, Pipeline, load_stages, pools_of
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


def test_a_small_pool_is_warmed_as_far_as_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(FIXTURES[0])
    [stage] = load_stages(golden.spec)
    stage.max_step_tokens = 40
    stage.sequences.units = {space: min(n, 1) for space, n in stage.sequences.units.items()}
    warm_up(stage)
    assert not stage.sequences.by_id


def watched_steps(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[list[Slice]]:
    """The slices of each step that a stage runs from now on."""
    seen: list[list[Slice]] = []
    run = getattr(kind, method)

    def watched(self, step, *more):
        seen.append(step.slices)
        return run(self, step, *more)

    monkeypatch.setattr(kind, method, watched)
    return seen


@pytest.mark.parametrize("name", ["qwen35", "qwen3"])
def test_verify_slices_of_several_sequences_run_and_those_of_the_most_are_captured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are states for: of each its own."""
    monkeypatch.setattr(warm, "GRAPH_SECONDS", 1e9)
    [stage] = load_stages(opened(name).spec)
    stage.max_drafts = 4
    steps = watched_steps(monkeypatch, LoadedStage, "forward")
    warm_up(stage)
    shapes = Counter((len(step), len(step[0].tokens)) for step in steps if len(step) > 1)
    sequences = {n for n, _ in shapes}
    assert sequences <= set(DRAFTING)
    most = max(sequences)
    assert shapes[most, 2] == shapes[most, 3] == 1 + CAPTURE_AT * len(GRAPH_ENDS)
    assert shapes[most, 1] == CAPTURE_AT * len(GRAPH_ENDS), "their plain decodes"
    assert {count for (n, tokens), count in shapes.items() if n < most or tokens > 3} == {1}
    for step in steps:
        states = [state for s in step for state in s.states]
        assert len(states) == len(set(states))
    assert not stage.sequences.by_id


@pytest.mark.parametrize("name", FIXTURES)
def test_verify_slices_run_until_they_are_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "GRAPH_SECONDS", 1e9)
    fixture = opened(name)
    stages = load_stages(fixture.spec, fixture.layer_splits()[:1])
    recurrent = Space.RECURRENT in fixture.spec.spaces()
    for stage in stages:
        stage.max_drafts = 4
        with monkeypatch.context() as patch:
            steps = watched_steps(patch, LoadedStage, "forward")
            warm_up(stage)
        seen = [s for step in steps if len(step) == 1 for s in step]
        ends = [s.start + len(s.tokens) for s in seen if s.n_drafts == 4]
        assert ends == [end for end in GRAPH_ENDS for _ in range(CAPTURE_AT)]
        kept = {(len(s.tokens), len(s.states)) for s in seen if s.n_drafts}
        assert kept == {(n, n * recurrent) for n in range(2, 6)}
        assert not stage.sequences.by_id
    c = Pipeline(fixture.spec, stages)
    c.open(0)
    fixture.assert_logits(c.run((0, fixture.ids)))


@pytest.mark.parametrize(
    ("bound", "value", "n"),
    [("GRAPH_SECONDS", -1.0, 0), ("GRAPH_MEMORY", 1 << 60, 0), ("GRAPH_SECONDS", 1e9, WARM_GRAPHS)],
)
def test_capturing_is_bounded(bound: str, value: float, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = opened("qwen35")
    [stage] = load_stages(fixture.spec)
    stage.max_drafts = 15
    if bound:
        monkeypatch.setattr(warm, bound, value)
    steps = watched_steps(monkeypatch, LoadedStage, "forward")
    warm_up(stage)
    ordinary = {(start, size) for start in (0, warm.SPLIT_START) for size in STEP_TOKENS}
    alone = [step[0] for step in steps if len(step) == 1]
    assert len([s for s in alone if (s.start, len(s.tokens)) not in ordinary]) == CAPTURE_AT * n


@pytest.mark.parametrize(
    ("name", "model", "path", "kind", "n"),
    [("dflash", TARGET, UPSTREAM, DraftKind.DFLASH, 7), ("qwen35_mtp_draft", MTP, MTP, DraftKind.MTP, 4)],
)
def test_a_warm_drafter_drafts_the_golden_trace(
    name: str, model: Path, path: Path, kind: DraftKind, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_spec(model)
    draft = load_draft(target, path, kind)
    draft.max_drafts = n
    with monkeypatch.context() as patch:
        steps = watched_steps(patch, DraftStage, "run")
        warm_up_draft(draft)
    seen = [s for step in steps for s in step]
    assert {s.num_draft_tokens for s in seen} >= set(range(n + 1))
    verified = [(len(s.tokens), s.num_draft_tokens) for s in seen if s.start > warm.SPLIT_START]
    for k in range(1, n + 1):
        assert verified.count((1 + k, k)) == 2 * CAPTURE_AT, "for the bounds 1024 and 2048"
    several = [s.sequence for s in seen if s.num_draft_tokens == n and s.start == 0 and len(s.tokens) == 1]
    most = draft.sequences.max_sequences
    if draft.sequences.units[Space.RECURRENT]:
        most = min(most, draft.sequences.sizes.device_states)
    assert several.count(1) == sum(size <= most for size in DRAFTING) > 0, "sequences that draft together"
    largest = max(size for size in DRAFTING if size <= most)
    captured = Counter(
        (len(step[0].tokens), step[0].num_draft_tokens) for step in steps if len(step) == largest and step[0].start
    )
    assert captured == {(k, k): CAPTURE_AT * len(GRAPH_ENDS) for k in (1, 2, 3)}
    assert not draft.sequences.by_id
    pipeline = DraftedPipeline(target, load_stages(target, captures=draft.spec.captures), draft)
    wanted = wanted_trace(name)
    assert pipeline.trace(golden(name)["input_ids"].tolist()[:40], 64, n)[: len(wanted)] == wanted


@needs_cpu_kernels
def test_a_cpu_records_verify_slices_and_drafts_of_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "RECORD_SECONDS", 60.0)
    how, n = How(Dtype.BFLOAT16, Dtype.BFLOAT16), 4
    target = open_spec(DEMO / "demo-qwen35-22m-q4_k_m.gguf")
    draft = load_draft(target, DEMO / "demo-qwen35-22m-dflash2-q4_0.gguf", DraftKind.DFLASH, how)
    stages = load_stages(target, how=how, captures=draft.spec.captures)
    draft.max_drafts = n
    for stage in stages:
        stage.max_drafts = n
        warm_up(stage, compiles=False)
        assert {key[:2] for key in stage.graphs[0]._graphs} == {(1, 1 + k) for k in range(n + 1)}
        assert not stage.sequences.by_id
    warm_up_draft(draft, compiles=False)
    assert draft.graphs is not None
    assert not draft.sequences.by_id
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, key, *more: pytest.fail(f"{key} is captured"))
    pipeline = DraftedPipeline(target, stages, draft)
    assert len(pipeline.trace(list(range(300, 340)), 32, n)) >= 32 // (n + 1)


@pytest.mark.parametrize(("chunk_rows", "n_drafts"), [(128, 4), (96, 0), (0, 4), (1024, 0)])
def test_chunks_that_begin_a_prompt_are_captured(chunk_rows: int, n_drafts: int, monkeypatch) -> None:
    """Those that a step can have, the longest first, behind the verify slices."""
    monkeypatch.setattr(warm, "GRAPH_SECONDS", 1e9)
    fixture = opened("qwen35")
    [stage] = load_stages(fixture.spec)
    stage.max_drafts = n_drafts
    stage.graphs = [Padding(stage, chunk_rows)]
    steps = watched_steps(monkeypatch, LoadedStage, "forward")
    warm_up(stage)
    seen = [step[0] for step in steps if len(step) == 1]
    captured = [(s.start, len(s.tokens)) for s in seen[-2 * len(PADDED_ROWS) :] if len(s.tokens) > SHORT_SLICE]
    wanted = [n for n in reversed(PADDED_ROWS) if n <= min(chunk_rows, stage.max_step_tokens)]
    assert captured[len(captured) - CAPTURE_AT * len(wanted) :] == [(0, n) for n in wanted for _ in range(CAPTURE_AT)]
    n_ordinary = sum(s.start in (0, warm.SPLIT_START) and len(s.tokens) in STEP_TOKENS and not s.states for s in seen)
    assert n_ordinary == 2 * len(STEP_TOKENS) + CAPTURE_AT * sum(n in STEP_TOKENS for n in wanted)
    # without time for captures, too: the kernel that makes states is compiled
    assert any(s.states == [0, STATES] for s in seen[: 2 * len(STEP_TOKENS) + 1]) == (n_drafts > 0)
    assert not stage.sequences.by_id


def test_verify_slices_leave_time_to_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = 0.0, []

    def run(number: int, one: WarmStep) -> None:
        nonlocal now
        now += 0.3
        ran.append(one.n)

    monkeypatch.setattr(warm.time, "monotonic", lambda: now)
    lists = [[WarmStep(0, n)] * 9 for n in (5, 64)]
    warm._run_all([], lists, torch.device("cpu"), run, lambda done, total: None, 5.0)
    assert (ran.count(5), ran.count(64)) == (5 * CAPTURE_AT, 4 * CAPTURE_AT)
    ran.clear()
    warm._run_all([], [[], lists[1]], torch.device("cpu"), run, lambda done, total: None, 5.0)
    assert ran.count(64) == 9 * CAPTURE_AT


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


class Padding(Plain):
    """A stage's steps that pad chunks."""

    def __init__(self, stage: LoadedStage, chunk_rows: int) -> None:
        super().__init__(stage)
        self.chunk_rows = min(chunk_rows, stage.max_step_tokens)
