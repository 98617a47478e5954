"""Logs of the sums of the weights of whole pages by sketches of their keys, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.ops.page_scores import Sketches, log_sums, sketches_of
from daemons.ops.paged import PagedTensor, Pages
from lucevisor.model.values import PAGE_TOKENS

CHUNK_PAGES = 512
"""Pages whose sketches are unpacked at a time."""


class TorchPageSums:
    """See :class:`daemons.ops.operations.PageSums`."""

    def of_keys(self, q: Tensor, keys: PagedTensor, pages: Tensor) -> Tensor:
        if not len(pages):
            return _none(q)
        read = keys.read(Pages(pages, len(pages), 0, PAGE_TOKENS), torch.float32)
        return log_sums(q, sketches_of(read, torch.float32))

    def of_sketches(self, q: Tensor, sketches: Sketches, rows: Tensor) -> Tensor:
        if not len(rows):
            return _none(q)
        parts = (rows[first : first + CHUNK_PAGES] for first in range(0, len(rows), CHUNK_PAGES))
        return torch.cat(
            [log_sums(q, Sketches(*(x.index_select(1, part) for x in sketches))) for part in parts], dim=-1
        )


def _none(q: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], 0, dtype=torch.float32)
