"""Checks that every page and state id has the owners it is counted for, and that the prefix tree adds up.

A debugging aid (LUCEVISOR_VALIDATE=1), which never repairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.kv.prefix_cache import PrefixIndex
from lucevisor.kv.prefix_tree import NO_STATE, Node, PrefixSlot, PrefixTree, nodes_below
from lucevisor.model.values import KvGroup


class AccountingError(Exception):
    """Ids and their owners do not add up: a defect.  ``problems`` holds one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        more = len(self.problems) - 20
        listed = self.problems[:20] + ([f"and {more} more"] if more > 0 else [])
        super().__init__("inconsistent accounting: " + "; ".join(listed))


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who holds ids of an allocator, once per occurrence.  ``cached``: as the prefix index."""

    name: str
    allocator: PageAllocator
    ids: Sequence[int]
    cached: bool = False


def pool_problems(pools: PagePools, owners: Iterable[Owner]) -> Iterator[str]:
    """Yield what is wrong with the reference counts of all allocators if ``owners`` are all there are."""
    by_allocator: dict[int, list[Owner]] = defaultdict(list)
    for owner in owners:
        by_allocator[id(owner.allocator)].append(owner)
    for kv_group in pools.kv_groups:
        for allocator in {id(one): one for one in (pools[kv_group], pools.slot_pools[kv_group])}.values():
            yield from allocator_problems(allocator, by_allocator[id(allocator)])
    for allocator in (pools.host_pages, pools.draft_states):
        yield from allocator_problems(allocator, by_allocator[id(allocator)])


def allocator_problems(allocator: PageAllocator, owners: Iterable[Owner]) -> Iterator[str]:
    names: dict[int, list[str]] = defaultdict(list)
    cached: set[int] = set()
    for owner in owners:
        for page in owner.ids:
            names[page].append(owner.name)
        if owner.cached:
            cached.update(owner.ids)
    for page in allocator.ids:
        n, known = allocator.ref_count(page), names.pop(page, [])
        if n != len(known):
            who = ", ".join(known) or "none"
            yield f"{allocator.name}: id {page} counts {n} owners, known are {len(known)} ({who})"
    for page, known in names.items():
        yield f"{allocator.name}: id {page} of {', '.join(known)} is outside the pool"
    yield from (f"{allocator.name}: {problem}" for problem in allocator.problems(cached))


def index_owners(index: PrefixIndex) -> Iterator[Owner]:
    """Yield the prefix index and its reservations as owners, from what the tree holds."""
    pools = index.pools
    for kv_group, held in _held(index.tree).items():
        for allocator, ids in pools.tiers(kv_group, held):
            yield Owner("the prefix index", allocator, ids, cached=True)
    for reservation in index.reservations:
        for kv_group, units in reservation.ids.items():
            for allocator, ids in pools.tiers(kv_group, units):
                yield Owner(f"a reservation of {reservation.n_tokens} tokens", allocator, ids)


def index_problems(index: PrefixIndex) -> Iterator[str]:
    """Yield what is wrong with the counts of the prefix tree and its slots."""
    tree = index.tree
    by_number = {slot.number: slot for node in tree.nodes for slot in node.slots.values()}
    if by_number.keys() != {slot.number for slot in index.slots}:
        yield f"slots {sorted(by_number)} are in the tree, {sorted(slot.number for slot in index.slots)} in the index"
    for slot in by_number.values():
        if not slot.alive or slot.pins < 0 or (slot.parent is not None and not slot.parent.alive):
            yield f"slot {slot.number} is in the tree: alive {slot.alive}, {slot.pins} pins, parent {slot.parent}"
    for kv_group, held in _held(tree).items():
        if held != tree.holds(kv_group):
            yield f"KV group {kv_group}: the tree holds {dict(held)} and counts {dict(tree.holds(kv_group))}"
    for node in tree.nodes:
        yield from _node_problems(node, index.pools)


def _node_problems(node: Node, pools: PagePools) -> Iterator[str]:
    where, slots = f"pages {node.start} to {node.stop} of the prefix tree", list[PrefixSlot]()
    for below in nodes_below([node]):
        slots += below.slots.values()
    if node.n_slots != len(slots) or (node.parent is not None and not slots):
        yield f"{where}: {len(slots)} slots lead through, {node.n_slots} are counted"
    for key, child in node.children.items():
        if key != child.key or child.parent is not node or child.start != node.stop:
            yield f"{where}: its child at page {child.start} is not linked to it"
    if node.parent is None:
        return
    n_windows = sum(node.start >= slot.first_window for slot in slots) if KvGroup.WINDOW in pools else 0
    if node.n_windows != n_windows:
        yield f"{where}: {n_windows} slots need its window pages, {node.n_windows} are counted"
    needed = {KvGroup.FULL: KvGroup.FULL in pools, KvGroup.WINDOW: n_windows > 0}
    for kv_group, needs in needed.items():
        n_wanted, n_pages = (node.stop - node.start) * needs, len(node.pages.get(kv_group, ()))
        if n_pages != n_wanted:
            yield f"{where}: {n_pages} pages of KV group {kv_group}, {n_wanted} are needed"


def _held(tree: PrefixTree) -> dict[KvGroup, Counter[int]]:
    held: dict[KvGroup, Counter[int]] = {kv_group: Counter() for kv_group in tree.kv_groups}
    for node in tree.nodes:
        for kv_group, pages in node.pages.items():
            held[kv_group].update(pages)
        for slot in node.slots.values():
            for kv_group, page in slot.tail.items():
                held[kv_group][page] += 1
            if slot.state != NO_STATE:
                held[KvGroup.RECURRENT][slot.state] += 1
    return held
