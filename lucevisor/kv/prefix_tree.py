"""The tree of known tokens: blocks of one page each, the pages that hold them, and the prefix slots that end there.

A child is found by its parent and its 64 tokens: a hash chain in which tokens are compared, never hashes alone.  A slot
is a path from the root and a remainder of less than a page.  Pages of a block are held once, however many slots lead
through it.  Knows nothing of requests, use or eviction.
Invariant: every block has a slot that leads through it, and holds the page of each space that one of them needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lucevisor.kv.page_pool import PageError, PagePools
from lucevisor.kv.page_table import PAGED, first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space

NO_STATE: Final = -1
"""State id where the model has no recurrent layers."""

Origin = Literal["turn", "pages", "prompt", "generation", "shared", "disk"]
"""Why a slot was made: a chat turn ends there, a multiple of pages, the prompt ends, the answer ends, two prompts part
behind it, or it was restored."""

PageLookup = Callable[[Space, int], int | None]
"""The page of entry i in a space, as a page table knows it; None when it holds none."""


@dataclass(frozen=True, slots=True)
class SlotSource:
    """Where a new slot comes from: ``n_tokens`` long, its pages and the recurrent states at its end (or NO_STATE)."""

    n_tokens: int
    entries: PageLookup
    state: int
    origin: Origin


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """``depth`` blocks end with this one, which holds positions [64 (depth - 1), 64 depth).  The root has depth 0."""

    tokens: tuple[int, ...]
    parent: Block | None
    depth: int
    pages: dict[Space, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    slots: dict[tuple[int, ...], PrefixSlot] = field(
        default_factory=dict
    )  # by remainder: those that end at or behind it
    n_slots: int = 0  # that lead through it
    n_windows: int = 0  # of them, those that need its window page


@dataclass(slots=True, eq=False, repr=False)
class PrefixSlot:
    """A remembered prefix: the blocks up to ``block``, then ``remainder`` in the pages ``tail``.

    ``first_window``: entry of the oldest window page that position ``n_tokens`` sees.  ``state``: the recurrent states
    at ``n_tokens``.  ``parent``: the longest other slot that this one begins with.
    """

    number: int
    block: Block
    remainder: tuple[int, ...]
    origin: Origin
    first_window: int
    state: int
    tail: dict[Space, int] = field(default_factory=dict)
    parent: PrefixSlot | None = None
    alive: bool = True
    pins: int = 0
    evict_on_unpin: bool = False  # given up as soon as the last pin goes
    last_use: int = 0  # in ticks of the index
    used_at: float = 0.0  # seconds
    n_uses: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens remembered."""
        return self.block.depth * PAGE_TOKENS + len(self.remainder)

    @property
    def tokens(self) -> list[int]:
        """The tokens, from the start of the text."""
        return [token for block in path_to(self.block) for token in block.tokens] + list(self.remainder)

    def pages(self, space: Space) -> list[int]:
        """Pages of a space, oldest first: all of ``full``, of ``window`` those from entry ``first_window`` on."""
        first = self.first_window if space is Space.WINDOW else 0
        pages = [block.pages[space] for block in path_to(self.block, first) if space in block.pages]
        return pages + ([self.tail[space]] if space in self.tail else [])

    def begins_with(self, other: PrefixSlot) -> bool:
        """Say whether ``other`` is a proper prefix of this one."""
        if other.n_tokens >= self.n_tokens:
            return False
        block, rest = self.block, self.remainder
        while block.depth > other.block.depth and block.parent is not None:
            block, rest = block.parent, block.tokens
        return block is other.block and rest[: len(other.remainder)] == other.remainder


def path_to(block: Block, first: int = 0) -> list[Block]:
    """Return the blocks from number ``first`` (counted from 0, the root left out) to ``block``."""
    path = []
    at: Block | None = block
    while at is not None and at.depth > first:
        path.append(at)
        at = at.parent
    return path[::-1]


