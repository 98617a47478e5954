"""Copies of scattered pages between memories that a GPU can address, page-locked host memory too: one launch.

A copy by the driver takes a call for each run of consecutive pages in each layer, which costs more than the bytes of a
page.  The torch form is ``index_copy_`` of ``index_select``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Words of 8 bytes per program: 16 loads per thread in flight, as a link to the host is far."""
THREADS = 4
"""Warps of a program."""


@triton.jit(do_not_specialize=["n_pages", "target_units", "source_units"])
def copy_pages_kernel(
    target,  # [layers, target_units, WORDS]
    to,  # [n_pages], or None: 0, 1, ...
    source,  # [layers, source_units, WORDS]
    of,  # the same
    n_pages,
    target_units,
    source_units,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    layer, i = tl.program_id(0) // n_pages, tl.program_id(0) % n_pages
    a, b = i, i
    if to is not None:
        a = tl.load(to + i)
    if of is not None:
        b = tl.load(of + i)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + (layer.to(tl.int64) * source_units + b) * WORDS + word, mask=word < WORDS, other=0)
    tl.store(target + (layer.to(tl.int64) * target_units + a) * WORDS + word, words, mask=word < WORDS)


def copy_pages(target: Tensor, to: Tensor | None, source: Tensor, of: Tensor | None) -> None:
    """``target[:, to[i]] = source[:, of[i]]`` for contiguous [layers, units, ...]; ``to`` and ``of`` int64
    [n] on the GPU, None: 0, 1, ...  Target or source may be page-locked host memory.
    """
    index = to if to is not None else of
    assert index is not None
    words = source[0, 0].numel() * source.element_size() // 8
    into, out = (one.view(*one.shape[:2], -1).view(torch.int64) for one in (target, source))
    grid = (target.shape[0] * len(index), triton.cdiv(words, BLOCK))
    copy_pages_kernel[grid](
        into, to, out, of, len(index), target.shape[1], source.shape[1], WORDS=words, BLOCK=BLOCK,
        num_warps=THREADS,
    )  # fmt: skip
