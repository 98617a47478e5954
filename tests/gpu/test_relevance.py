"""The scoring stage on a GPU: the scores of the cpu, for messages of any length."""

from __future__ import annotations

import pytest
import torch

from lucevisor.model.values import Backend
from tests.daemons.test_relevance_stage import GOLDEN, SCORER, load, score, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4_e2b", "laguna", "demo"])
def test_scores_are_those_of_the_cpu(name: str) -> None:
    path = SCORER if name == "demo" else GOLDEN / name / "model.gguf"
    on_cpu, on_gpu = load(path), load(path, backend=Backend.CUDA)
    ids = tokens(300, on_cpu.spec.vocabulary)
    wanted = score(on_cpu, ids, 8)
    for cuts in ([], [170], [64, 128, 291]):
        torch.testing.assert_close(score(on_gpu, ids, 8, cuts), wanted, rtol=5e-3, atol=1e-5)
