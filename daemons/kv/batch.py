"""The rows of one step, arranged for the blocks: positions, slots to write, pages to read.

A :class:`Layout` is built on the host once per step, a :class:`Batch` once per device; all layers of all shards share
it.  Rows keep the order of the slices.  Short slices of equal length form a
:class:`Group`, which is one call of each block; a long one has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from daemons.errors import StateError
from daemons.kv.images import PLACEHOLDER_ID, blocks_in, image_rows, rope_positions, shift
from daemons.kv.sequences import HOST, OpenedSequence, Sequences, Tables
from daemons.kv.slice_group import GraphKey, SliceGroup, slots_of
from daemons.ops.attention import Causal, is_flash_device, visible
from daemons.ops.basic import Rope
from daemons.ops.delta_rule import CHUNK
from daemons.ops.lora import NO_ADAPTER, LoraRows
from daemons.ops.operations import MAX_DECODE_TOKENS, SHORT_SLICE, Operations, PagedQuery
from daemons.ops.page_scores import QUERIES
from daemons.ops.paged import PagedTensor, Pages
from lucevisor.model.pages import first_visible, first_visible_page, pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.steps import ImageSpan, Slice


def check_slice(s: Slice, where: str, seen: set[int], vocabulary: int) -> None:
    """Raise StateError unless the slice may be in a step; its sequence joins ``seen``."""
    if s.sequence in seen:
        raise StateError(where, "the sequence has another slice in this step")
    seen.add(s.sequence)
    if not s.tokens or s.start < 0:
        raise StateError(where, f"{len(s.tokens)} tokens at position {s.start}")
    if not 0 <= s.n_drafts < len(s.tokens) or (s.n_drafts and not s.sample):
        how = "samples" if s.sample else "samples nothing"
        raise StateError(where, f"{s.n_drafts} drafts among {len(s.tokens)} tokens of a slice that {how}")
    if min(s.tokens) < 0 or max(s.tokens) >= vocabulary:
        bad = next(t for t in s.tokens if not 0 <= t < vocabulary)
        raise StateError(where, f"token id {bad} is outside the vocabulary of {vocabulary}")


def check_states(s: Slice, where: str, sequence: OpenedSequence, sequences: Sequences, used: set[int]) -> None:
    """Raise StateError unless the slice may read and write its recurrent states, which join ``used``."""
    n, n_states = len(s.tokens), len(s.states)
    if s.n_drafts and n_states != s.n_drafts + 1:
        raise StateError(where, f"{n_states} states to write; {s.n_drafts} drafts take {s.n_drafts + 1}")
    if n_states and not n_states <= n <= MAX_DECODE_TOKENS:
        limit = f"a slice that keeps states has as many tokens or more, and at most {MAX_DECODE_TOKENS}"
        raise StateError(where, f"{n_states} states to write in a slice of {n} tokens: {limit}")
    for i, state in enumerate(s.states):
        if sequences.check_device(where, state) and not (i and n_states == n and s.states[0] == sequence.state):
            how = "of a slice that keeps one after each token, behind the live one"
            raise StateError(where, f"state {state} is a draft's, and may only be one {how}")
    for state in [*s.states, sequence.state] if sequence.state not in s.states else s.states:
        if state in used:
            raise StateError(where, f"recurrent state {state} is used twice in this step")
        used.add(state)


class Layout:
    """The host side of a batch: the groups, and the ``numbers`` of one int64 array with all metadata of the step.

    ``bounded``: slices attend to positions from ``Slice.draft_from`` on.  ``ranked``: sequences whose slices rank their
    pages.  ``fill`` copies tokens that only the device has into the metadata there: the id of row i is number i.
    ``adapters``: the adapter of each row; empty if none has one.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        sequences: Sequences,
        spec: ModelSpec,
        *,
        bounded: bool = False,
        ranked: Collection[int] = (),
    ) -> None:
        self.n_rows, self.is_padded = sum(len(s.tokens) for s in slices), False
        self.image_rows: list[int] = []  # whose embedding rows come with the step
        self.axes: tuple[list[int], list[int]] | None = None  # rows and columns of all tokens, if they have images
        self.fill: Callable[[Tensor], None] = lambda metadata: None
        kv_groups = spec.kv_groups()
        self.kv_groups = [s for s in (KvGroup.FULL, KvGroup.WINDOW) if s in kv_groups]
        columns: list[list[int]] = [[], [], *([] for _ in self.kv_groups)]  # ids, positions, slots of each KV group
        windows = [spec.window if kv_group is KvGroup.WINDOW else 0 for kv_group in self.kv_groups]
        self.groups: list[SliceGroup] = []
        by_key: dict[tuple[int, int, int], SliceGroup] = {}
        seen: set[int] = set()
        used: set[int] = set()
        adapters = list[int]()
        for s in slices:
            n, start = len(s.tokens), s.start
            where = f"slice of sequence {s.sequence} at {start}"
            sequence = sequences.get(s.sequence, where)
            if sequence.images:
                s = self._without_ids(s, sequence, len(columns[0]))
            check_slice(s, where, seen, spec.vocabulary)
            states = s.states or [sequence.state]
            if KvGroup.RECURRENT in kv_groups:
                check_states(s, where, sequence, sequences, used)
            elif s.states:
                raise StateError(where, f"{len(s.states)} recurrent states to write, and the model has none")
            adapters += [sequence.adapter] * n
            columns[0] += s.tokens
            self._add_positions(columns[1], sequence.images if spec.mrope else (), start, n)
            for column, kv_group, window in zip(columns[2:], self.kv_groups, windows, strict=True):
                column += slots_of(sequence, kv_group, s, window, where)
            key = (n, start % CHUNK if n > SHORT_SLICE else 0, 0 if states == [sequence.state] else len(states))
            group = by_key.get(key)
            if group is None or n > SHORT_SLICE:  # long ones alone: each gathers what it attends to
                group = by_key[key] = SliceGroup(
                    *key, state_rows=sequences.state_rows, in_place=sequences.reads_in_place
                )
                self.groups.append(group)
            group.add(len(columns[0]) - n, start, sequence, states, ranked=s.sequence in ranked)
            if spec.whole_images and (blocks := blocks_in(sequence.images, start, n, where)):
                group.blocks[len(group.starts) - 1] = blocks
            if bounded:
                if not 0 <= s.draft_from <= start:
                    raise StateError(where, f"it attends to positions from {s.draft_from} on")
                group.lows.append(sequence.place(s.draft_from))
        self.adapters = adapters if adapters.count(NO_ADAPTER) < self.n_rows else []
        self.numbers = [*chain(*columns, *(group.numbers() for group in self.groups), self.adapters)]

    def _without_ids(self, s: Slice, sequence: OpenedSequence, first: int) -> Slice:
        """Return a slice with placeholders in place of the ids of images; its rows begin with row ``first``."""
        rows = image_rows(sequence.images, s.start, len(s.tokens))
        if not rows:
            return s
        self.image_rows += [first + row for row in rows]
        tokens = s.tokens.copy()
        for row in rows:
            tokens[row] = PLACEHOLDER_ID
        return msgspec.structs.replace(s, tokens=tokens)

    def _add_positions(self, times: list[int], images: Sequence[ImageSpan], start: int, n: int) -> None:
        """Add where the tokens of a slice stand, in three axes from the first token of an image on."""
        if self.axes is None and not any(image.start < start + n and start < image.stop for image in images):
            behind = shift(images, start) if images else 0
            times += range(start - behind, start - behind + n)
            return
        if self.axes is None:
            self.axes = times.copy(), times.copy()
        found = rope_positions(images, start, n)
        times += found.times
        self.axes[0].extend(found.rows)
        self.axes[1].extend(found.columns)

    @property
    def metadata(self) -> np.ndarray:
        """A new array of ``numbers``."""
        return np.array(self.numbers, dtype=np.int64)

    @property
    def graph_key(self) -> GraphKey | None:
        """The key of the step's CUDA graph; None if it cannot be captured.

        All slices must have the same number of tokens, at most SHORT_SLICE (QUERIES if they rank pages), none of an
        image, and read host pages in place if at all, unless the step is padded.
        """
        if len(self.groups) != 1 or self.image_rows:
            return None
        [group] = self.groups
        if group.n > (QUERIES if group.ranked else SHORT_SLICE) and not self.is_padded:
            return None
        if group.reads_host and not group.reads_in_place:
            return None
        return GraphKey(len(group.starts), group.n, group.max_length, group.max_host_length, bool(self.adapters))

    def padded(self, max_rows: int) -> Layout | None:
        """Return the step padded to at most ``max_rows`` rows for a graph; None where :meth:`SliceGroup.padded` is.

        Pad rows have id 0, the position of the last token, which is finite everywhere, and slot -1.
        """
        others = self.image_rows or self.adapters
        group = self.groups[0].padded(max_rows) if len(self.groups) == 1 and not others else None
        if group is None:
            return None
        one, n = copy(self), self.n_rows
        one.n_rows, one.groups, one.is_padded = group.n, [group], True
        pads = [0, self.numbers[2 * n - 1], *(-1 for _ in self.kv_groups)]
        columns = [self.numbers[i * n : (i + 1) * n] + [pad] * (group.n - n) for i, pad in enumerate(pads)]
        one.numbers = [*chain.from_iterable(columns), *group.numbers()]
        return one

    @property
    def reads_in_place(self) -> bool:
        """True if slices read pages in host memory without copying them."""
        return any(group.reads_in_place for group in self.groups)

    @property
    def is_ranked(self) -> bool:
        """True if a slice ranks its pages."""
        return any(group.ranked for group in self.groups)

    def on(self, device: torch.device) -> Tensor:
        """Return the metadata on a device."""
        metadata = torch.from_numpy(self.metadata)
        if device.type != "cpu":
            metadata = metadata.pin_memory().to(device, non_blocking=True)
        self.fill(metadata)
        return metadata


