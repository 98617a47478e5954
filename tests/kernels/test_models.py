"""Whole models on kernels give the numbers of the plain forms, quantised weights and all, in float32.

The interpreter runs what a GPU would; tests/gpu does the same on one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend
from tests.families.chain import Chain
from tests.families.test_forms import IDS, MODELS, relative, spec_of, with_forms_of

__all__ = ["spec_of"]  # a fixture


def slices() -> Iterator[list[int]]:
    """A run as long as those of a prompt, a few tokens, single ones."""
    yield IDS[:20]
    yield IDS[20:25]
    yield IDS[25:26]
    yield IDS[26:27]


def logits(spec: ModelSpec, kernels: bool) -> Tensor:
    c = Chain(spec, with_forms_of(spec, Backend.CUDA, kernels=kernels))
    c.open(0)
    return torch.cat([c.run((0, ids)) for ids in slices()])


@pytest.mark.timeout(600)  # an interpreter runs the kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy says so, a GPU would not
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["k", "old"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_give_the_numbers_of_the_plain_forms(name, mix, spec_of):
    spec = spec_of(name, mix)
    error = relative(logits(spec, kernels=True), logits(spec, kernels=False))
    print(f"{name} {mix}: {error:.1e}")
    assert error < (2e-3 if "inputs" in name else 1e-4)
