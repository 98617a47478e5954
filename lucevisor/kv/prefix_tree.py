"""A radix tree of cached tokens: runs of pages, the page ids that hold them, and the prefix slots that end there.

Nodes are compared by packed tokens, not by hashes.  A slot is a path from the root and a remainder of less than a page.
Invariant: the slots through all pages of a node are the same, at least one, and so are those that need its windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import PAGED, PagedOut
from lucevisor.kv.tokens import PAGE_BYTES, TOKEN_BYTES, TokenBuffer
from lucevisor.model.pages import first_visible_page
from lucevisor.model.values import PAGE_TOKENS, KvGroup

NO_STATE: Final = -1
"""State id of models without recurrent layers."""

Origin = Literal["turn", "pages", "prompt", "generation", "shared", "host", "disk", "preempted"]
"""Reason for a slot: a chat turn ends there, a multiple of ``checkpoint_pages``, the prompt ends, the answer ends,
two prompts diverge after it, it came back from host memory or from disk, or its request was preempted there."""

CacheTier = Literal["device", "host", "disk"]
"""The memory that a cached prefix came from: the devices', host memory, or ``cache.dir``."""

PageLookup = Callable[[KvGroup, int, int], list[int]]
"""The pages of entries [start, stop) in a KV group, as in a page table; those it does not hold are left out."""


