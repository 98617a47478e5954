"""What the model of test_prefix_model.py is made of: texts, a device that remembers, and what a slot is worth."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import PageTable
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import PAGE_TOKENS, Space

SPACES = {
    "full": frozenset({Space.FULL}),
    "hybrid": frozenset({Space.FULL, Space.RECURRENT}),
    "window": frozenset({Space.FULL, Space.WINDOW}),
    "all": frozenset(Space),
    "recurrent": frozenset({Space.RECURRENT}),
}
UNIT_BYTES = {Space.FULL: 2, Space.WINDOW: 1, Space.RECURRENT: 5}
PARTS = [(0, 70), (0, 70), (0, 64), (900, 50)]


def text(which: int, length: int) -> list[int]:
    """The beginning of one of four texts, three of which begin alike: for 70, 70 and 64 tokens."""
    first, alike = PARTS[which]
    return [first + i if i < alike else 1000 * (which + 1) + i for i in range(length)]


TEXTS = st.builds(text, st.integers(0, 3), st.sampled_from([30, 64, 65, 70, 80, 128, 129, 150, 192, 250, 300]))


@dataclass(eq=False)
class Sequence:
    """What a live sequence is in the model: tokens, how far they are computed, its table and state."""

    tokens: list[int]
    table: PageTable
    state: int
    n: int


@dataclass
class Device:
    """What pages and states hold."""

    pages: dict[tuple[Space, int], list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def page(self, space: Space, page: int) -> list[int]:
        return self.pages.setdefault((space, page), [-1] * PAGE_TOKENS)


def check_choice(victim: PrefixSlot, slots: list[PrefixSlot], pools: PagePools, n_prompts: int) -> None:
    """The one to go is worth no more than any that would free ids of the same spaces."""
    tokens = {slot: tuple(slot.tokens) for slot in slots}

    def worth(slot: PrefixSlot) -> tuple[float, int, int]:
        others = [known for other, known in tokens.items() if other is not slot]
        shared = [len(known) for known in others if tokens[slot][: len(known)] == known]
        if set(pools.spaces) == {Space.FULL}:
            shared += [common(known, list(tokens[slot])) // PAGE_TOKENS * PAGE_TOKENS for known in others]
        n_lost = slot.n_tokens - max(shared, default=0)
        return n_lost / (n_prompts - slot.last_use + 1), slot.last_use, slot.number

    def frees(slot: PrefixSlot) -> set[Space]:
        def lone(space: Space) -> set[int]:
            kept = {page for other in slots if other is not slot for page in held(other, space)}
            return {page for page in held(slot, space) if page not in kept and pools[space].evictable(page)}

        return {space for space in pools.spaces if lone(space)}

    rivals = [slot for slot in slots if slot is not victim and not slot.pins and frees(slot) >= frees(victim)]
    assert worth(victim) <= min(map(worth, rivals), default=worth(victim))


def held(slot: PrefixSlot, space: Space) -> list[int]:
    """Ids of a space that a slot needs."""
    return [slot.state] if space is Space.RECURRENT else slot.pages(space)


def common(one: tuple[int, ...], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def prefix_hash(tokens: list[int]) -> int:
    """A number that stands for all tokens up to a position."""
    return hash(tuple(tokens))
