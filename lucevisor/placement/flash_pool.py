"""The automatic pool of KV Flash: as large as gives every sequence one, within a limit.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lucevisor.model.pages import MIN_POOL_PAGES, max_resident_chunk, pages_of
from lucevisor.model.values import LayerRange
from lucevisor.placement.sizer import SizingInputs, most
from lucevisor.placement.sizing import compute_sizes

MAX_AUTO_PAGES: Final = 256
"""16,384 tokens: a larger pool slows every decode, and is asked for by its number."""


def choose_pool(inputs: SizingInputs, ranges: Sequence[LayerRange], chunk: int) -> SizingInputs:
    """Return the inputs with the largest pool of which the devices hold one for each sequence; with the least where
    they hold none.  ``chunk``: the prefill chunk that a pool may cut.
    """

    def with_pool(n_more: int) -> SizingInputs:
        n_pages = MIN_POOL_PAGES + n_more
        return replace(inputs, pool_pages=n_pages, prefill_chunk=min(chunk, max_resident_chunk(n_pages)))

    def fits(n_more: int) -> bool:
        tried = with_pool(n_more)
        sizing = compute_sizes(tried, ranges)
        resident = min(MIN_POOL_PAGES + n_more, pages_of(sizing.max_context))
        return sizing.fits and sizing.pools.full_pages >= inputs.max_sequences * resident

    return with_pool(max(0, most(MAX_AUTO_PAGES - MIN_POOL_PAGES, fits)))
