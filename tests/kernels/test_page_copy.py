"""Copies of scattered pages, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.ops.triton.page_copy import copy_pages


@pytest.mark.parametrize("shape", [(64, 2, 4), (64, 3, 40), (64, 1, 36)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pages_arrive_where_they_belong(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randint(-100, 100, (3, 9, *shape), device=device).to(dtype)
    target = torch.zeros(3, 12, *shape, dtype=dtype, device=device)
    to, of = torch.tensor([11, 0, 7, 3], device=device), torch.tensor([2, 8, 0, 5], device=device)
    copy_pages(target, to, source, of)
    wanted = torch.zeros_like(target).index_copy_(1, to, source.index_select(1, of))
    assert torch.equal(target, wanted)
    copy_pages(target, to, source[:, :4].contiguous(), None)
    assert torch.equal(target, wanted.index_copy_(1, to, source[:, :4]))