class Group:
    """A :class:`SliceGroup` on a device: B slices of n tokens.

    ``rows``: the group's rows of the step, slice after slice, as a range or as indices [B n].  ``spans`` [B, 2], of
    slices of more than MAX_DECODE_TOKENS: how far inside a chunk each starts, and how many of its n rows are tokens.
    """

    def __init__(
        self, layout: SliceGroup, metadata: Tensor, tables: Tables, n_rows: int, *, captured: bool = False
    ) -> None:
        b, n = len(layout.starts), layout.n
        self.layout, self.tables = layout, tables
        self.n_slices, self.n_tokens, self.is_padded = b, n, layout.n_valid > 0
        self.offset = 0 if self.is_padded else layout.offset  # a graph reads it from the spans
        self.max_length, self.reads_in_place = layout.max_length, layout.reads_in_place
        self.queries: list[tuple[PagedTensor, Tensor, float]] = []  # by layer that ranks: keys, [B, n, H, D], scale
        self.starts, self.full_starts = metadata[:b], metadata[b : 2 * b]
        self.table_rows, self.states = metadata[2 * b : 3 * b], metadata[3 * b : 4 * b]
        self.n_states, end = layout.n_states, (4 + layout.state_columns) * b
        self.kept_states = metadata[4 * b : end].view(b, layout.state_columns)
        self.spans = metadata[end : end + layout.span_columns * b].view(b, layout.span_columns)
        end += self.spans.numel()
        self.lows = metadata[end : end + b] if layout.lows else None
        end += len(layout.lows)
        self.host_lengths = metadata[end : end + b] if layout.reads_host else None
        end += len(layout.host_lengths)
        self.rows: slice | Tensor = (
            slice(layout.rows[0], layout.rows[0] + b * n) if layout.contiguous else metadata[end:]
        )
        self.is_whole_step = layout.contiguous and b * n == n_rows
        self._memo: dict[tuple[KvGroup, int, bool, bool], tuple[Pages, Tensor | Causal | None]] = {}
        ids = layout.live_rows
        self._on_host = host = metadata.device.type == "cpu" and not captured  # a graph would replay a baked-in address
        self.state_run = ids[0] if host and ids == list(range(ids[0], ids[0] + b)) else None
        self._kept = layout.rows_of(layout.states[0]) if host and b == 1 else None

    def token(self, token: int, operations: Operations) -> Group:
        """Return the group of one token of each slice, for layers without recurrent states.

        The bound of the attended length stays, because the CUDA graph of all tokens is valid for it.
        """
        starts, full = ([start + token for start in s] for s in (self.layout.starts, self.layout.full_starts))
        one = copy(self)
        one.layout = replace(
            self.layout, n=1, n_states=0, rows=list(range(self.n_slices)), starts=starts, full_starts=full
        )
        one.n_tokens, one.n_states, one.kept_states = 1, 0, self.kept_states[:, :0]
        one.starts, one.full_starts = (operations.offset(x, token) for x in (self.starts, self.full_starts))
        one.rows, one.is_whole_step = slice(0, self.n_slices), True
        one.queries, one._memo = [], {}
        return one

    def take(self, x: Tensor) -> Tensor:
        """Return the group's rows [B, n, ...] of the step's rows [T, ...]."""
        part = x if self.is_whole_step else x[self.rows]
        return part.view(self.n_slices, self.n_tokens, *x.shape[1:])

    def ask(self, keys: PagedTensor, q: Tensor, scale: float) -> None:
        """Record a layer's last queries for ranking pages; of short slices always, as their CUDA graphs do."""
        if self.n_tokens <= QUERIES:
            self.queries.append((keys, q, scale))
        elif self.layout.ranked:
            self.queries.append((keys, q[:, -QUERIES:].clone(), scale))

    def without_pads(self, x: Tensor) -> Tensor:
        """Return rows [B, n, ...] with zeros in place of pad rows."""
        pads = torch.arange(self.n_tokens, device=x.device) >= self.spans[:, 1:]
        return x.masked_fill(pads.view(*pads.shape, *[1] * (x.dim() - 2)), 0)

    def behind_tokens(self, x: Tensor, n: int) -> Tensor:
        """Return rows length .. length + n - 1 of x [B, rows, C], where length is the number of the slice's tokens."""
        at = self.spans[:, 1:] + torch.arange(n, device=x.device)
        return x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def load_state(self, pool: Tensor) -> Tensor:
        """Return the states of the slices' sequences, [B, *shape]; on the cpu a view if their ids are consecutive."""
        if self.state_run is not None:
            return pool.narrow(0, self.state_run, self.n_slices)
        return pool.index_select(0, self.states)

    def store_state(self, pool: Tensor, value: Tensor) -> None:
        """Write states back; ``value`` may be the result of :meth:`load_state`, updated in place."""
        if self.state_run is None:
            pool.index_copy_(0, self.states, value)
        else:
            target = pool.narrow(0, self.state_run, self.n_slices)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)

    def kept_row(self, pool: Tensor, token: int) -> Tensor | None:
        """Return a view of the state stored after a token, [1, *shape]; None if there is no such view."""
        at = token - self.n_tokens + self.n_states
        return None if self._kept is None or at < 0 else pool.narrow(0, self._kept[at], 1)

    def keep_states(self, pool: Tensor, token: int, values: Tensor) -> None:
        """Store the states after k tokens from ``token`` on, [B, k, *shape], of the last ``n_states`` tokens."""
        ids = self.kept_states[:, token : token + values.shape[1]]
        pool.index_copy_(0, ids.reshape(-1), values.flatten(0, 1))

    def query(self, kv_group: KvGroup) -> PagedQuery:
        """Return the group's queries, for attention that reads pages in place."""
        table = self.tables[kv_group]
        return PagedQuery(table, self.table_rows, self.starts_in(kv_group), self.n_tokens, self.max_length, self.lows)

    def host_query(self) -> PagedQuery:
        """Return the queries for pages in host memory, which need no causal mask because all precede the queries."""
        assert self.host_lengths is not None
        starts = self.host_lengths - self.n_tokens
        return PagedQuery(self.tables[HOST], self.table_rows, starts, self.n_tokens, self.layout.max_host_length)

    def starts_in(self, kv_group: KvGroup) -> Tensor:
        """Return the positions at which slices start in the table of a KV group, [B]."""
        return self.full_starts if kv_group is KvGroup.FULL else self.starts

    def keys(
        self, kv_group: KvGroup, window: int, causal: bool = True, symmetric: bool = False
    ) -> tuple[Pages, Tensor | Causal | None]:
        """Pages to read and the mask [B, 1, n, L] (None: all visible), shared by the layers that attend alike."""
        key = kv_group, window, causal, symmetric
        return self._memo.get(key) or self._memo.setdefault(key, self._keys(*key))

    def _keys(
        self, kv_group: KvGroup, window: int, causal: bool, symmetric: bool
    ) -> tuple[Pages, Tensor | Causal | None]:
        if self.is_padded:
            return self._bounded(kv_group, window, causal)
        end = self.layout.common_end(kv_group) if causal and not window else 0
        if end and is_flash_device(self.starts.device):
            index = self.tables[kv_group][:, : pages_of(end)].index_select(0, self.table_rows)
            return Pages(index.reshape(-1), self.n_slices, 0, end), Causal()
        return (self._padded if self.n_slices > 1 else self._single)(kv_group, window, causal, symmetric)

    def _ends(self) -> Tensor | None:
        """Return the last position that each row sees in a layer with a window [B, n]; None: its own."""
        if not self.layout.blocks:
            return None
        ends = torch.arange(self.n_tokens).repeat(self.n_slices, 1)
        for b, blocks in self.layout.blocks.items():
            for first, stop in blocks:
                ends[b, first:stop] = stop - 1
        return ends.to(self.starts.device) + self.starts[:, None]

    def _lows(self, kv_group: KvGroup, window: int) -> list[int]:
        """The first position that each slice sees."""
        lows = self.layout.lows or [0] * self.n_slices
        if not window:
            return lows
        return [
            max(low, first_visible(s, window)) for s, low in zip(self.layout.starts_in(kv_group), lows, strict=True)
        ]

    def _single(
        self, kv_group: KvGroup, window: int, causal: bool, symmetric: bool
    ) -> tuple[Pages, Tensor | Causal | None]:
        """One slice: exactly the positions it sees, so a decode row needs no mask."""
        [start], [low] = self.layout.starts_in(kv_group), self._lows(kv_group, window)
        end = start + self.n_tokens
        first, count = low // PAGE_TOKENS, pages_of(end) - low // PAGE_TOKENS
        sequence, table = self.layout.sequences[0], self.tables[kv_group]
        skip = low - first * PAGE_TOKENS
        if self._on_host and sequence.breaks.get(kv_group, 0) >= first + count:
            pages = Pages(None, 1, sequence.pages[kv_group][first] * PAGE_TOKENS + skip, end - low)
        else:
            index = table[:, first : first + count].index_select(0, self.table_rows).view(-1)
            pages = Pages(index, 1, skip, end - low)
        if self.n_tokens == 1 or not (causal or window):
            return pages, None
        device = self.starts.device
        ends = self._ends() if window else None
        if causal and window and ends is None and is_flash_device(device):
            return pages, Causal(window)
        queries = torch.arange(start, end, device=device)
        keys = torch.arange(low, end, device=device)
        return pages, visible(queries[None], keys[None], window, causal, None, ends, symmetric=symmetric)

    def _bounded(self, kv_group: KvGroup, window: int, causal: bool) -> tuple[Pages, Tensor]:
        """One slice of a graph: as many positions as the bound, from the first visible one on.

        Those behind its last token repeat it: masked numbers are the sequence's own.  A NaN in another one's page would
        come in, since it is NaN times a weight of 0, too.  Pad rows see what the last token sees.
        """
        start, device = self.starts_in(kv_group), self.starts.device
        last = start + self.spans[:, 1] - 1
        length = pages_of(window - 1 + self.n_tokens) * PAGE_TOKENS if window else self.max_length
        first = (start - window + 1).clamp_(min=0) if window else torch.zeros_like(start)
        positions = first + torch.arange(length, device=device)
        at = torch.minimum(positions, last)
        page = self.tables[kv_group].index_select(0, self.table_rows).view(-1).index_select(0, at // PAGE_TOKENS)
        slots = page.to(torch.int64) * PAGE_TOKENS + at % PAGE_TOKENS
        queries = torch.minimum(start + torch.arange(self.n_tokens, device=device), last)
        return Pages(slots, 1, 0, length, by_slot=True), visible(queries[None], positions[None], window, causal)

    def _padded(self, kv_group: KvGroup, window: int, causal: bool, symmetric: bool) -> tuple[Pages, Tensor | None]:
        """Several slices: padded to the pages of the longest one, and masked."""
        table, starts, device = self.tables[kv_group], self.starts_in(kv_group), self.starts.device
        on_host = self.layout.starts_in(kv_group)
        lows = [first_visible_page(s, window) if window else 0 for s in on_host]
        count = max((s + self.n_tokens - 1) // PAGE_TOKENS - low for s, low in zip(on_host, lows, strict=True)) + 1
        if window:
            first = (starts - window + 1).clamp_(min=0) // PAGE_TOKENS
            columns = (first[:, None] + torch.arange(count, device=device)).clamp_(max=table.shape[1] - 1)
            index = table.index_select(0, self.table_rows).gather(1, columns)
            positions = first[:, None] * PAGE_TOKENS + torch.arange(count * PAGE_TOKENS, device=device)
        else:
            index = table[:, :count].index_select(0, self.table_rows)
            positions = torch.arange(count * PAGE_TOKENS, device=device).expand(self.n_slices, -1)
        pages = Pages(index.reshape(-1), self.n_slices, 0, count * PAGE_TOKENS)
        queries = starts[:, None] + torch.arange(self.n_tokens, device=device)
        ends = self._ends() if window else None
        return pages, visible(queries, positions, window, causal, self.lows, ends, symmetric=symmetric)


class Batch:
    """A step on one device.  ``ids``, ``positions`` [T] int64; ``slots[kv_group]`` [T]: where keys and values go."""

    def __init__(self, layout: Layout, tables: Tables, metadata: Tensor, *, captured: bool = False) -> None:
        """``metadata``: that of the layout, on the device.  ``captured``: other metadata will take its place."""
        self.n_rows, self.device = layout.n_rows, metadata.device
        n, at = self.n_rows, (2 + len(layout.kv_groups)) * self.n_rows
        self.ids, self.positions = metadata[:n], metadata[n : 2 * n]
        self.slots: dict[KvGroup, Tensor] = {
            s: metadata[i * n : (i + 1) * n] for i, s in enumerate(layout.kv_groups, 2)
        }
        self.groups: list[Group] = []
        for group in layout.groups:
            n_columns = 4 + group.state_columns + group.span_columns + bool(group.lows) + group.reads_host
            n_columns += 0 if group.contiguous else group.n
            size = len(group.starts) * n_columns
            self.groups.append(Group(group, metadata[at : at + size], tables, n, captured=captured))
            at += size
        self.image_rows: Tensor | None = None
        self.axes: Tensor | None = None  # [2, T], rows and columns beside positions, which are times then
        if layout.image_rows:
            self.image_rows = torch.tensor(layout.image_rows, device=self.device)
        if layout.axes is not None:
            self.axes = torch.tensor(layout.axes, device=self.device)
        self.embeddings: Tensor | None = None  # of the image rows
        self.lora: LoraRows | None = None
        if layout.adapters:
            self.lora = LoraRows(metadata[at : at + n], None if captured else layout.adapters)
        self._rope_tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.carried: Tensor | None = None
        self.layer_inputs: Tensor | None = None
        self.probe: Callable[[Any, Tensor], None] | None = None  # of each attention layer, with its queries [T, H, D]

    def by_token(self, operations: Operations) -> list[Batch]:
        """Batches of the first, second, ... token of every slice, all of one length, to run one after the other."""
        [group] = self.groups
        b, n = group.n_slices, group.n_tokens
        positions, slots = self._columns(self.positions, n), {s: self._columns(x, n) for s, x in self.slots.items()}
        ids = self._columns(self.ids, n)
        axes = None if self.axes is None else torch.stack([self._columns(axis, n) for axis in self.axes], dim=1)
        out = []
        for token in range(n):
            one = copy(self)
            one.n_rows, one.ids, one.positions = b, ids[token], positions[token]
            one.axes, one.image_rows = None if axes is None else axes[token], None
            one.slots = {kv_group: x[token] for kv_group, x in slots.items()}
            one.groups, one._rope_tables = [group.token(token, operations)], {}
            out.append(one)
        return out

    @staticmethod
    def _columns(x: Tensor, n: int) -> Tensor:
        """[B n] of slices of n tokens -> [n, B]"""
        return x.view(-1, n).t().contiguous()

    def rope_tables(self, rope: Rope, operations: Operations) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's positions, computed once for all layers that share ``rope``."""
        found = self._rope_tables.get(id(rope))
        if found is None:
            if self.axes is None:
                found = operations.rope_tables(rope, self.positions)
            else:
                found = rope.tables(torch.cat((self.positions[None], self.axes)).t())
            self._rope_tables[id(rope)] = found
        return found

    def with_images(self, h: Tensor) -> Tensor:
        """Put the embedding rows of images into those of the step, in place, and return them."""
        if self.image_rows is not None and self.embeddings is not None:
            h.index_copy_(0, self.image_rows, self.embeddings.to(h.dtype))
        return h

    def map_groups(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``work(group, *inputs [B, n, ...]) -> [B, n, ...]`` for every group; results are joined to [T, ...]."""
        if len(self.groups) == 1 and self.groups[0].is_whole_step:
            return work(self.groups[0], *(self.groups[0].take(x) for x in inputs)).flatten(0, 1)
        out: Tensor | None = None
        for group in self.groups:
            part = work(group, *(group.take(x) for x in inputs)).flatten(0, 1)
            if out is None:
                out = part.new_empty(self.n_rows, *part.shape[1:])
            out[group.rows] = part
        assert out is not None
        return out
