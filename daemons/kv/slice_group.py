"""The slices of a step that share one call of each block, as the host has them: ids and places, no tensors.

A step of one long slice may be padded, so that one graph serves many lengths: pad rows follow the slice's tokens, and
no page and no state is written for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from daemons.errors import StateError
from daemons.kv.sequences import NO_PAGE, OpenedSequence
from daemons.ops.operations import MAX_DECODE_TOKENS, SHORT_SLICE
from lucevisor.model.pages import first_visible_page
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.model.workspace import GRAPH_LENGTH
from lucevisor.protocol.steps import Slice

MIN_GRAPH_LENGTH = 128
"""Attention over fewer positions launches the same kernels."""
PADDED_ROWS = (48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Rows to which one long slice is padded.  At most a third are pad rows, and above 512, where products take longer than
their launches, at most a quarter.
"""


@dataclass(slots=True)
class SliceGroup:
    """Slices of ``n`` tokens each.  ``offset``: how far inside a chunk they start; 0 for up to SHORT_SLICE tokens.

    Chunks of longer slices end at multiples of CHUNK, so only slices with equal offsets can share a group.
    ``n_states``: after how many of its last tokens each slice keeps a recurrent state; 0: only the live one changes.
    ``lows``: first position that each slice attends to; empty: all of them.
    ``n_valid``: tokens of the only slice, which is padded to ``n`` rows; 0: it is not padded.
    In KV group full positions are places in the table, which pages that were paged out left: ``full_starts``, ``lows``.
    ``blocks``: of images whose tokens see each other in layers with a window.
    ``state_rows``: state s is in row ``s * state_rows`` of the layers' tensors.
    """

    n: int
    offset: int
    n_states: int = 0
    n_valid: int = 0
    rows: list[int] = field(default_factory=list)  # first row of each slice
    starts: list[int] = field(default_factory=list)
    full_starts: list[int] = field(default_factory=list)
    sequences: list[OpenedSequence] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)  # the states each slice writes, after its last tokens
    lows: list[int] = field(default_factory=list)
    ranked: list[int] = field(default_factory=list)  # slices that ask how much they attend to each page
    blocks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # rows that see each other, by slice
    state_rows: int = 1
    in_place: bool = False  # whether attention can read host memory in place

    def add(self, row: int, start: int, sequence: OpenedSequence, states: list[int], *, ranked: bool) -> None:
        """Append a slice from ``row`` of the step on."""
        if ranked:
            self.ranked.append(len(self.rows))
        self.rows.append(row)
        self.starts.append(start)
        self.full_starts.append(start - sequence.out_tokens)
        self.sequences.append(sequence)
        self.states.append(states)

    @property
    def contiguous(self) -> bool:
        return len(self.rows) == 1 or all(b - a == self.n for a, b in pairwise(self.rows))

    def starts_in(self, kv_group: KvGroup) -> list[int]:
        return self.full_starts if kv_group is KvGroup.FULL else self.starts

    def common_end(self, kv_group: KvGroup) -> int:
        """Return the common end of slices of several tokens in a KV group if all see all before it, else 0."""
        ends = {start + self.n for start in self.starts_in(kv_group)}
        return ends.pop() if len(ends) == 1 and self.n > 1 and not (self.lows or self.reads_host) else 0

    @property
    def reads_host(self) -> bool:
        """True if slices attend to pages in host memory."""
        return any(sequence.host_rows for sequence in self.sequences)

    @property
    def reads_in_place(self) -> bool:
        """True if pages in host memory are read there: by slices so short that each number is read once."""
        return self.in_place and self.n <= SHORT_SLICE and self.reads_host

    @property
    def host_lengths(self) -> list[int]:
        """Positions of each slice's sequence in host memory; empty if there are none at all."""
        return [len(one.host_rows) * PAGE_TOKENS for one in self.sequences] if self.reads_host else []

    @property
    def max_host_length(self) -> int:
        """Upper bound of the positions of a slice's sequence in host memory, as of its length; 0: nothing is there."""
        if not self.reads_host:
            return 0
        return max(MIN_GRAPH_LENGTH, 1 << (max(self.host_lengths) - 1).bit_length())

    @property
    def max_length(self) -> int:
        """Upper bound of what a slice attends to that rarely changes: a power of two, at least MIN_GRAPH_LENGTH."""
        return max(MIN_GRAPH_LENGTH, 1 << (max(self.full_starts) + self.n - 1).bit_length())

    @property
    def state_columns(self) -> int:
        """Tokens of a slice for which the metadata name a state to write: all of a slice for decode kernels."""
        return self.n if self.n <= MAX_DECODE_TOKENS else 0

    @property
    def live_rows(self) -> list[int]:
        """Rows of the live states."""
        return self.rows_of([s.state for s in self.sequences])

    def rows_of(self, states: list[int]) -> list[int]:
        """Return the rows of states in the layers' tensors."""
        return states if self.state_rows == 1 else [state * self.state_rows for state in states]

    @property
    def leaves_updates(self) -> bool:
        """True if slices leave what each token does to their state, and not the states after them."""
        return 1 < self.n == self.n_states

    @property
    def span_columns(self) -> int:
        """Numbers of a slice for the chunked delta rule, which slices without ``state_columns`` run."""
        return 0 if self.state_columns else 2

    def padded(self, max_rows: int) -> SliceGroup | None:
        """The group with pad rows; None unless it is one slice of more than SHORT_SLICE tokens that attends to all of a
        sequence whose pages are on the device, nothing else is asked of it, and ``max_rows`` and GRAPH_LENGTH suffice.
        """
        if len(self.starts) != 1 or not SHORT_SLICE < self.n <= max_rows:
            return None
        n_rows = next((n for n in PADDED_ROWS if n >= self.n), max_rows + 1)
        if n_rows > max_rows or self.n_states or self.lows or self.ranked or self.reads_host:
            return None
        found = replace(self, n=n_rows, n_valid=self.n)
        return found if found.max_length <= GRAPH_LENGTH else None

    def numbers(self) -> list[int]:
        """Starts, those in KV group full, table rows, live states, the states to write or the spans, the first
        positions to attend to if there are bounds, positions in host memory if there are some, and the rows of the
        step unless they are one range.

        States to write are [B, state_columns]: after each token of a slice, -1 for none.  Spans are [B, 2]: how far
        inside a chunk a slice starts, and its tokens.
        """
        numbers = self.starts + self.full_starts
        numbers += [s.row for s in self.sequences] + self.live_rows
        if self.state_columns:
            for states in self.states:
                numbers += [-1] * (self.n - len(states)) + self.rows_of(states)
        else:
            numbers += [self.offset, self.n_valid or self.n] * len(self.starts)
        numbers += self.lows + self.host_lengths
        if not self.contiguous:
            numbers += [row + i for row in self.rows for i in range(self.n)]
        return numbers


