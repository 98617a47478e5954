"""Mapping between rows of this daemon's pools and bytes of a snapshot file.

The supervisor chose the file's layout; this module finds each tensor in the pools and splits it into segments.
Invariant: only rows of the slot's positions
are touched; a tensor that does not fit the pools raises StateError before any byte moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from daemons.errors import StateError
from daemons.kv.pools import Pools
from daemons.ops.paged import PagedTensor, Q8Pages
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Q8_GROUP, SCALE, KvGroup, Tier, q8_groups
from lucevisor.protocol.messages import SlotPlace, TransferTensor

SEGMENT_BYTES = 8 << 20
"""Bytes of a segment: enough for full speed, few enough to cancel between two of them."""
MAX_RANGES = 256
"""Row ranges of a segment, each an iovec of one preadv or pwritev; the kernel takes 1024."""

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}
FILE = {kind: name for name, kind in TORCH.items()}
"""torch dtype to the file's name for it."""

RowRange = tuple[int, int]
"""(first row in the pool, number of rows)."""


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Rows of a pool and their place in the file.  ``memory``: the pool as uint8 [rows, bytes of a row].

    ``device``: where ``memory`` is; the cpu for states and pages that a GPU's pool keeps in host memory.
    """

    name: str
    device: torch.device
    memory: Tensor
    ranges: list[RowRange]
    offset: int

    @property
    def n_rows(self) -> int:
        return n_rows(self.ranges)

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.memory.shape[1]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Rows of the file in another number format than the pool's.  ``scale_offset`` -1: not q8_0."""

    name: str
    device: torch.device
    target: PagedTensor
    dtype: str
    shape: tuple[int, ...]  # of a row in the file
    ranges: list[RowRange]
    offset: int
    scale_offset: int

    @property
    def n_rows(self) -> int:
        return n_rows(self.ranges)

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, scales included."""
        row = prod(self.shape) * TORCH[self.dtype].itemsize
        return self.n_rows * (row + (prod(self.shape) // Q8_GROUP * 2 if self.scale_offset >= 0 else 0))

    @property
    def width(self) -> int:
        """Innermost extent that the model uses; q8_0 pads it to a multiple of 32."""
        return self.target.width if isinstance(self.target, Q8Pages) else self.target.pages.shape[-1]

    @property
    def formats(self) -> str:
        here = "q8_0" if isinstance(self.target, Q8Pages) else FILE[self.target.pages.dtype]
        return f"{'q8_0' if self.scale_offset >= 0 else self.dtype} to {here}"


@dataclass(frozen=True, slots=True)
class DraftPools:
    """The layers of a drafter and their pools."""

    layers: Sequence[LayerSpec]
    pools: Pools


class StateMap:
    """Finds the state of this daemon's layers, and of the drafter's if it runs here, in their pools."""

    def __init__(self, spec: ModelSpec, pools: Iterable[Pools], draft: DraftPools | None = None) -> None:
        of_target = [(False, spec.layers, one) for one in pools]
        of_draft = [] if draft is None else [(True, draft.layers, draft.pools)]
        self._layers: dict[tuple[bool, int], tuple[LayerSpec, Pools]] = {
            (is_draft, i): (layers[i], one)
            for is_draft, layers, one in (*of_target, *of_draft)
            for i in range(one.layers.start, one.layers.stop)
        }
        self._pools = [one for _, _, one in (*of_target, *of_draft)]

    @property
    def devices(self) -> list[torch.device]:
        return list(dict.fromkeys(pools.device for _, pools in self._layers.values()))

    def wait_for_page_outs(self) -> None:
        """Make the devices' streams wait for pages that are being copied to host memory."""
        for pools in self._pools:
            pools.finish_page_outs()

    @torch.inference_mode()
    def take(self, place: SlotPlace) -> None:
        """The pages and the state of ``place`` are about to get other bytes: key sketches of host pages count no more,
        and pages in the memory of a state become zeros.
        """
        for pools in self._pools:
            pools.forget_sketches(place.full)
            pools.take_pages(place.full)
            pools.take_state(place.state)

    def to_save(self, place: SlotPlace, tensors: Sequence[TransferTensor]) -> list[StateSegment]:
        """Return the segments of a Save.  Raises StateError."""
        segments: list[StateSegment] = []
        for tensor in tensors:
            if self._kv_group(tensor) is not KvGroup.RECURRENT and place.n_tokens != tensor.first + tensor.shape[0]:
                raise _misfit(tensor, f"a slot of {place.n_tokens} tokens")
            segments += self._segments(place, tensor)
        return segments

    def to_restore(
        self, place: SlotPlace, tensors: Sequence[TransferTensor]
    ) -> tuple[list[StateSegment], list[Conversion]]:
        """Return the segments of a Restore to copy, and those to convert.  Raises StateError."""
        scales = {(t.draft, t.layer, t.kind): t for t in tensors if t.kind.endswith(SCALE)}
        segments: list[StateSegment] = []
        conversions: list[Conversion] = []
        for tensor in tensors:
            if tensor.kind.endswith(SCALE):
                continue
            scale = scales.pop((tensor.draft, tensor.layer, tensor.kind + SCALE), None)
            if self._same_format(tensor, scale):
                segments += self._segments(place, tensor)
                segments += self._segments(place, scale) if scale is not None else []
            else:
                conversions += self._conversions(place, tensor, scale)
        for tensor in scales.values():
            raise _misfit(tensor, "its codes are missing")
        return segments, conversions

    # ---- one tensor

    def _segments(self, place: SlotPlace, tensor: TransferTensor) -> Iterator[StateSegment]:
        if self._kv_group(tensor) is KvGroup.RECURRENT:
            rows, row = self._state(tensor, place.state)
            parts, shape = [(rows, [(row, 1)])], tensor.shape
        else:
            in_tier = {tier: self._slots(tensor, tier) for tier in self._tiers(tensor)}
            found = self._row_ranges(place, tensor)
            parts, shape = [(in_tier[tier], ranges) for tier, ranges in found], tensor.shape[1:]
        at = tensor.offset
        for rows, ranges in parts:
            if FILE[rows.dtype] != tensor.dtype or rows.shape[1:] != shape:
                raise _misfit(tensor, f"the pool's rows are {FILE[rows.dtype]} {list(rows.shape[1:])}")
            memory = rows.view(torch.uint8).view(rows.shape[0], -1)
            for part in split_ranges(ranges, max(1, SEGMENT_BYTES // memory.shape[1])):
                segment = StateSegment(tensor.name, rows.device, memory, part, at)
                at += segment.n_bytes
                yield segment

    def _conversions(
        self, place: SlotPlace, tensor: TransferTensor, scale: TransferTensor | None
    ) -> Iterator[Conversion]:
        targets = {tier: self._paged(tensor, tier) for tier in self._tiers(tensor)}
        target = targets[Tier.DEVICE]
        pool_rows = target.codes if isinstance(target, Q8Pages) else target.pages
        width = target.width if isinstance(target, Q8Pages) else pool_rows.shape[-1]
        stored = width if scale is None else q8_groups(width) * Q8_GROUP
        if tensor.shape[1:] != (*pool_rows.shape[2:-1], stored) or (scale is None) != (tensor.dtype != "I8"):
            raise _misfit(tensor, f"the pool's rows are {[*pool_rows.shape[2:-1], width]}")
        row_bytes = tensor.n_bytes // max(tensor.shape[0], 1)
        scale_bytes = 0 if scale is None else scale.n_bytes // max(scale.shape[0], 1)
        devices = {Tier.DEVICE: self._pool(tensor).device, Tier.HOST: torch.device("cpu")}
        done = 0
        for tier, found in self._row_ranges(place, tensor):
            for ranges in split_ranges(found, max(1, SEGMENT_BYTES // max(row_bytes, 1))):
                yield Conversion(
                    name=tensor.name,
                    device=devices[tier],
                    target=targets[tier],
                    dtype=tensor.dtype,
                    shape=tensor.shape[1:],
                    ranges=ranges,
                    offset=tensor.offset + done * row_bytes,
                    scale_offset=-1 if scale is None else scale.offset + done * scale_bytes,
                )
                done += n_rows(ranges)

    def _same_format(self, tensor: TransferTensor, scale: TransferTensor | None) -> bool:
        if self._kv_group(tensor) is KvGroup.RECURRENT:
            return True  # its format is fixed by the model; any other is rejected
        paged = self._paged(tensor)
        if isinstance(paged, Q8Pages):
            return scale is not None
        return scale is None and FILE[paged.pages.dtype] == tensor.dtype

    # ---- where it lies

    def _layer(self, tensor: TransferTensor) -> tuple[LayerSpec, Pools]:
        found = self._layers.get((tensor.draft, tensor.layer))
        if found is None:
            whose = "of the drafter " if tensor.draft else ""
            raise StateError(f"tensor {tensor.name}", f"layer {tensor.layer} {whose}is not on this daemon")
        return found

    def _pool(self, tensor: TransferTensor) -> Pools:
        return self._layer(tensor)[1]

    def _kv_group(self, tensor: TransferTensor) -> KvGroup:
        return self._layer(tensor)[0].kv_group

    def _tiers(self, tensor: TransferTensor) -> list[Tier]:
        """Return the memories that pages of the tensor's layer may lie in."""
        return [Tier.DEVICE] if self._paged(tensor).host is None else [Tier.DEVICE, Tier.HOST]

    def _paged(self, tensor: TransferTensor, tier: Tier = Tier.DEVICE) -> PagedTensor:
        try:
            found = self._pool(tensor).paged(tensor.layer, tensor.kind.removesuffix(SCALE))
        except KeyError:
            raise _misfit(tensor, "the layer has no such pages") from None
        return found if tier is Tier.DEVICE or found.host is None else found.over(found.host.parts)

    def _slots(self, tensor: TransferTensor, tier: Tier) -> Tensor:
        """The slots [pages * 64, ...], on the device or in host memory, that hold the tensor's positions."""
        paged = self._paged(tensor, tier)
        is_scale = tensor.kind.endswith(SCALE)
        if not isinstance(paged, Q8Pages):
            if is_scale:
                raise _misfit(tensor, "the pool does not hold q8_0")
            return paged.slots
        pages = paged.scales if is_scale else paged.codes
        return pages.view(-1, *pages.shape[2:])

    def _state(self, tensor: TransferTensor, state: int) -> tuple[Tensor, int]:
        """The rows that hold a recurrent state, and its index among them."""
        pool = self._pool(tensor)
        n = pool.units[KvGroup.RECURRENT]
        if not 0 <= state < n:
            raise StateError(f"tensor {tensor.name}", f"state {state} is outside the pool of {n}")
        try:
            return pool.rows_with(tensor.layer, tensor.kind, state)
        except KeyError:
            raise _misfit(tensor, "the layer has no such state") from None

    def _row_ranges(self, place: SlotPlace, tensor: TransferTensor) -> list[tuple[Tier, list[RowRange]]]:
        """Slots ``page * 64 + offset`` of positions ``tensor.first`` .. ``place.n_tokens``, adjacent ones merged, in
        runs on the device and in host memory.
        """
        kv_group = self._kv_group(tensor)
        pages, base = (place.full, 0) if kv_group is KvGroup.FULL else (place.window, place.first_window)
        end = tensor.first + tensor.shape[0]
        if not tensor.first <= place.n_tokens <= end or (kv_group is KvGroup.WINDOW and place.n_tokens != end):
            raise _misfit(tensor, f"a slot of {place.n_tokens} tokens")
        found: list[tuple[Tier, list[RowRange]]] = []
        position = tensor.first
        while position < place.n_tokens:
            entry, inside = divmod(position, PAGE_TOKENS)
            n = min(PAGE_TOKENS - inside, place.n_tokens - position)
            if not 0 <= entry - base < len(pages):
                raise StateError(f"tensor {tensor.name}", f"no page is given for position {position}")
            tier, row = self._pool(tensor).place_of_page(kv_group, pages[entry - base], f"tensor {tensor.name}")
            if not found or found[-1][0] is not tier:
                found.append((tier, []))
            ranges, slot = found[-1][1], row * PAGE_TOKENS + inside
            if ranges and sum(ranges[-1]) == slot:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + n)
            else:
                ranges.append((slot, n))
            position += n
        return found


def _misfit(tensor: TransferTensor, here: str) -> StateError:
    return StateError(f"tensor {tensor.name}", f"{tensor.dtype} {list(tensor.shape)} does not fit: {here}")


def n_rows(ranges: Iterable[RowRange]) -> int:
    return sum(n for _, n in ranges)


def split_ranges(ranges: Iterable[RowRange], max_rows: int) -> Iterator[list[RowRange]]:
    """Split the ranges into lists of at most ``max_rows`` rows and MAX_RANGES ranges."""
    part: list[RowRange] = []
    room = max_rows
    for first, n in ranges:
        while n:
            taken = min(n, room)
            part.append((first, taken))
            first, n, room = first + taken, n - taken, room - taken
            if room == 0 or len(part) == MAX_RANGES:
                yield part
                part, room = [], max_rows
    if part:
        yield part
