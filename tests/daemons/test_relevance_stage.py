"""The scoring stage: what the last tokens attend to, from the definition, in messages of any length."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from daemons.errors import StateError
from daemons.relevance.stage import ScoreStage
from daemons.runner import ModelRunner
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.loading import Load, PoolSizes, ScorePlan
from lucevisor.protocol.messages import ScoreWindow
from tests.daemons.test_loading import Reporter
from tests.families.pipeline import Pipeline, load_stages
from tests.model.drafter_files import TARGET
from tests.placement.made import configure

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
SCORER = ROOT / "etc" / "demo" / "demo-scorer-q8_0.gguf"


def load(path: Path, window: int = 512, step: int = 512, backend: Backend = Backend.CPU) -> ScoreStage:
    plan = ScorePlan([str(path)], 0, window, step)
    whole = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 512, score=plan)
    return ScoreStage.load(whole, backend, lambda _: None)


def tokens(n: int, vocabulary: int, seed: int = 1) -> list[int]:
    return torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def score(stage: ScoreStage, ids: list[int], n_query: int, cuts: list[int] | None = None) -> torch.Tensor:
    edges = [0, *(cuts or []), len(ids)]
    found = None
    for start, stop in pairwise(edges):
        assert found is None
        found = stage.score(ScoreWindow(1, start, ids[start:stop], n_query if stop == len(ids) else 0))
    assert found is not None
    return found


def by_definition(path: Path, ids: list[int], n_query: int) -> torch.Tensor:
    """From the residual stream and the file's matrices, without rotary positions anywhere."""
    spec = open_spec(path)
    reader = gguf.GGUFReader(path)
    w = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).reshape(tuple(t.shape)[::-1])
        for t in reader.tensors
    }
    pipeline = Pipeline(spec, load_stages(spec))
    pipeline.open(0)
    pipeline.run((0, ids), want_hidden=True)
    p, n, best = spec.params, len(ids), None

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + p.eps) * w[name]

    for i in range(spec.n_layers):
        b = f"blk.{i}."
        x = normed(pipeline.hidden[i], b + "attn_norm.weight")
        q = normed((x @ w[b + "attn_q.weight"].T).view(n, p.n_heads, -1), b + "attn_q_norm.weight")[-n_query:]
        k = normed((x @ w[b + "attn_k.weight"].T).view(n, p.n_kv_heads, -1), b + "attn_k_norm.weight")
        k = k.repeat_interleave(p.n_heads // p.n_kv_heads, dim=1)
        logits = torch.einsum("ihd,jhd->hij", q, k) * p.head_dim**-0.5
        later = torch.arange(n)[None, None] > torch.arange(n - n_query, n)[None, :, None]
        of_layer = logits.masked_fill(later, -torch.inf).softmax(-1).amax(0)
        best = of_layer if best is None else torch.maximum(best, of_layer)
    return best.mean(0)


@pytest.mark.parametrize("path", [GOLDEN / "qwen3" / "model.gguf", SCORER], ids=["golden", "demo"])
def test_scores_are_those_of_the_definition(path: Path) -> None:
    stage = load(path)
    ids = tokens(200, stage.spec.vocabulary)
    found, wanted = score(stage, ids, 24), by_definition(path, ids, 24)
    assert found.shape == (200,)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen35", "gemma4_e2b"])
def test_messages_of_any_length_and_windows_before_change_nothing(family: str) -> None:
    stage = load(GOLDEN / family / "model.gguf")
    ids = tokens(230, stage.spec.vocabulary)
    whole = score(stage, ids, 16)
    assert float(whole.sum()) > 0.9, "of each query's attention, the best head's is 1 in all"
    score(stage, tokens(300, stage.spec.vocabulary, seed=2), 32, [170])
    for cuts in ([64, 128, 192], [1, 2, 200], [213]):
        torch.testing.assert_close(score(stage, ids, 16, cuts), whole, rtol=1e-3, atol=1e-6)


def test_repeated_tokens_are_found_by_the_demo_scorer() -> None:
    """What the model was made for: the place that repeats the question scores best."""
    stage = load(SCORER, window=2048, step=2048)
    ids = tokens(1500, 8000)
    question = ids[700:716]
    found = score(stage, [*ids, *question], 16)
    best = int(torch.nn.functional.avg_pool1d(found[None, :1500], 16, 16).argmax())
    assert best in (43, 44)


def test_tokens_out_of_order_are_refused() -> None:
    stage = load(GOLDEN / "qwen3" / "model.gguf", window=128, step=64)
    assert stage.score(ScoreWindow(1, 0, [1] * 64)) is None
    with pytest.raises(StateError, match="the window has 64 tokens"):
        stage.score(ScoreWindow(1, 32, [1] * 8))
    with pytest.raises(StateError, match="64 at a time, 128 of a window"):
        stage.score(ScoreWindow(1, 64, [1] * 65))
    with pytest.raises(StateError, match="9 of them ask"):
        stage.score(ScoreWindow(1, 64, [1] * 8, n_query=9))
    found = stage.score(ScoreWindow(1, 64, [1] * 64, n_query=8))
    assert found is not None
    assert len(found) == 128


def test_a_daemon_serves_its_stages_without_a_scoring_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    config = configure(tmp_path, ["left:0"], [1], pages=6, max_context=128, max_sequences=2, prefill_chunk=64)
    placement = plan(open_spec(TARGET), config, scorer=open_spec(SCORER))
    assert isinstance(placement, Placement)
    gone = load_message(placement, "left", LoadFiles([str(TARGET)]), 1, score_files=[str(tmp_path / "gone.gguf")])
    runner, answer = ModelRunner.load(gone, Backend.CPU, [], Reporter())  # type: ignore[arg-type]
    assert "the scoring model cannot be loaded" in answer.score_problem
    assert (answer.score, runner.scorer) == (None, None)
    assert runner.stages
    with pytest.raises(FileNotFoundError):  # a daemon that has nothing else to do says so by ending
        ModelRunner.load(msgspec.structs.replace(gone, stages=[]), Backend.CPU, [], Reporter())  # type: ignore[arg-type]
    found = load_message(placement, "left", LoadFiles([str(TARGET)]), 1, score_files=[str(SCORER)])
    runner, answer = ModelRunner.load(found, Backend.CPU, [], Reporter())  # type: ignore[arg-type]
    assert answer.score_problem == ""
    told, now = (msgspec.structs.replace(use, free_bytes=0) for use in (answer.score, runner.scorer.usage()))
    assert told == now  # what is free depends on other processes
