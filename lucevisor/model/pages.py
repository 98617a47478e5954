"""Pages of attention state, for both sides: how many a text takes, and which a sliding window covers."""

from __future__ import annotations

from typing import Final, Literal

from lucevisor.model.values import PAGE_TOKENS

ResidencyPolicy = Literal["lru", "qk", "drafter", "exact"]
"""KV Flash: which pages of a sequence stay on the devices."""
HEAD_PAGES: Final = 1
"""KV Flash: first pages of a sequence that always stay; models put much of their attention there."""
TAIL_PAGES: Final = 4
"""KV Flash: pages before a slice that always stay."""
MIN_POOL_PAGES: Final = 8
"""KV Flash: the least pool that can be configured."""


def pages_of(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def first_visible(position: int, window_tokens: int) -> int:
    """Return the oldest position that ``position`` attends to in a window, its own included."""
    return max(0, position - window_tokens + 1)


def first_visible_page(position: int, window_tokens: int) -> int:
    return first_visible(position, window_tokens) // PAGE_TOKENS


def max_window_pages(window_tokens: int, slice_tokens: int, max_context: int) -> int:
    """Return the most window pages one sequence ever holds when no slice is longer than ``slice_tokens``.

    A slice ``[a, b)`` needs positions ``a - w + 1 .. b - 1``, which touch one page more than they fill.
    """
    return min(pages_of(max_context), pages_of(window_tokens - 1 + slice_tokens) + 1)


def max_slot_window_pages(window_tokens: int) -> int:
    """Return the most window pages of a prefix slot: w - 1 positions that may start inside a page."""
    return pages_of(window_tokens - 1) + 1


def pool_pages(n_tokens: int) -> int:
    return max(MIN_POOL_PAGES, pages_of(n_tokens))


def max_resident_chunk(n_pool_pages: int) -> int:
    """Return the tokens of the longest slice with KV Flash: half of the pool, without the protected pages."""
    return min(n_pool_pages // 2, n_pool_pages - HEAD_PAGES - TAIL_PAGES) * PAGE_TOKENS


def max_host_pages(n_pages: int, n_pool_pages: int, policy: ResidencyPolicy) -> int:
    """Return how many of ``n_pages`` of a sequence lie in host memory at most; what is swapped lies there twice for a
    moment."""
    if policy == "lru" or n_pages <= n_pool_pages:
        return 0
    return n_pages - n_pool_pages if policy == "exact" else n_pages