class GraphKey(NamedTuple):
    """Key of a step's CUDA graph: B slices of n tokens (n rows with pad rows for one long slice) that attend to at most
    ``max_length`` positions, and to ``max_host_length`` in host memory.  ``adapted``: some rows have LoRA adapters.
    """

    n_slices: int
    n_tokens: int
    max_length: int
    max_host_length: int = 0
    adapted: bool = False


def slots_of(sequence: OpenedSequence, kv_group: KvGroup, s: Slice, window: int, where: str) -> list[int]:
    """Slots ``page * 64 + offset`` of the slice's positions.  Raises StateError when a page is missing."""
    table, n = sequence.pages.get(kv_group, []), len(s.tokens)
    start = s.start - (sequence.out_tokens if kv_group is KvGroup.FULL else 0)
    first, last = start // PAGE_TOKENS, (start + n - 1) // PAGE_TOKENS
    oldest = first_visible_page(start, window) if window else first  # a full table has no gaps
    last_out = sequence.out[-1] if kv_group is KvGroup.FULL and sequence.out else -1
    if last >= len(table) or NO_PAGE in table[oldest : last + 1] or s.start < (last_out + 1) * PAGE_TOKENS:
        missing = f"the {kv_group.value} table of {len(table)} entries lacks a page for"
        raise StateError(where, f"{missing} positions {s.start - start + oldest * PAGE_TOKENS} to {s.start + n - 1}")
    found: list[int] = []
    at = start % PAGE_TOKENS
    for page in table[first : last + 1]:
        slot = page * PAGE_TOKENS
        found += range(slot + at, slot + min(PAGE_TOKENS, at + n - len(found)))
        at = 0
    return found
