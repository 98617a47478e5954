"""DFlash drafters against the authors' code: one block with every mask, and a whole trace of speculative decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.draft.dflash import CandidateSelector, Dflash
from daemons.draft.stage import DraftJob, DraftStage
from daemons.ops.topk import candidate_scores
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.steps import Slice
from tests.drafters.drafted import (
    DraftedPipeline,
    assert_explained,
    bounds_of,
    context,
    draft_batch,
    golden,
    load_draft,
    load_exact_draft,
    wanted_trace,
)
from tests.families.pipeline import load_stages
from tests.model.drafter_files import DFLASH2, DFLASH2_CONFIG, LUCEBOX, TARGET, UPSTREAM, checkpoint, copy
from tests.numerics import Bound


@cache
def target() -> ModelSpec:
    return open_spec(TARGET)


@torch.inference_mode()
def block(stage: DraftStage, z: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states [n, E] and logits [n, V] of the masks of the golden block."""
    drafter = stage.drafter
    assert isinstance(drafter, Dflash)
    newest, n = z["block_ids"].tolist()[0], len(z["block_ids"]) - 1
    context(stage, z["features"][:40], z["input_ids"].tolist()[:40], newest, n)
    job = DraftJob(Slice(0, 0, [], True, num_draft_tokens=n), 0, newest, 40, 39)
    hidden = drafter.hidden(draft_batch(stage, job))
    return hidden[0], drafter.logits(hidden)[0]


@cache
def block_bounds(path: Path, name: str) -> list[Bound]:
    stage, z = load_exact_draft(lambda: load_draft(target(), path)), golden(name)
    return bounds_of(lambda: block(stage, z))


def assert_block(path: Path, bounds: list[Bound], z: dict[str, Tensor], *wanted: Tensor) -> None:
    """``wanted``: hidden states, and logits if they are known, of the block and its first token."""
    assert_explained(bounds, block(load_draft(target(), path), z), [x[1:] for x in wanted])


@pytest.fixture(params=["upstream", "lucebox", "checkpoint"])
def form(request, tmp_path) -> Path:
    if request.param == "checkpoint":
        return checkpoint(tmp_path / "drafter", UPSTREAM)
    return {"upstream": UPSTREAM, "lucebox": LUCEBOX}[request.param]


def test_a_block_of_every_form(form):
    z = golden("dflash")
    bounds = block_bounds(UPSTREAM, "dflash")
    assert_block(form, bounds, z, z["draft_hidden_causal_swa"], z["draft_logits_causal_swa"])
    features, ids = z["features"], z["input_ids"].tolist()
    [drafted] = context(load_draft(target(), form), features, ids, int(z["block_ids"][0]), 7)
    assert drafted.tokens == z["draft_tokens_causal_swa"].tolist()[1:]


def test_a_block_without_causality(tmp_path):
    z, path = golden("dflash"), copy(tmp_path / "d.gguf", UPSTREAM, keys={"dflash.attention.causal": False})
    wanted = z["draft_hidden_noncausal_swa"], z["draft_logits_noncausal_swa"]
    assert_block(path, block_bounds(path, "dflash"), z, *wanted)


def assert_trace(name: str, path: Path, n: int, chunk: int = 512) -> DraftedPipeline:
    z = golden(name)
    captures = load_draft(target(), path).spec.captures
    pipeline = DraftedPipeline(target(), load_stages(target(), captures=captures), load_draft(target(), path))
    wanted = wanted_trace(name)
    found = pipeline.trace(z["input_ids"].tolist()[:40], n, 7, chunk)
    assert found[: len(wanted)] == wanted
    return pipeline


@pytest.mark.parametrize("chunk", [512, 16])
def test_the_whole_trace(chunk):
    pipeline = assert_trace("dflash", UPSTREAM, 64, chunk)
    assert pipeline.generated == golden("dflash")["spec_greedy_tokens"].tolist()


# ---- DFlash 2


@pytest.fixture(params=["gguf", "checkpoint"])
def second(request, tmp_path) -> Path:
    return DFLASH2 if request.param == "gguf" else checkpoint(tmp_path / "drafter", DFLASH2, DFLASH2_CONFIG)


def test_a_block_of_version_2(second):
    z = golden("dflash2")
    assert_block(second, block_bounds(DFLASH2, "dflash2"), z, z["draft_hidden"], z["draft_logits"])


@torch.inference_mode()
def path_scores(stage: DraftStage, z: dict[str, Tensor]) -> list[Tensor]:
    """Scores [7, K] of the candidates along the golden path."""
    hidden, logits = block(stage, z)
    found = selector_of(stage).candidates(hidden[None], logits[None], z["block_ids"][:1].long())
    assert found.tokens[0].tolist() == z["candidates"].tolist()
    scores = candidate_scores(found)
    path = [0, *(z["candidates"] == z["draft_path"][:, None]).int().argmax(dim=1).tolist()]
    return [torch.stack([scores[0, position, at] for position, at in enumerate(path[:-1])])]


def selector_of(stage: DraftStage) -> CandidateSelector:
    assert isinstance(stage.drafter, Dflash)
    assert stage.drafter.selector is not None
    return stage.drafter.selector


def test_the_path_of_version_2():
    z = golden("dflash2")
    exact = load_exact_draft(lambda: load_draft(target(), DFLASH2))
    bounds = bounds_of(lambda: path_scores(exact, z))
    assert_explained(bounds, path_scores(load_draft(target(), DFLASH2), z), [z["path_scores"]])
    [drafted] = context(load_draft(target(), DFLASH2), z["features"][:40], z["input_ids"].tolist()[:40], 192, 7)
    assert drafted.tokens == z["draft_path"].tolist() != z["draft_argmax"].tolist()
    likely = z["path_scores"].softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(torch.tensor(drafted.probabilities), likely)


def test_the_whole_trace_of_version_2(second):
    pipeline = assert_trace("dflash2", second, 64)
    assert pipeline.generated[1:] == golden("dflash2")["input_ids"].tolist()[41:104]
