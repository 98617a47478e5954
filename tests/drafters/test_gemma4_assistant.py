"""Gemma 4 assistants against transformers: drafts and their logits, behind prompts, chunks and verified drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.draft.gemma4_assistant import Gemma4Assistant
from daemons.draft.stage import DraftJob
from lucevisor.model.families import open_spec
from lucevisor.protocol.loading import DraftKind
from tests.drafters.assistants import Reference, make_assistant, write_pair
from tests.drafters.drafted import DraftedPipeline, draft_batch, load_draft
from tests.families.generate.gemma4 import gemma4
from tests.families.generate.made import Draw, Made
from tests.families.pipeline import load_stages

N = 4
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 6, 20))]
"""Random models with both kinds of attention behind the first layer, with and without shared keys, keys as values."""


def pair(seed: int, directory: Path) -> tuple[Made, Made, DraftedPipeline]:
    draw = Draw(seed)
    target = gemma4(draw)
    assistant = make_assistant(target, draw)
    model, path = write_pair(directory, target, assistant)
    spec = open_spec(model)
    draft = load_draft(spec, path, DraftKind.MTP)
    stages = load_stages(spec, captures=draft.spec.captures)
    return target, assistant, DraftedPipeline(spec, stages, draft)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_drafts_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    target, assistant, pipeline = pair(seed, tmp_path)
    ids = Draw(seed + 1).ids(61, target.vocabulary)
    reference = Reference(target.model, assistant.model)
    pipeline.open(0)
    pipeline.run((0, ids[:30]))
    pipeline.draft([[]], 0)
    pipeline.run((0, ids[30:50]))
    [found] = pipeline.draft([[ids[50]]], N)
    wanted, logits = reference.drafts(ids[:50], ids[50], N)
    assert found.tokens == wanted
    best = logits.softmax(dim=-1).max(dim=-1).values
    assert found.probabilities == pytest.approx(best.tolist(), rel=1e-3)
    # One draft is accepted, the others were wrong: their keys are overwritten.
    wrong = [ids[51], *((t + 1) % target.vocabulary for t in ids[52:55])]
    pipeline.verify((0, [ids[50], *wrong], N))
    [found] = pipeline.draft([[ids[51], ids[52]]], N)
    pipeline.accept(0, N, 1)
    wanted, _ = reference.drafts(ids[:52], ids[52], N)
    assert found.tokens == wanted


@torch.inference_mode()
def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    target, assistant, pipeline = pair(1, tmp_path)
    ids = Draw(7).ids(40, target.vocabulary)
    pipeline.open(0)
    pipeline.run((0, ids[:39]))
    pipeline.draft([[ids[39]]], 0)
    stage, drafter = pipeline.draft_stage, pipeline.draft_stage.drafter
    stage.flush()
    assert isinstance(drafter, Gemma4Assistant)
    [captures] = [rows for rows in pipeline.captures if rows is not None]
    width = drafter.hidden_size
    hidden = drafter.target_norm.float32(captures[-1:, drafter.hidden_at * width :][:, :width].contiguous())
    step = pipeline.step.slices[0]
    job = DraftJob(type(step)(0, 0, step.tokens, True, num_draft_tokens=1), 0, ids[39], 39, 38)
    batch = draft_batch(stage, job)
    batch.positions = batch.positions + 1
    found, _ = drafter.row(batch.ids, hidden, batch)
    _, wanted = Reference(target.model, assistant.model).drafts(ids[:39], ids[39], 1)
    assert torch.allclose(found, wanted, atol=2e-4, rtol=1e-3), (found - wanted).abs().max()
