"""What lost daemons took of prefix slots: which pages and states some stages lack, and what is whole all the same.

A slot of which a stage has lost bytes is *partial*: it stays in the tree, with its ids, and no request begins with it
before these stages have computed their part again (engine/refill.py), or others have computed its tokens.
Knows ids, neither daemons nor rows.
Invariant: an id that a stage lacks counts as lost until it is allocated anew or filled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_records import PrefixMatch
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot, PrefixTree, SlotSource, Walk, path_to
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import PAGE_TOKENS, Space


def lose_units(
    tree: PrefixTree, pools: PagePools, stages: Collection[int], kept: Mapping[Space, Collection[int]]
) -> None:
    """Note that stages have lost what slots hold, but for the ids ``kept``."""
    for space in tree.spaces:
        for allocator, own in pools.tiers(space, set(tree.holds(space)).difference(kept.get(space, ()))):
            allocator.lose(own, stages)


def lost_in(pools: PagePools, match: PrefixMatch) -> frozenset[int]:
    """Return the stages that lack some of a match."""
    if not pools.lossy:
        return frozenset()
    found = [pools.lost_in(Space.FULL, page) for page in match.full]
    found += [pools.lost_in(Space.WINDOW, page) for page in match.window]
    found += [pools.lost_in(space, page, match.position % PAGE_TOKENS) for space, page in match.tail.items()]
    if match.state != NO_STATE:
        found.append(pools.lost_in(Space.RECURRENT, match.state))
    return frozenset[int]().union(*found)


def is_partial(pools: PagePools, slot: PrefixSlot) -> bool:
    """Whether a stage lacks some of a slot."""
    if not pools.lossy:
        return False
    n_last = slot.n_tokens % PAGE_TOKENS
    for node in path_to(slot.node):
        for space, pages in node.pages.items():
            needed = space is not Space.WINDOW or node.start >= slot.first_window
            if needed and any(pools.lost_in(space, page) for page in pages):
                return True
    if any(pools.lost_in(space, page, n_last) for space, page in slot.tail.items()):
        return True
    return slot.state != NO_STATE and bool(pools.lost_in(Space.RECURRENT, slot.state))


def n_whole_pages(pools: PagePools, walk: Walk) -> int:
    """Return how many pages of a walk, from the first on, all stages have; none where there are sliding layers."""
    if not pools.lossy:
        return walk.n_pages
    if Space.WINDOW in pools:
        return 0
    for node in walk.nodes[1:]:
        for at, page in enumerate(node.pages.get(Space.FULL, ()), node.start):
            if at >= walk.n_pages:
                break
            if pools.lost_in(Space.FULL, page):
                return at
    return walk.n_pages


def repair(tree: PrefixTree, pools: PagePools, tokens: TokenBuffer, source: SlotSource) -> int:
    """Let the tree hold pages of a new slot's source in place of those of the same tokens that some stage lacks; return
    how many."""
    n_replaced = 0
    if not pools.lossy:
        return n_replaced
    walk = tree.walk(tokens, source.n_tokens)
    for node in walk.nodes[1:]:
        for space, pages in node.pages.items():
            for at, page in enumerate(pages[: walk.n_pages - node.start]):
                own = source.entries(space, node.start + at, node.start + at + 1)
                if not own or own[0] == page or not pools.lost_in(space, page) or pools.lost_in(space, own[0]):
                    continue
                if Space.RECURRENT in pools and pools.epoch_of(space, page) != pools.epoch_of(space, own[0]):
                    continue  # the drafter that has this page may lack the states of slots on it
                tree.replace(node, space, at, own[0])
                n_replaced += 1
    return n_replaced
