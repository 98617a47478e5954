"""KV Flash, policy ``qk``, on a GPU: swapped pages and their scores are those of the cpu, in every family."""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from lucevisor.model.values import Backend, Dtype
from tests.families.golden import FIXTURES, opened
from tests.families.paged_texts import Texts, tokens_at
from tests.families.pipeline import How, load_stages
from tests.families.test_page_ranking import POOL, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
ON_CPU = How(host_pages=40, rank_pages=True)
ON_GPU = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA, host_pages=40, rank_pages=True)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_and_scores_are_those_of_the_cpu(name: str) -> None:
    prepare(Backend.CUDA, 0)
    golden, found = opened(name), []
    for how in (ON_GPU, ON_CPU):
        texts = Texts(golden.spec, load_stages(golden.spec, golden.layer_splits()[:1], how), POOL)
        logits, out = run(golden, texts, rank=True)
        texts.run(a=tokens_at(900, 2, golden.spec.vocabulary))
        found.append((logits.cpu(), out, torch.tensor(texts.scores[ord("a")])))
    (on_gpu, gpu_out, gpu_scores), (on_cpu, cpu_out, cpu_scores) = found
    assert gpu_out == cpu_out
    assert float((on_gpu - on_cpu).abs().max()) <= 1e-4 * float(on_cpu.abs().max())
    torch.testing.assert_close(gpu_scores, cpu_scores, rtol=2e-2, atol=1e-4)
