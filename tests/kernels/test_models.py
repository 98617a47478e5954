"""Whole quantised models on kernels match plain torch within float32 rounding.

The interpreter runs the kernels; tests/gpu does the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend
from tests.families.pipeline import Pipeline
from tests.families.rounding import bounds
from tests.families.test_weight_formats import IDS, MODELS, spec_of, with_formats_of

__all__ = ["spec_of"]  # a fixture

SLICES = [IDS[:20], IDS[20:25], IDS[25:26], IDS[26:27]]
"""A prompt, a few tokens, single tokens."""


def logits(spec: ModelSpec) -> Tensor:
    c = Pipeline(spec, with_formats_of(spec, Backend.CUDA, kernels=True))
    c.open(0)
    return torch.cat([c.run((0, ids)) for ids in SLICES])


@pytest.mark.timeout(600)  # an interpreter runs the kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy says so, a GPU would not
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["k", "old"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_match_plain_torch(name, mix, spec_of):
    spec = spec_of(name, mix)
    worst = bounds(spec, IDS[:27]).logits.worst(logits(spec))
    print(f"{name} {mix}: {worst:.2f}")
    assert worst <= 1.0, f"{worst:.2f} times as far from the exact logits as rounding explains"
