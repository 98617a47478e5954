"""Causal attention of long slices by the library's flash kernels, beside plain steps in float32."""

from __future__ import annotations

import pytest
import torch

from daemons.ops.attention import Causal, attention, is_flash_device, reference, visible

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("slices", "n", "length", "heads", "kv_heads", "dim"),
    [(1, 40, 40, 24, 4, 256), (3, 33, 200, 16, 2, 256), (2, 64, 1000, 32, 8, 128), (1, 129, 4097, 8, 8, 64)],
)
@pytest.mark.parametrize("window", [0, 1, 37, 128])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_last_query_sees_the_last_keys(slices, n, length, heads, kv_heads, dim, dtype, window, has_sinks):
    generator = torch.Generator("cuda").manual_seed(n)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, k, v = (
        normal(slices, n, heads, dim),
        normal(slices, length, kv_heads, dim),
        normal(slices, length, kv_heads, dim),
    )
    assert is_flash_device(q.device)
    sinks = torch.randn(heads, generator=generator, device="cuda") * 3 if has_sinks else None
    found = attention(q, k, v, Causal(window), scale=dim**-0.5, sinks=sinks)
    positions = torch.arange(length, device="cuda")[None]
    mask = visible(positions[:, length - n :], positions, window)
    wanted = reference(q.float(), k.float(), v.float(), mask, scale=dim**-0.5, sinks=sinks)
    assert found.dtype == dtype
    assert float((found.float() - wanted).norm() / wanted.norm()) < 4e-3
