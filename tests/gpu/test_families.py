"""Every family on a CUDA device: golden numbers in float32, quantised files as the cpu computes them, halves near.

Run on a machine with a GPU: `pytest -m gpu`.  Tolerances are stated beside each comparison.
"""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from lucevisor.wire.values import Backend, Dtype
from tests.families.chain import Chain, How, load_stages
from tests.families.test_forms import MIXES, MODELS, logits, relative, spec_of
from tests.families.test_golden import FIXTURES, HALF, opened

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
    """Logits within 5e-4, hidden states within 2e-3 (the residual stream of gemma4_e2b reaches 17), tokens
    identical.
    """
    golden = opened(name)
    for cuts in ((), golden.cuts()):
        c = Chain(golden.spec, load_stages(golden.spec, cuts, EXACT))
        c.open(0)
        found = c.run((0, golden.ids), want_hidden=True).cpu()
        hidden = max(float((a.cpu() - b).abs().max()) for a, b in zip(c.hidden, golden.hidden, strict=True))
        error = float((found - golden.logits).abs().max())
        print(f"{name} cuts {list(cuts)}: logits {error:.1e}, hidden {hidden:.1e}")
        assert error < 5e-4
        assert hidden < 2e-3
        c.close(0)
        c.open(1)
        assert float((c.run_in_chunks(1, golden.ids, 13).cpu() - golden.logits).abs().max()) < 5e-4
        c.open(2)
        assert c.greedy(2, golden.prompt, 32) == golden.greedy


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_halves_are_as_near_as_on_the_cpu(name: str, dtype: Dtype) -> None:
    golden = opened(name)
    c = Chain(golden.spec, load_stages(golden.spec, (), How(dtype, dtype, Backend.CUDA)))
    c.open(0)
    found = c.run_in_chunks(0, golden.ids, 24).cpu()
    # the middle one of all tokens: a token whose last choice of expert hangs on the rounding may change as a whole
    error = float(((found - golden.logits).norm(dim=1) / golden.logits.norm(dim=1)).median())
    print(f"{name} {dtype}: {error:.1e}")
    assert 1e-4 < error < 1.4 * HALF[name][dtype is Dtype.FLOAT16]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_files_give_the_cpus_numbers(name: str, mix: str, spec_of) -> None:
    """Relative error of all logits in float32: 2e-3 with per-layer inputs, whose gates magnify rounding, else 1e-4."""
    spec = spec_of(name, mix)
    wanted = logits(spec, load_stages(spec))
    error = relative(logits(spec, load_stages(spec, (), EXACT)).cpu(), wanted)
    print(f"{name} {mix}: {error:.1e}")
    assert error < (2e-3 if "inputs" in name else 1e-4)
