"""KV Flash on a GPU: captured steps read resident pages, in every family."""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from lucevisor.kv.residency import Residency
from lucevisor.model.values import Backend, Dtype
from tests.families.golden import FIXTURES, opened
from tests.families.paged_texts import run
from tests.families.pipeline import How, load_stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
CHUNKS = [256, 256, 62, *[1] * 70, 100, *[3] * 30]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_those_of_the_host(name: str) -> None:
    prepare(Backend.CUDA, 0)
    golden = opened(name)
    stages = load_stages(golden.spec, golden.layer_splits()[:1], How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA))
    found = run(golden.spec, stages, CHUNKS, Residency(9)).cpu()
    wanted = run(golden.spec, golden.whole, CHUNKS, Residency(9))
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