class BlockTree:
    """Blocks and slots over the pools of a model."""

    def __init__(self, pools: PagePools, window_tokens: int | None) -> None:
        self._pools = pools
        self._window_tokens = window_tokens
        self._spaces = tuple(space for space in PAGED if space in pools)
        self._holds: dict[Space, Counter[int]] = {space: Counter() for space in pools.spaces}
        self.root = Block((), None, 0)

    def walk(self, tokens: Sequence[int], n_tokens: int) -> list[Block]:
        """Return the known blocks that the first ``n_tokens`` tokens begin with, the root first."""
        block, path = self.root, [self.root]
        for start in range(0, n_tokens - PAGE_TOKENS + 1, PAGE_TOKENS):
            child = block.children.get(tuple(tokens[start : start + PAGE_TOKENS]))
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def slots_after(self, block: Block, tokens: Sequence[int], n_tokens: int) -> Iterator[PrefixSlot]:
        """Yield slots that end at ``block`` or inside the page after it and begin the first ``n_tokens``, longest
        first."""
        start = block.depth * PAGE_TOKENS
        rest = tuple(tokens[start : min(n_tokens, start + PAGE_TOKENS - 1)])
        if len(block.slots) < len(rest):
            fits = [slot for known, slot in block.slots.items() if rest[: len(known)] == known]
            yield from sorted(fits, key=lambda slot: -len(slot.remainder))
            return
        for n in range(len(rest), -1, -1):
            if (slot := block.slots.get(rest[:n])) is not None:
                yield slot

    def find(self, tokens: Sequence[int], n_tokens: int) -> PrefixSlot | None:
        """Return the slot of exactly the first ``n_tokens`` tokens."""
        block = self.walk(tokens, n_tokens)[-1]
        start = block.depth * PAGE_TOKENS
        return block.slots.get(tuple(tokens[start:n_tokens])) if n_tokens - start < PAGE_TOKENS else None

    def first_window(self, n_tokens: int) -> int:
        """Return the entry of the oldest window page that position ``n_tokens`` sees; 0 without sliding layers."""
        return 0 if self._window_tokens is None else first_visible_page(n_tokens, self._window_tokens)

    def n_whole_windows(self, path: Sequence[Block]) -> int:
        """Return how many blocks of a path, the root included, lead to the last place whose window is held whole."""
        n = len(path)
        if self._window_tokens is None:
            return n
        run = [0] * n  # blocks with a window page that end here
        for i in range(1, n):
            run[i] = run[i - 1] + 1 if Space.WINDOW in path[i].pages else 0
        return max(i + 1 for i in range(n) if run[i] >= i - self.first_window(i * PAGE_TOKENS))

    def add(self, tokens: Sequence[int], source: SlotSource, number: int) -> PrefixSlot | None:
        """Put a slot in and hold what it needs: pages of known blocks as they are, the others from ``source``.

        None, and nothing done, when a page is in neither, as it is when the window has slid on.
        """
        path = self.walk(tokens, source.n_tokens)
        n_blocks, first_window = source.n_tokens // PAGE_TOKENS, self.first_window(source.n_tokens)
        if not self._complete(path, source, first_window):
            return None
        while len(path) <= n_blocks:
            path.append(self._grow(path[-1], tokens, source.entries))
        for block in path:
            block.n_slots += 1
        if Space.WINDOW in self._pools:
            for block in path[first_window + 1 :]:
                if Space.WINDOW not in block.pages:
                    block.pages[Space.WINDOW] = self._hold(Space.WINDOW, source.entries(Space.WINDOW, block.depth - 1))
                block.n_windows += 1
        remainder = tuple(tokens[n_blocks * PAGE_TOKENS : source.n_tokens])
        slot = PrefixSlot(number, path[-1], remainder, source.origin, first_window, source.state)
        if remainder:
            slot.tail = {space: self._hold(space, source.entries(space, n_blocks)) for space in self._spaces}
        if slot.state != NO_STATE:
            self._hold(Space.RECURRENT, slot.state)
        path[-1].slots[remainder] = slot
        return slot

    def remove(self, slot: PrefixSlot) -> None:
        """Take a slot out and let go of what no other slot needs."""
        slot.alive = False
        del slot.block.slots[slot.remainder]
        for space, page in slot.tail.items():
            self._let_go(space, page)
        if slot.state != NO_STATE:
            self._let_go(Space.RECURRENT, slot.state)
        at: Block | None = slot.block
        while at is not None:
            at.n_slots -= 1
            if Space.WINDOW in at.pages and at.depth > slot.first_window:
                at.n_windows -= 1
                if at.n_windows == 0:
                    self._let_go(Space.WINDOW, at.pages.pop(Space.WINDOW))
            if at.n_slots == 0 and at.parent is not None:
                del at.parent.children[at.tokens]
                for space, page in at.pages.items():
                    self._let_go(space, page)
            at = at.parent

    def frees(self, slot: PrefixSlot, spaces: Collection[Space]) -> bool:
        """Say whether removing a slot makes an id of one of ``spaces`` free at once."""
        if slot.state != NO_STATE and Space.RECURRENT in spaces and self._pools[Space.RECURRENT].evictable(slot.state):
            return True
        if any(space in spaces and self._lone(space, page) for space, page in slot.tail.items()):
            return True
        at: Block | None = slot.block
        while at is not None and at.depth and (at.n_slots == 1 or at.n_windows == 1):
            for space, page in at.pages.items():
                n_needing = at.n_windows if space is Space.WINDOW else at.n_slots
                seen = space is not Space.WINDOW or at.depth > slot.first_window
                if space in spaces and n_needing == 1 and seen and self._lone(space, page):
                    return True
            at = at.parent
        return False

    def _complete(self, path: Sequence[Block], source: SlotSource, first_window: int) -> bool:
        """Say whether every page that a slot needs is known or in ``source``."""
        n_pages = pages_of(source.n_tokens)
        for space in self._spaces:
            for i in range(first_window if space is Space.WINDOW else len(path) - 1, n_pages):
                known = i + 1 < len(path) and space in path[i + 1].pages
                if not known and source.entries(space, i) is None:
                    return False
        return True

    def _grow(self, parent: Block, tokens: Sequence[int], entries: PageLookup) -> Block:
        start = parent.depth * PAGE_TOKENS
        block = Block(tuple(tokens[start : start + PAGE_TOKENS]), parent, parent.depth + 1)
        if Space.FULL in self._pools:
            block.pages[Space.FULL] = self._hold(Space.FULL, entries(Space.FULL, parent.depth))
        parent.children[block.tokens] = block
        return block

    def _hold(self, space: Space, page: int | None) -> int:
        if page is None:
            raise PageError(f"space {space}: a prefix slot needs a page that its sequence does not hold")
        self._holds[space][page] += 1
        if self._holds[space][page] == 1:
            self._pools[space].cache(page)
        return page

    def _let_go(self, space: Space, page: int) -> None:
        self._holds[space][page] -= 1
        if self._holds[space][page] == 0:
            del self._holds[space][page]
            self._pools[space].uncache(page)

    def _lone(self, space: Space, page: int) -> bool:
        return self._holds[space][page] == 1 and self._pools[space].evictable(page)
