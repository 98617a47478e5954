"""Keys and values kept in fewer bits: what that does to logits and to memory.

The golden models have random weights, so nothing damps an error and a few of them amplify it: Gemma 4's and Laguna's
attention over random keys is nearly one-hot, where a rounding picks another position.  So the limits are what the same
model loses when its keys and values are perturbed by as much as storing them rounds (docs/numerics.md).  That is more
than the lead of most greedy tokens, so tokens are not compared here.
"""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.ops.paged import Pages, Q8Pages
from lucevisor.model.values import Q8_GROUP, Dtype, Space, q8_groups
from tests.combinations import combinations
from tests.families.golden import opened
from tests.families.pipeline import How, load_stages, pools_of
from tests.families.rounding import Formats, middle_error
from tests.numerics import UNIT, q8_error

NAMES = ("qwen3", "qwen35", "qwen35moe", "laguna", "gemma4_e2b", "gemma4_moe")
BITS = {Dtype.FLOAT16: 16, Dtype.BFLOAT16: 16, Dtype.Q8_0: 8.5}


@combinations(kv_dtype=BITS, name=NAMES)
def test_accuracy_and_memory_of_smaller_keys_and_values(name, kv_dtype):
    golden, formats = opened(name), Formats(kv=kv_dtype)
    stages = load_stages(golden.spec, how=How(kv_dtype=kv_dtype))
    pipeline = golden.pipeline(stages)
    pipeline.open(0)
    found, exact = pipeline.run_in_chunks(0, golden.ids, 24), golden.bounds.logits
    assert exact.worst(found) > 1.0  # not float32 by mistake
    assert middle_error(found, exact.exact) <= golden.explained(formats)
    assert paged_bytes(golden, kv_dtype) * 32 == pytest.approx(paged_bytes(golden, Dtype.FLOAT32) * BITS[kv_dtype])
    taken = sum(use.state_bytes for stage in stages for use in stage.usage())
    assert taken == paged_bytes(golden, kv_dtype) + recurrent_bytes(golden)


def paged_bytes(golden, kv_dtype: Dtype) -> int:
    pools, layers = pools_of(golden.spec), golden.spec.layers
    units = {Space.FULL: pools.full_pages, Space.WINDOW: pools.window_pages, Space.RECURRENT: 0}
    return sum(units[layer.space] * layer.unit_bytes(kv_dtype) for layer in layers)


def recurrent_bytes(golden) -> int:
    pools = pools_of(golden.spec)
    recurrent = [x for x in golden.spec.layers if x.space is Space.RECURRENT]
    whole = pools.states * sum(x.device_unit_bytes(Dtype.FLOAT32) for x in recurrent)
    return whole + pools.draft_states * sum(x.draft_state_bytes(Dtype.FLOAT32) for x in recurrent)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 130),
    heads=st.integers(1, 3),
    exponents=st.lists(st.integers(-8, 12), min_size=5, max_size=5),
    seed=st.integers(0, 1 << 32),
)
def test_what_is_written_comes_back_as_near_as_q8_0_of_ggml(width, heads, exponents, seed):
    """Every number within half a step, and as near as gguf's own q8_0 brings it: the scale is the same, and of its
    multiples the nearest is kept, but for the roundings of float32."""
    groups = q8_groups(width)
    pages = Q8Pages(
        torch.zeros(4, 64, heads, groups * Q8_GROUP, dtype=torch.int8),
        torch.zeros(4, 64, heads, groups, dtype=torch.float16),
        width,
    )
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, heads, width, generator=random) * 2.0 ** torch.tensor(exponents).view(5, 1, 1)
    slots = torch.tensor([3 * 64, 3 * 64 + 1, 3 * 64 + 63, 64 + 5, 64 + 4])
    pages.write(slots, rows)
    found = pages.read(Pages(torch.tensor([0, 1, 2, 3]), 1, 0, 256), torch.float32)[0, slots]
    assert found.shape == rows.shape
    errors = (found.double() - rows.double()).abs()
    assert bool((errors <= q8_error(rows)).all())
    padded = torch.nn.functional.pad(rows, (0, -width % Q8_GROUP))
    flat = padded.reshape(-1, Q8_GROUP).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind)).view_as(padded)
    theirs = (theirs[..., :width].double() - rows.double()).abs()
    step = rows.abs().amax(dim=-1, keepdim=True).double() / 127  # no group's is larger
    assert bool((errors <= theirs + 4 * 127 * UNIT * step).all())


def test_unwritten_and_zero_positions_are_zero():
    pages = Q8Pages(torch.zeros(1, 64, 1, 32, dtype=torch.int8), torch.zeros(1, 64, 1, 1, dtype=torch.float16), 32)
    pages.write(torch.tensor([7]), torch.zeros(1, 1, 32))
    assert bool((pages.read(Pages(None, 1, 0, 64), torch.float32) == 0).all())
