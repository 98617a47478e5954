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


def logits(spec: ModelSpec) -> Tensor:
    """A prompt, a verify slice of which two drafts are accepted, a few tokens, single tokens."""
    c = Pipeline(spec, with_formats_of(spec, Backend.CUDA, kernels=True))
    c.open(0)
    rows = [c.run((0, IDS[:20])), c.verify((0, [*IDS[20:23], 7, 7], 4))[:3]]
    c.accept(0, 4, 2)
    return torch.cat(rows + [c.run((0, ids)) for ids in (IDS[23:25], IDS[25:26], IDS[26:27])])


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
