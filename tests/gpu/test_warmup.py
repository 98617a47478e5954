"""A GPU replays verify slices of any width and their drafts from the first time on after a warm-up of all graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.device import prepare
from daemons.graphs import StepGraphs
from daemons.kv.slice_group import PADDED_ROWS
from daemons.warmup import warm_up, warm_up_draft
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import DraftedPipeline, golden, load_draft, wanted_trace
from tests.families.golden import opened
from tests.families.pipeline import How, Pipeline, load_stages
from tests.model.drafter_files import DFLASH2, MTP, TARGET

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
EXACT = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA)


@pytest.mark.parametrize(
    ("name", "model", "path", "kind", "n"),
    [("dflash2", TARGET, DFLASH2, DraftKind.DFLASH, 7), ("qwen35_mtp_draft", MTP, MTP, DraftKind.MTP, 4)],
)
def test_no_graph_is_captured_while_a_client_waits(
    name: str, model: Path, path: Path, kind: DraftKind, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(Backend.CUDA, 0)
    monkeypatch.setattr("daemons.warmup.GRAPH_SECONDS", 60.0)
    target = open_spec(model)
    draft = load_draft(target, path, kind, EXACT)
    stages = load_stages(target, how=EXACT, captures=draft.spec.captures)
    draft.max_drafts = stages[0].max_drafts = n
    problems = list[object]()
    for stage in stages:
        warm_up(stage, log=lambda event, **fields: problems.append(fields["problem"]))
    warm_up_draft(draft, log=lambda event, **fields: problems.append(fields["problem"]))
    assert problems == [""] * (len(stages) + 1)
    pipeline = DraftedPipeline(target, stages, draft)
    captured: list[object] = []
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, key, *more: captured.append(key))
    wanted = wanted_trace(name)
    assert pipeline.trace(golden(name)["input_ids"].tolist()[:40], 64, n)[: len(wanted)] == wanted
    assert not captured


def test_chunks_that_begin_a_prompt_are_replayed_from_the_first_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(Backend.CUDA, 0)
    monkeypatch.setattr("daemons.warmup.GRAPH_SECONDS", 60.0)
    golden_model = opened("qwen3")
    [stage] = stages = load_stages(golden_model.spec, how=EXACT)
    warm_up(stage)
    [graphs] = stage.graphs
    assert graphs is not None
    sizes = sorted(key.n_tokens for key in graphs._chunk_graphs)
    assert sizes == [n for n in PADDED_ROWS if n <= stage.max_step_tokens]
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, key, *more: pytest.fail(f"{key} is captured"))
    c = Pipeline(golden_model.spec, stages)
    for sequence, n in enumerate((33, 48, 60, 100, 400)):
        c.open(sequence)
        found = c.run((sequence, (golden_model.ids * 8)[:n]))
        golden_model.assert_logits(found[: len(golden_model.ids)].cpu())
