"""Masks on a device: the same rows as on the cpu."""

from __future__ import annotations

import pytest
import torch

from daemons.sampling import apply_masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]])
def test_a_device_masks_as_the_cpu_does(rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    masks = torch.randint(0, 256, (len(rows), 31_040), dtype=torch.uint8, generator=generator)
    x = torch.randn(4, 248_400, generator=generator)
    on_device = x.cuda()
    apply_masks(x, masks, rows)
    apply_masks(on_device, masks, rows)
    assert torch.equal(on_device.cpu(), x)
