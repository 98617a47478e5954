"""Records of the prefix index: settings, matches, reservations, hooks.  Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lucevisor.kv.prefix_tree import NO_STATE, Origin, PrefixSlot
from lucevisor.kv.residency import PagedOut
from lucevisor.model.values import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Limits of the index.  ``unit_bytes``: bytes of a page, or of one sequence's recurrent states, over all shards.
    ``checkpoint_pages``: prompts without chat turns get a slot at a multiple of so many pages; 0: none.
    """

    max_slots: int = 0
    memory_bytes: int = 0
    min_tokens: int = 256
    checkpoint_pages: int = 4
    unit_bytes: Mapping[Space, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached part of a prompt: ``position`` tokens in the whole pages ``full`` and ``window`` (the latter from
    entry ``first_window`` on), the first ``position % 64`` positions of ``tail``, and ``state``.  Pages of ``full`` may
    lie in host memory; ``paged_out``: which of a sequence that goes on from there do.

    ``n_known``: tokens that other prompts began with too, usable or not.
    """

    position: int
    n_known: int = 0
    full: tuple[int, ...] = ()
    first_window: int = 0
    window: tuple[int, ...] = ()
    tail: Mapping[Space, int] = field(default_factory=dict)
    state: int = NO_STATE
    slot: PrefixSlot | None = None
    paged_out: PagedOut | None = None

    @property
    def from_disk(self) -> bool:
        """Whether the tokens came from a snapshot and this is their first use."""
        return self.slot is not None and self.slot.origin == "disk" and self.slot.n_uses == 0


@dataclass(slots=True, eq=False)
class Reservation:
    """Fresh ids for a prefix being restored, held until it is adopted or cancelled.

    ``draft_epoch``: of their allocation.  ``origin``: of the slot that is made of them.
    """

    n_tokens: int
    first_window: int
    ids: dict[Space, list[int]]
    draft_epoch: int = 0
    paged_out: PagedOut | None = None
    origin: Origin = "disk"

    @property
    def drafted(self) -> bool:
        """Whether a drafter is attached, and keeps state of all pages: where they are ranked, in host memory, too."""
        return self.draft_epoch > 0 and (self.paged_out is None or self.paged_out.approximate)

    @property
    def state(self) -> int:
        """The state to restore into, or NO_STATE."""
        return self.ids[Space.RECURRENT][0] if Space.RECURRENT in self.ids else NO_STATE

    def entries(self, space: Space, start: int, stop: int) -> list[int]:
        """Return the pages of entries ``[start, stop)``; those outside are left out."""
        first = self.first_window if space is Space.WINDOW else 0
        return self.ids[space][max(0, start - first) : max(0, stop - first)]


@dataclass(slots=True)
class PrefixHooks:
    """``on_slot``: a slot was made.  ``on_evict``: one is about to be evicted; a pin taken here delays that until it is
    removed.  Neither is called when ``clear`` drops all slots.  Both run while a step is being planned: they may pin,
    but must not call the engine.
    """

    on_slot: Callable[[PrefixSlot], None] = lambda _: None
    on_evict: Callable[[PrefixSlot], None] = lambda _: None
