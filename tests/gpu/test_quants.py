"""Quant blocks expanded on a GPU are the same bits as on the cpu, which are those of gguf (tests/daemons).

Run on a machine with a GPU: `pytest -m gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest

from lucevisor.model.quant_types import BY_NAME, NATIVE
from tests.daemons.tiny_models import random_blocks

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize("kind", sorted(NATIVE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_expanded_numbers_are_those_of_the_cpu(kind, dtype):
    from daemons.weights.dequant import dequantise

    raw = torch.from_numpy(random_blocks(np.random.default_rng(7), kind, 96, 2048))
    found = dequantise(BY_NAME[kind], raw.cuda(), dtype)
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), dequantise(BY_NAME[kind], raw, dtype))


@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_any_bytes_too(kind):
    from daemons.weights.dequant import dequantise

    raw = np.random.default_rng(8).integers(0, 256, (64, 8 * BY_NAME[kind].block_bytes), dtype=np.uint8)
    here = dequantise(BY_NAME[kind], torch.from_numpy(raw), torch.float32)
    there = dequantise(BY_NAME[kind], torch.from_numpy(raw).cuda(), torch.float32).cpu()
    np.testing.assert_array_equal(there.numpy(), here.numpy())  # NaN equals NaN here


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_expanding_does_not_wait_for_the_device(kind):
    """The first call may copy a table; afterwards nothing synchronises."""
    from daemons.weights.dequant import dequantise

    raw = torch.from_numpy(random_blocks(np.random.default_rng(9), kind, 64, 512)).cuda()
    dequantise(BY_NAME[kind], raw, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dequantise(BY_NAME[kind], raw, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
