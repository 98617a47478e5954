"""MTP heads against transformers' modules: all rows, a chain of drafts, and a whole trace of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.draft.mtp import Mtp
from daemons.draft.stage import DraftJob, DraftStage
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import Slice
from tests.drafters.drafted import (
    DraftedPipeline,
    assert_explained,
    bounds_of,
    draft_batch,
    golden,
    load_draft,
    load_exact_draft,
    wanted_trace,
)
from tests.families.pipeline import load_stages
from tests.families.rounding import load_exact
from tests.model.drafter_files import MTP, head_alone


@cache
def target() -> ModelSpec:
    return open_spec(MTP)


def load_head(path: Path = MTP) -> DraftStage:
    return load_draft(target(), path, DraftKind.MTP)


def load_target() -> list[LoadedStage]:
    return load_stages(target(), captures=[target().n_layers - 1])


def head_of(pipeline: DraftedPipeline) -> Mtp:
    assert isinstance(pipeline.draft_stage.drafter, Mtp)
    return pipeline.draft_stage.drafter


def assert_golden(run: Callable[[DraftedPipeline], list[Tensor]], *wanted: Tensor) -> None:
    """What ``run`` computes with target and head is as near to ``wanted`` as two float32 runs must be."""
    stages, head = load_exact(load_target), load_exact_draft(load_head)
    bounds = bounds_of(lambda: run(DraftedPipeline(target(), stages, head)))
    assert_explained(bounds, run(DraftedPipeline(target(), load_target(), load_head())), wanted)


@torch.inference_mode()
def chain(pipeline: DraftedPipeline) -> list[Tensor]:
    """Hidden states and logits of a chain of four drafts behind the prompt."""
    z = golden("qwen35_mtp_draft")
    pipeline.open(0)
    pipeline.run((0, z["input_ids"].tolist()[:40]))
    pipeline.draft([[]], 4)
    stage, head = pipeline.draft_stage, head_of(pipeline)
    hidden = head.target_norm.float32(pipeline.captures[0])[-1:]
    batch = draft_batch(stage, DraftJob(Slice(0, 0, [], True, num_draft_tokens=4), 0, int(z["first_token"]), 40, 39))
    ids, found = batch.by_token(head.operations)[0].ids, []
    for row in batch.by_token(head.operations):
        hidden = head.row(ids, hidden, row)
        found.append((hidden, head.logits(hidden)))
        ids = found[-1][1].argmax(dim=-1)
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def test_a_chain_of_drafts():
    z = golden("qwen35_mtp_draft")
    assert_golden(chain, z["draft_hidden"], z["draft_logits"])


@pytest.mark.parametrize("file", ["the model's", "its own"])
@pytest.mark.parametrize("chunk", [512, 16])
def test_the_whole_trace(file, chunk, tmp_path):
    z = golden("qwen35_mtp_draft")
    path = MTP if file == "the model's" else head_alone(tmp_path / "head.gguf")
    pipeline = DraftedPipeline(target(), load_target(), load_head(path))
    found = pipeline.trace(z["input_ids"].tolist()[:40], 64, 4, chunk)
    wanted = wanted_trace("qwen35_mtp_draft")
    assert found[: len(wanted)] == wanted
    assert pipeline.generated == z["spec_greedy_tokens"].tolist()