@dataclass(frozen=True, slots=True)
class SlotSource:
    """Source of a new slot: length, pages, recurrent states at its end (or NO_STATE), pages that KV Flash paged out."""

    n_tokens: int
    entries: PageLookup
    state: int
    origin: Origin
    paged_out: PagedOut | None = None


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Pages ``[start, stop)`` of the texts that lead through it; a root has none, and the ``adapter`` of its texts.

    ``pages[kv_group]`` has one id per page, or is missing: ``window`` while no slot needs it.
    """

    start: int
    tokens: bytes
    parent: Node | None
    pages: dict[KvGroup, list[int]] = field(default_factory=dict)
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first page of tokens
    slots: dict[bytes, PrefixSlot] = field(default_factory=dict)  # by remainder: those that end here
    n_slots: int = 0  # leading through it
    n_windows: int = 0  # of them, those that need its window pages
    adapter: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens) // PAGE_BYTES

    @property
    def key(self) -> bytes:
        return self.tokens[:PAGE_BYTES]


@dataclass(slots=True, eq=False, repr=False)
class PrefixSlot:
    """A cached prefix: the pages up to the end of ``node``, then ``remainder`` (packed) in the pages ``tail``.

    ``first_window``: entry of the oldest window page visible from its end.  ``parent``: the longest slot that it begins
    with.
    """

    number: int
    node: Node
    remainder: bytes
    origin: Origin
    first_window: int
    state: int
    tail: dict[KvGroup, int] = field(default_factory=dict)
    parent: PrefixSlot | None = None
    alive: bool = True
    pins: int = 0
    evict_on_unpin: bool = False
    last_use: int = 0  # in ticks of the index
    used_at: float = 0.0  # seconds
    n_uses: int = 0
    paged_out: PagedOut | None = None  # which pages a sequence that goes on from here has in host memory

    @property
    def n_tokens(self) -> int:
        return self.node.stop * PAGE_TOKENS + len(self.remainder) // TOKEN_BYTES

    @property
    def tokens(self) -> TokenBuffer:
        root, path = self.node, path_to(self.node)
        while root.parent is not None:
            root = root.parent
        return TokenBuffer.from_packed(b"".join(node.tokens for node in path) + self.remainder, root.adapter)

    def pages(self, kv_group: KvGroup) -> list[int]:
        first = self.first_window if kv_group is KvGroup.WINDOW else 0
        pages = pages_of_path(path_to(self.node), kv_group, first, self.node.stop)
        return pages + ([self.tail[kv_group]] if kv_group in self.tail else [])

    def begins_with(self, other: PrefixSlot) -> bool:
        if other.n_tokens >= self.n_tokens:
            return False
        node, remainder = self.node, self.remainder
        while node.stop > other.node.stop and node.parent is not None:
            node, remainder = node.parent, node.tokens
        return node is other.node and remainder.startswith(other.remainder)


@dataclass(frozen=True, slots=True)
class LongestMatch:
    """Longest match: all of ``path`` (the root first), then the first pages of ``partial``; ``n_pages`` in all."""

    path: list[Node]
    partial: Node | None
    n_pages: int

    @property
    def nodes(self) -> list[Node]:
        return self.path if self.partial is None else [*self.path, self.partial]


def nodes_below(tops: Iterable[Node]) -> Iterator[Node]:
    """Yield some nodes and all below them."""
    stack = [*tops]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def path_to(node: Node) -> list[Node]:
    """Return the nodes from the root, left out, to ``node``."""
    path = []
    at = node
    while at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def pages_of_path(path: Iterable[Node], kv_group: KvGroup, start: int, stop: int) -> list[int]:
    """Return the ids of pages ``[start, stop)`` in a KV group; pages that are not held are left out."""
    ids: list[int] = []
    for node in path:
        if kv_group in node.pages and start < node.stop and node.start < stop:
            ids += node.pages[kv_group][max(0, start - node.start) : stop - node.start]
    return ids


class PrefixTree:
    """Nodes and slots over the page pools of a model.  Texts with different adapters are under different roots."""

    def __init__(self, pools: PagePools, window_tokens: int | None) -> None:
        self._pools = pools
        self._window_tokens = window_tokens
        self._kv_groups = tuple(kv_group for kv_group in PAGED if kv_group in pools)
        self._holds: dict[KvGroup, Counter[int]] = {kv_group: Counter() for kv_group in pools.kv_groups}
        self._roots: dict[str, Node] = {}

    @property
    def kv_groups(self) -> Sequence[KvGroup]:
        return self._pools.kv_groups

    @property
    def nodes(self) -> Iterator[Node]:
        return nodes_below(self._roots.values())

    def holds(self, kv_group: KvGroup) -> Counter[int]:
        """Return the reference counts that nodes and slots hold, by id of a KV group."""
        return self._holds[kv_group]

    # ---- lookups

    def walk(self, tokens: TokenBuffer, n_tokens: int) -> LongestMatch:
        """Follow the first ``n_tokens`` tokens as far as whole pages are known."""
        node = self._roots.get(tokens.adapter)
        if node is None:
            node = self._roots[tokens.adapter] = Node(0, b"", None, adapter=tokens.adapter)
        path, n_pages = [node], n_tokens // PAGE_TOKENS
        while (at := node.stop) < n_pages:
            child = node.children.get(tokens.packed(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS))
            if child is None:
                break
            n_same = tokens.n_common_pages(child.tokens, at, min(child.stop, n_pages) - at)
            if at + n_same < child.stop:
                return LongestMatch(path, child, at + n_same)
            path.append(child)
            node = child
        return LongestMatch(path, None, node.stop)

    def slots_on(self, walk: LongestMatch, tokens: TokenBuffer, n_tokens: int) -> Iterator[PrefixSlot]:
        """Yield the slots that the first ``n_tokens`` tokens begin with, longest first; ``walk`` is theirs."""
        for node in reversed(walk.path):
            if node.slots:
                start = node.stop * PAGE_TOKENS
                remainder = tokens.packed(start, min(n_tokens, start + PAGE_TOKENS - 1))
                fitting = [slot for known, slot in node.slots.items() if remainder.startswith(known)]
                yield from sorted(fitting, key=lambda slot: -len(slot.remainder))

    def longest_slot(self, tokens: TokenBuffer, n_tokens: int) -> PrefixSlot | None:
        """Return the longest slot that the first ``n_tokens`` tokens begin with, the empty one left out."""
        slot = next(self.slots_on(self.walk(tokens, n_tokens), tokens, n_tokens), None)
        return slot if slot is not None and slot.n_tokens else None

    def find_slot(self, tokens: TokenBuffer, n_tokens: int) -> PrefixSlot | None:
        node = self.walk(tokens, n_tokens).path[-1]
        if node.stop != n_tokens // PAGE_TOKENS:
            return None
        return node.slots.get(tokens.packed(node.stop * PAGE_TOKENS, n_tokens))

    def first_window(self, n_tokens: int) -> int:
        """Return the entry of the oldest window page visible from position ``n_tokens``; 0 without sliding layers."""
        return 0 if self._window_tokens is None else first_visible_page(n_tokens, self._window_tokens)

    def n_usable_pages(self, walk: LongestMatch) -> int:
        """Return after how many pages of a walk a prompt can start: the window behind that place is held whole."""
        if self._window_tokens is None:
            return walk.n_pages
        held_stop = walk.n_pages  # pages [node.start, held_stop) are held, as far as looked at
        for node in reversed(walk.nodes[1:]):
            stop = min(node.stop, walk.n_pages)
            if KvGroup.WINDOW not in node.pages:
                held_stop = node.start
                if self.first_window(stop * PAGE_TOKENS) >= stop:  # a window of one position needs no page
                    return stop
            elif self.first_window(held_stop * PAGE_TOKENS) >= node.start:
                return held_stop
        return 0

    # ---- changes

    def add(self, tokens: TokenBuffer, source: SlotSource, number: int) -> PrefixSlot | None:
        """Insert a slot and hold its pages, those of known nodes or else from ``source``.

        Returns None, changing nothing, if a page is in neither, as happens once the window has moved on.
        """
        n_pages, first_window = source.n_tokens // PAGE_TOKENS, self.first_window(source.n_tokens)
        walk = self.walk(tokens, source.n_tokens)
        fresh = self._fresh_pages(walk, source, first_window)
        if fresh is None:
            return None
        path = walk.path
        if walk.partial is not None:
            path.append(self._split(walk.partial, walk.n_pages))
        if walk.n_pages < n_pages:
            path.append(self._grow(path[-1], tokens, n_pages, fresh))
        if KvGroup.WINDOW in self._pools:
            path = self._hold_windows(path, first_window, fresh[KvGroup.WINDOW])
        for node in path:
            node.n_slots += 1
        remainder = tokens.packed(n_pages * PAGE_TOKENS, source.n_tokens)
        slot = PrefixSlot(number, path[-1], remainder, source.origin, first_window, source.state)
        slot.paged_out = source.paged_out
        if remainder:
            slot.tail = {kv_group: fresh[kv_group][n_pages] for kv_group in self._kv_groups}
            for kv_group, page in slot.tail.items():
                self._hold(kv_group, [page])
        if slot.state != NO_STATE:
            self._hold(KvGroup.RECURRENT, [slot.state])
        path[-1].slots[remainder] = slot
        return slot

    def remove(self, slot: PrefixSlot) -> None:
        """Remove a slot and release the pages that no other slot needs."""
        slot.alive = False
        del slot.node.slots[slot.remainder]
        for kv_group, page in slot.tail.items():
            self._let_go(kv_group, [page])
        if slot.state != NO_STATE:
            self._let_go(KvGroup.RECURRENT, [slot.state])
        at: Node | None = slot.node
        while at is not None:
            parent = at.parent
            at.n_slots -= 1
            if KvGroup.WINDOW in at.pages and at.start >= slot.first_window:
                at.n_windows -= 1
                if at.n_windows == 0:
                    self._let_go(KvGroup.WINDOW, at.pages.pop(KvGroup.WINDOW))
            if parent is not None:
                if at.n_slots == 0:
                    del parent.children[at.key]
                    for kv_group, pages in at.pages.items():
                        self._let_go(kv_group, pages)
                else:
                    _merge(at, parent)
            at = parent

    def move_pages(self, moves: Mapping[int, int]) -> None:
        """Hold other pages of KV group full with the same content."""
        holds = self._holds[KvGroup.FULL]
        for node in self.nodes:
            pages = node.pages.get(KvGroup.FULL)
            if pages is not None and not moves.keys().isdisjoint(pages):
                node.pages[KvGroup.FULL] = [moves.get(page, page) for page in pages]
            for slot in node.slots.values():
                if slot.tail.get(KvGroup.FULL) in moves:
                    slot.tail[KvGroup.FULL] = moves[slot.tail[KvGroup.FULL]]
        for source, target in moves.items():
            if source in holds:
                holds[target] = holds.pop(source)

    # ---- inside

    def _fresh_pages(
        self, walk: LongestMatch, source: SlotSource, first_window: int
    ) -> dict[KvGroup, dict[int, int]] | None:
        """Return the pages of a new slot that the tree does not hold, by KV group and entry; None if one is missing."""
        n_pages = source.n_tokens // PAGE_TOKENS
        wanted = {KvGroup.FULL: [(walk.n_pages, n_pages)], KvGroup.WINDOW: [(max(first_window, walk.n_pages), n_pages)]}
        for node in walk.nodes:
            if KvGroup.WINDOW not in node.pages:
                wanted[KvGroup.WINDOW].append((max(first_window, node.start), min(node.stop, walk.n_pages)))
        tail = (n_pages, n_pages + bool(source.n_tokens % PAGE_TOKENS))
        fresh: dict[KvGroup, dict[int, int]] = {}
        for kv_group in self._kv_groups:
            fresh[kv_group] = {}
            for start, stop in (*wanted[kv_group], tail):
                pages = source.entries(kv_group, start, stop) if start < stop else []
                if len(pages) < stop - start:
                    return None
                fresh[kv_group].update(zip(range(start, stop), pages, strict=False))
        return fresh

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in front of page ``at``; return the new node with its first pages.  Slots stay with the rest."""
        assert node.parent is not None
        n = at - node.start
        first = Node(node.start, node.tokens[: n * PAGE_BYTES], node.parent)
        first.n_slots, first.n_windows = node.n_slots, node.n_windows
        first.pages = {kv_group: pages[:n] for kv_group, pages in node.pages.items()}
        node.parent.children[first.key] = first
        node.start, node.tokens, node.parent = at, node.tokens[n * PAGE_BYTES :], first
        node.pages = {kv_group: pages[n:] for kv_group, pages in node.pages.items()}
        first.children[node.key] = node
        return first

    def _grow(self, parent: Node, tokens: TokenBuffer, n_pages: int, fresh: dict[KvGroup, dict[int, int]]) -> Node:
        start = parent.stop
        node = Node(start, tokens.packed(start * PAGE_TOKENS, n_pages * PAGE_TOKENS), parent)
        if KvGroup.FULL in self._pools:
            node.pages[KvGroup.FULL] = [fresh[KvGroup.FULL][i] for i in range(start, n_pages)]
            self._hold(KvGroup.FULL, node.pages[KvGroup.FULL])
        parent.children[node.key] = node
        return node

    def _hold_windows(self, path: list[Node], first_window: int, fresh: dict[int, int]) -> list[Node]:
        """Hold the window pages of a path from ``first_window`` on; return the path, cut there."""
        cut: list[Node] = []
        for node in path:
            if node.start < first_window < node.stop:
                cut.append(self._split(node, first_window))
            cut.append(node)
        for node in cut:
            if node.parent is not None and node.start >= first_window:
                if KvGroup.WINDOW not in node.pages:
                    node.pages[KvGroup.WINDOW] = [fresh[i] for i in range(node.start, node.stop)]
                    self._hold(KvGroup.WINDOW, node.pages[KvGroup.WINDOW])
                node.n_windows += 1
        return cut

    def _hold(self, kv_group: KvGroup, pages: Sequence[int]) -> None:
        holds = self._holds[kv_group]
        for allocator, ids in self._pools.tiers(kv_group, [page for page in pages if page not in holds]):
            allocator.cache(ids)
        holds.update(pages)

    def _let_go(self, kv_group: KvGroup, pages: Sequence[int]) -> None:
        holds, last = self._holds[kv_group], []
        for page in pages:
            if holds[page] == 1:
                del holds[page]
                last.append(page)
            else:
                holds[page] -= 1
        for allocator, ids in self._pools.tiers(kv_group, last):
            allocator.uncache(ids)


def _merge(node: Node, parent: Node) -> None:
    """Join a node with its only child if the same slots lead through both; the child stays."""
    if node.slots or len(node.children) != 1:
        return
    [child] = node.children.values()
    if (child.n_slots, child.n_windows) == (node.n_slots, node.n_windows):
        child.start, child.tokens, child.parent = node.start, node.tokens + child.tokens, parent
        child.pages = {kv_group: node.pages[kv_group] + pages for kv_group, pages in child.pages.items()}
        parent.children[child.key] = child
