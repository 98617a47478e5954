"""The prefix slots that there are: made over a tree, linked to the slots they extend, used and removed.

Knows no limits and no pins; what goes when is decided in prefix_eviction.py.
Invariant: a slot is in here as long as it is alive, and its parent is the longest other slot that it begins with.
"""

from __future__ import annotations

from collections.abc import Iterator

from lucevisor.kv.prefix_tree import PrefixSlot, PrefixTree, SlotSource
from lucevisor.kv.tokens import TokenBuffer


class PrefixSlots:
    """All slots of a tree, oldest first."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._by_number: dict[int, PrefixSlot] = {}
        self._n_made = 0
        self.n_prompts = 0  # that a slot could have been used for
        self.n_changes = 0  # slots made and removed

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[PrefixSlot]:
        return iter(self._by_number.values())

    def add(self, tokens: TokenBuffer, source: SlotSource, now: float) -> PrefixSlot | None:
        """Make a slot, the most recently used; None if the tree cannot hold it (``PrefixTree.add``)."""
        slot = self._tree.add(tokens, source, self._n_made)
        if slot is None:
            return None
        self._n_made += 1
        self.n_changes += 1
        slot.parent = self._tree.longest_slot(tokens, slot.n_tokens - 1)
        if slot.node.n_slots > 1:
            for other in self:
                if other.parent is slot.parent and other.begins_with(slot):
                    other.parent = slot
        self._by_number[slot.number] = slot
        self.touch(slot, now)
        return slot

    def touch(self, slot: PrefixSlot, now: float) -> None:
        """Make a slot the most recently used."""
        slot.last_use, slot.used_at, slot.evict_on_unpin = self.n_prompts, now, False

    def remove(self, slot: PrefixSlot) -> None:
        """Remove a slot, and release what no other needs."""
        self.n_changes += 1
        self._tree.remove(slot)
        del self._by_number[slot.number]
        for other in self:
            if other.parent is slot:
                other.parent = slot.parent
