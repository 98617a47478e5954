"""Every family on a CUDA device: golden numbers in float32, quantised files as the cpu computes them, halves near.

Run on a machine with a GPU: `pytest -m gpu`.  Tolerances: docs/numerics.md.
"""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from lucevisor.model.values import Backend, Dtype
from tests.families.golden import FIXTURES, opened
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.rounding import Formats, bounds, middle_error
from tests.families.test_weight_formats import IDS, MIXES, MODELS, logits, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
__all__ = ["spec_of"]  # a fixture
EXACT = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA)


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(Backend.CUDA, 0)


@pytest.mark.parametrize("name", FIXTURES)
def test_float32_is_golden(name: str) -> None:
    """As near as two float32 runs in any order must be.  Products of three of TF32 are among them: 22 bits of a factor,
    which costs less than the order of 64 sums may.
    """
    golden = opened(name)
    for layer_split in ((), golden.layer_splits()):
        c = Pipeline(golden.spec, load_stages(golden.spec, layer_split, EXACT))
        c.open(0)
        found = c.run((0, golden.ids), want_hidden=True).cpu()
        golden.bounds.assert_layers([h.cpu() for h in c.hidden], golden.hidden)
        golden.assert_logits(found)
        c.close(0)
        c.open(1)
        golden.assert_logits(c.run_in_chunks(1, golden.ids, 13).cpu())
        c.open(2)
        golden.assert_tokens(c.greedy(2, golden.prompt, 32))


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_halves_are_as_near_as_on_the_cpu(name: str, dtype: Dtype) -> None:
    golden = opened(name)
    c = Pipeline(golden.spec, load_stages(golden.spec, (), How(dtype, dtype, Backend.CUDA)))
    c.open(0)
    found = c.run_in_chunks(0, golden.ids, 24).cpu()
    assert golden.bounds.logits.worst(found) > 1  # not float32 by mistake
    assert middle_error(found, golden.logits) <= golden.explained(Formats(dtype, dtype))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_files_give_the_cpus_numbers(name: str, mix: str, spec_of) -> None:
    spec = spec_of(name, mix)
    worst = bounds(spec, IDS).logits.worst(logits(spec, load_stages(spec, (), EXACT)).cpu())
    assert worst <= 1.0, f"{worst:.2f} times as far from the exact logits as rounding explains"
