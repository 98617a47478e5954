"""The slices of a step that share one call of each block, as the host knows them.  Knows ids and places, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from daemons.kv.sequences import OpenedSequence
from daemons.ops.operations import MAX_DECODE_TOKENS, SHORT_SLICE
from lucevisor.model.values import PAGE_TOKENS, Space

MIN_GRAPH_LENGTH = 128
"""Attention over fewer positions launches the same kernels."""


@dataclass(slots=True)
class SliceGroup:
    """Slices of ``n`` tokens each.  ``offset``: how far inside a chunk they start; 0 for up to SHORT_SLICE tokens.

    Chunks of longer slices end at multiples of CHUNK, so only slices with equal offsets can share a group.
    ``n_states``: after how many of its last tokens each slice keeps a recurrent state; 0: only the live one changes.
    ``lows``: first position that each slice attends to; empty: all of them.
    In space full positions are places in the table, which pages that were paged out left: ``full_starts``, ``lows``.
    """

    n: int
    offset: int
    n_states: int = 0
    rows: list[int] = field(default_factory=list)  # first row of each slice
    starts: list[int] = field(default_factory=list)
    full_starts: list[int] = field(default_factory=list)
    sequences: list[OpenedSequence] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)  # the states each slice writes, after its last tokens
    lows: list[int] = field(default_factory=list)
    ranked: list[int] = field(default_factory=list)  # slices that ask how much they attend to each page
    in_place: bool = False  # whether attention can read host memory in place

    @property
    def contiguous(self) -> bool:
        return all(b - a == self.n for a, b in zip(self.rows, self.rows[1:], strict=False))

    def starts_in(self, space: Space) -> list[int]:
        return self.full_starts if space is Space.FULL else self.starts

    @property
    def reads_host(self) -> bool:
        """Whether slices attend to pages in host memory."""
        return any(sequence.host_rows for sequence in self.sequences)

    @property
    def reads_in_place(self) -> bool:
        """Whether pages in host memory are read there: by slices so short that each number is read once."""
        return self.in_place and self.n <= SHORT_SLICE and self.reads_host

    @property
    def host_lengths(self) -> list[int]:
        """Positions of each slice's sequence in host memory; empty if there are none at all."""
        return [len(one.host_rows) * PAGE_TOKENS for one in self.sequences] if self.reads_host else []

    @property
    def max_host_length(self) -> int:
        """The same bound for what lies in host memory; 0: nothing."""
        most = max(self.host_lengths, default=0)
        return max(MIN_GRAPH_LENGTH, 1 << (most - 1).bit_length()) if most else 0

    @property
    def max_length(self) -> int:
        """Upper bound of what a slice attends to that rarely changes: a power of two, at least MIN_GRAPH_LENGTH."""
        return max(MIN_GRAPH_LENGTH, 1 << (max(self.full_starts) + self.n - 1).bit_length())

    @property
    def state_columns(self) -> int:
        """Tokens of a slice for which the metadata name a state to write: all of a slice for decode kernels."""
        return self.n if self.n <= MAX_DECODE_TOKENS else 0


class GraphKey(NamedTuple):
    """What a step's launches depend on: B slices of n tokens that attend to at most ``max_length`` positions, and to
    ``max_host_length`` in host memory.  Those of a long slice depend on its ``start``, and ``max_length`` is exact.
    """

    n_slices: int
    n_tokens: int
    max_length: int
    max_host_length: int = 0
    start: int = -1
