"""Sums of the weights of pages, by sketches that were kept and by sketches made on the way, beside plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.ops.page_scores import KeySketches
from daemons.ops.page_sums import TorchPageSums
from daemons.ops.paged import DensePages, PagedTensor, Q8Pages
from daemons.ops.triton.page_sums import PAGES, TritonPageSums
from lucevisor.model.values import PAGE_TOKENS, Q8_GROUP
from tests.kernels.matrices import DEVICE, normal

N_PAGES, N_HOST, HEADS = 7, 2 * PAGES + 5, 2
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3} | ({torch.bfloat16: 1e-2} if DEVICE == "cuda" else {})
"""Relative: torch rounds products to the dtype, the kernel does not.  The interpreter cannot multiply bfloat16."""


def pool(width: int, form: str) -> PagedTensor:
    """Pages whose keys differ from a common vector, as real ones do."""
    keys = normal(N_PAGES * PAGE_TOKENS, HEADS * width).view(-1, HEADS, width) + 2 * normal(HEADS, width, seed=1)
    slots = torch.arange(N_PAGES * PAGE_TOKENS, device=DEVICE)
    if form == "q8_0":
        groups = -(-width // Q8_GROUP)
        codes = torch.zeros(N_PAGES, PAGE_TOKENS, HEADS, groups * Q8_GROUP, dtype=torch.int8, device=DEVICE)
        made: PagedTensor = Q8Pages(
            codes, torch.zeros(*codes.shape[:3], groups, dtype=torch.float16, device=DEVICE), width
        )
    else:
        dtype = getattr(torch, form)
        made = DensePages(torch.zeros(N_PAGES, PAGE_TOKENS, HEADS, width, dtype=dtype, device=DEVICE))
    made.write(slots, keys)
    return made


@pytest.mark.parametrize("form", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("width", "n_rows"), [(64, 3), (60, 16), (128, 17), (256, 40)])
def test_sums_are_those_of_torch(width: int, n_rows: int, dtype: torch.dtype, form: str) -> None:
    """Queries of less than a block, a whole one and several; head dims with and without a power of two."""
    keys, q = pool(width, form), (normal(HEADS * n_rows, width, seed=2) / 4).to(dtype).view(HEADS, n_rows, width)
    pages = torch.tensor([5, 0, 6, 2], device=DEVICE)
    assert_close(TritonPageSums().of_keys(q, keys, pages), TorchPageSums().of_keys(q, keys, pages), dtype)
    sketches = KeySketches(N_HOST, HEADS, width, torch.device(DEVICE))
    kept = normal(N_HOST * PAGE_TOKENS * HEADS, width, seed=3).view(N_HOST, PAGE_TOKENS, HEADS, width)
    sketches.keep(kept, torch.randperm(N_HOST, generator=torch.Generator().manual_seed(4)).to(DEVICE))
    for n in (1, PAGES, PAGES + 1, N_HOST):
        rows = torch.arange(N_HOST - 1, -1, -1, device=DEVICE)[:n]
        found = TritonPageSums().of_sketches(q, sketches.kept, rows)
        assert_close(found, TorchPageSums().of_sketches(q, sketches.kept, rows), dtype)


def test_no_pages_have_no_sums() -> None:
    q, none = torch.zeros(HEADS, 3, 64, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sketches = KeySketches(1, HEADS, 64, torch.device(DEVICE)).kept
    for sums in (TritonPageSums(), TorchPageSums()):
        assert sums.of_keys(q, pool(64, "float32"), none).shape == (HEADS, 3, 0)
        assert sums.of_sketches(q, sketches, none).shape == (HEADS, 3, 0)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= TOLERANCES[dtype] * float(wanted.abs().max())
