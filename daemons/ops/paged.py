"""Paged keys and values of one attention layer, 64 positions per page, plain or q8_0: written by slot, read by page.

Views of a pool's memory, without sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.host_pages import HostLayer
from daemons.ops.page_scores import KeySketches
from lucevisor.model.values import Q8_GROUP


@dataclass(slots=True)
class Pages:
    """Which pages a group of slices reads: B slices of P pages each.

    ``index`` [B P] page ids; of the P * 64 positions of a slice, ``length`` ones from ``skip`` on count.  None: B is 1
    and the ids follow each other, so reading is a view of the pool's slots ``skip`` .. ``skip + length`` (cpu only).
    ``by_slot``: ``index`` [B length] has slots ``page * 64 + offset`` instead.
    """

    index: Tensor | None
    n_slices: int
    skip: int
    length: int
    by_slot: bool = False


class DensePages:
    """Keys or values of one layer, ``[pages, 64, K, D]``."""

    __slots__ = ("host", "pages", "sketches", "slots")

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages
        self.host: HostLayer | None = None  # of KV Flash
        self.sketches: KeySketches | None = None  # of keys in host memory, where pages are ranked
        self.slots = pages.view(-1, *pages.shape[2:])

    def over(self, parts: Sequence[Tensor]) -> DensePages:
        """The same over other memory."""
        [pages] = parts
        return DensePages(pages)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` [T, K, D] at slots ``page * 64 + offset`` [T]; on a cpu, without pad rows: slot -1, at the
        end.
        """
        if slots.device.type == "cpu" and slots[-1] < 0:
            slots = slots[slots >= 0]
            rows = rows[: len(slots)]
        self.slots.index_copy_(0, slots, rows.to(self.slots.dtype))

    def read(self, pages: Pages, dtype: torch.dtype) -> Tensor:
        """Gather [B, length, K, D] as ``dtype``."""
        return _gather(self.pages, pages).to(dtype)


class Q8Pages:
    """Keys or values of one layer as q8_0: codes int8 ``[pages, 64, K, D]`` and a float16 scale for 32 numbers."""

    __slots__ = ("codes", "host", "scales", "sketches", "width")

    def __init__(self, codes: Tensor, scales: Tensor, width: int) -> None:
        self.codes, self.scales, self.width = codes, scales, width
        self.host: HostLayer | None = None  # of KV Flash
        self.sketches: KeySketches | None = None  # of keys in host memory, where pages are ranked

    def over(self, parts: Sequence[Tensor]) -> Q8Pages:
        """The same over other memory."""
        codes, scales = parts
        return Q8Pages(codes, scales, self.width)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        x = F.pad(rows.float(), (0, -self.width % Q8_GROUP))
        x = x.view(*x.shape[:-1], -1, Q8_GROUP)
        scale = (x.abs().amax(dim=-1) / 127).to(torch.float16)
        inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
        codes = (x * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
        self.codes.view(-1, *self.codes.shape[2:]).index_copy_(0, slots, codes.flatten(-2))
        self.scales.view(-1, *self.scales.shape[2:]).index_copy_(0, slots, scale)

    def read(self, pages: Pages, dtype: torch.dtype) -> Tensor:
        codes, scales = _gather(self.codes, pages).to(torch.float32), _gather(self.scales, pages).to(torch.float32)
        x = codes.reshape(*scales.shape, Q8_GROUP) * scales.unsqueeze(-1)
        return x.flatten(-2).narrow(-1, 0, self.width).to(dtype)


PagedTensor = DensePages | Q8Pages


def _gather(pool: Tensor, pages: Pages) -> Tensor:
    if pages.index is None:
        return pool.view(-1, *pool.shape[2:]).narrow(0, pages.skip, pages.length).unsqueeze(0)
    source = pool.view(-1, *pool.shape[2:]) if pages.by_slot else pool
    found = source.index_select(0, pages.index).view(pages.n_slices, -1, *pool.shape[2:])
    return found if pages.skip == 0 and pages.length == found.shape[1] else found.narrow(1, pages.skip, pages.length)
