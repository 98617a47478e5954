"""Embedders on a CUDA device: golden files in float32 and near in halves, over any split, after a warm-up."""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from daemons.warmup import warm_up
from lucevisor.model.values import Backend, Dtype
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.test_encoders import EMBEDDERS, golden_texts
from tests.families.test_pooling import distance, pooled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
BOUNDS = {Dtype.FLOAT32: 1e-6, Dtype.BFLOAT16: 1e-3, Dtype.FLOAT16: 1e-4}


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(Backend.CUDA, 0)


@pytest.mark.parametrize("name", EMBEDDERS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_golden_files(name: str, dtype: Dtype) -> None:
    spec, texts, expected = golden_texts(name)
    for split in ([], [1], [1, spec.n_layers - 1]):
        stages = load_stages(spec, split, How(dtype, dtype, Backend.CUDA))
        for stage in stages:
            warm_up(stage)
        found = pooled(Pipeline(spec, stages), *texts).cpu()
        assert distance(found, expected) < BOUNDS[dtype]
