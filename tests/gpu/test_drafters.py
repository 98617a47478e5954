"""Drafters on a GPU: captured drafts equal eager ones, also from a draft vocabulary, and the traces of the golden
files.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from daemons.device import prepare
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import MANY, DraftedPipeline, golden, load_draft, wanted_trace
from tests.families.pipeline import How, load_stages
from tests.model.drafter_files import DFLASH2, MTP, TARGET, UPSTREAM, copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
EXACT = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA)
GOLDEN = {
    "dflash": (TARGET, UPSTREAM, DraftKind.DFLASH, 7),
    "dflash2": (TARGET, DFLASH2, DraftKind.DFLASH, 7),
    "qwen35_mtp_draft": (MTP, MTP, DraftKind.MTP, 4),
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", GOLDEN)
def test_the_whole_trace(name: str, graphs: bool) -> None:
    """64 tokens: every block has the golden drafts and acceptances; with graphs all keys are captured."""
    prepare(Backend.CUDA, 0)
    model, path, kind, n_ahead = GOLDEN[name]
    target = open_spec(model)
    draft = load_draft(target, path, kind, EXACT)
    captures = draft.spec.captures
    pipeline = DraftedPipeline(target, load_stages(target, how=EXACT, captures=captures), draft)
    assert draft.graphs is not None
    captured = draft.graphs
    if not graphs:
        draft.graphs = None
    wanted = wanted_trace(name)
    found = pipeline.trace(golden(name)["input_ids"].tolist()[:40], 64, n_ahead)
    assert found[: len(wanted)] == wanted
    for one in captured:
        assert bool(one._graphs) == graphs
        assert not one._uncapturable


@pytest.mark.parametrize("graphs", [True, False])
def test_every_draft_of_a_model_for_itself_is_accepted(graphs: bool) -> None:
    prepare(Backend.CUDA, 0)
    path = TARGET.parents[1] / "qwen3" / "model.gguf"
    target = open_spec(path)
    draft = load_draft(target, path, DraftKind.MODEL, EXACT)
    captured = draft.graphs
    assert captured is not None
    if not graphs:
        draft.graphs = None
    pipeline = DraftedPipeline(target, load_stages(target, how=EXACT), draft)
    blocks = pipeline.trace(golden("qwen3")["input_ids"].tolist()[:40], 64, 5)
    assert [n_accepted for _, _, n_accepted in blocks] == [5] * len(blocks)
    assert bool(captured.draft._graphs) == bool(captured.extend._graphs) == graphs


@pytest.mark.parametrize("name", GOLDEN)
def test_graphs_draw_from_the_rows_that_a_draft_vocabulary_has_by_then(name: str, tmp_path: Path) -> None:
    prepare(Backend.CUDA, 0)
    model, path, kind, n_ahead = GOLDEN[name]
    file = copy(tmp_path / "target.gguf", model, kinds={"output.weight": gguf.GGMLQuantizationType.Q8_0})
    target, traces = open_spec(file), []
    captures = load_draft(target, file if path == model else path, kind, EXACT).spec.captures
    [stage] = stages = load_stages(target, how=EXACT, captures=captures)
    for graphs in (True, False):
        draft = load_draft(target, file if path == model else path, kind, EXACT, stage, sizes=MANY)
        assert draft.draft_vocabulary is not None
        captured = draft.graphs
        assert captured is not None
        if not graphs:
            draft.graphs = None
        pipeline = DraftedPipeline(target, stages, draft)
        traces.append(pipeline.trace(golden(name)["input_ids"].tolist()[:40], 64, n_ahead))
        assert bool(captured.draft._graphs) == graphs
        assert set(draft.draft_vocabulary.ids.tolist()) != set(range(144))
    assert traces[0] == traces[1]
