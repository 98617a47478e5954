"""The derived tolerances themselves: exact runs are exact, and wrong formulas, however small, lie outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.families.golden import opened
from tests.families.rounding import assert_same_tokens
from tests.numerics import Exact, bound


def test_what_runs_within_exact_is_float64():
    small = torch.tensor(2.0**-40)
    assert float(1.0 + small) == 1.0
    with Exact():
        assert float(1.0 + small) == 1.0 + 2.0**-40
        assert small.double().to(torch.float32).dtype == torch.zeros(1, dtype=torch.float32).dtype == torch.float64
    with Exact(), pytest.raises(TypeError, match="float32 memory"):
        small.add_(1.0)


def test_a_sum_is_allowed_what_its_worst_order_loses():
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.zeros(64, 1)
    for column in x.split(1, dim=1):
        one_by_one += column
    worst = bound(lambda x: x @ torch.ones(4096, 1), x).worst(one_by_one)
    assert 0.03 < worst <= 1  # the model is neither blind nor lavish


@pytest.mark.parametrize("name", ["gemma4_e2b", "gemma4_moe"])
def test_the_smallest_wrong_formula_is_outside(name, monkeypatch):
    """GELU's erf form for its tanh form: of wrong formulas visible in float32, the smallest."""
    golden = opened(name)
    allowed = golden.bounds.logits
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: gelu(x))
    c = golden.pipeline()
    c.open(0)
    assert allowed.worst(c.run((0, golden.ids)), golden.logits) > 5


def test_another_token_is_told_from_a_tie():
    golden = opened("qwen3")
    assert_same_tokens(golden.spec, golden.prompt, golden.greedy, golden.greedy)
    other = [*golden.greedy[:5], golden.greedy[5] + 1, *golden.greedy[6:]]
    with pytest.raises(AssertionError, match="token 5 is"):
        assert_same_tokens(golden.spec, golden.prompt, other, golden.greedy)
