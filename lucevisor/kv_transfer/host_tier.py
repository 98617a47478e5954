"""Host tier of the prefix cache (KV offloading to host memory): slots that daemons write and read like snapshots.

A slot holds the pages behind those of the longest slot that it begins with, so what chats share is held once.
Invariant: what can be found was written by every daemon; memory is released when no reader or slot needs it.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import structlog
from msgspec.structs import replace

from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.prefix_cache import PrefixIndex
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.kv_transfer.host_memory import HostMemory, HostMemoryShort
from lucevisor.kv_transfer.layout import slot_tensors
from lucevisor.kv_transfer.transfers import HostState, TransferFile
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.messages import SlotPlace, TransferTensor

log = structlog.get_logger("lucevisor.kv_transfer")


@dataclass(slots=True, eq=False)
class HostSlot:
    """A prefix slot in host memory.  ``start``: the first position whose pages it holds; those before are of ``base``.

    ``n_bytes``: of a whole restore.  ``pins``: readers, and slots based on it.  ``alive``: it can be found.
    """

    file: str
    packed_tokens: bytes
    adapter: str  # as of TokenBuffer
    base: HostSlot | None
    start: int
    state: HostState
    n_bytes: int
    with_draft: bool
    paged_out: PagedOut | None
    last_use: int  # in prompts of the index
    used_at: float
    pins: int = 0
    alive: bool = False
    released: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.packed_tokens) // TOKEN_BYTES

    @property
    def tokens(self) -> TokenBuffer:
        return TokenBuffer.from_packed(self.packed_tokens, self.adapter)

    @property
    def unit(self) -> TransferFile:
        return self.state.units[0]

    @property
    def value(self) -> int:
        return self.n_tokens - self.start


class HostTier:
    """The slots of one model.  ``limit_bytes`` None: half of what is free.  ``on_evict``: a pin delays that."""

    def __init__(
        self,
        index: PrefixIndex,
        layers: Sequence[LayerSpec],
        draft_layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        memory: HostMemory,
        limit_bytes: int | None,
    ) -> None:
        self._index, self._layers, self._draft_layers, self._kv_dtype = index, layers, draft_layers, kv_dtype
        self._memory, self._limit_bytes = memory, limit_bytes
        both = [(False, layer) for layer in layers] + [(True, layer) for layer in draft_layers]
        self._full = {(is_draft, layer.index) for is_draft, layer in both if layer.kv_group is KvGroup.FULL}
        self._max_slots = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8  # each has a file
        self._slots: list[HostSlot] = []  # those that can be found, least recently used first
        self._numbers = count(1)
        self.on_evict: Callable[[HostSlot], None] = lambda _: None

    @property
    def slots(self) -> Sequence[HostSlot]:
        """What can be found, the last used first."""
        return self._slots[::-1]

    @property
    def n_bytes(self) -> int:
        return self._memory.used(HostOwner.PREFIXES)

    @property
    def limit_bytes(self) -> int:
        """The most that all slots take, as of now."""
        share = self._memory.share(HostOwner.PREFIXES)
        return share if self._limit_bytes is None else min(self._limit_bytes, share)

    # ---- write

    def begin(self, slot: PrefixSlot, now: float) -> HostSlot | None:
        """Take memory for a slot, evicting others if need be; ``finish`` or ``discard`` it.  None: no room."""
        tokens, n, drafted = slot.tokens, slot.n_tokens, bool(self._draft_layers) and self._index.drafted(slot)
        base = None if slot.paged_out is not None else self._longest_base(tokens, drafted=drafted)
        start = 0 if base is None else _whole_pages(base)
        draft_layers = self._draft_layers if drafted else ()
        tensors = slot_tensors(self._layers, n, self._kv_dtype, draft_layers, start)
        everything = slot_tensors(self._layers, n, self._kv_dtype, draft_layers) if start else tensors
        if base is not None:
            base.pins += 1
        state = self._open(tensors)
        if state is None:
            self.unpin(base)
            return None
        return HostSlot(
            f"host slot {next(self._numbers)}", tokens.packed(), tokens.adapter, base, start, state,
            _bytes_of(everything), drafted, slot.paged_out, self._index.n_prompts, now,
        )  # fmt: skip

    def finish(self, held: HostSlot) -> None:
        """Let a slot be found, in place of others of the same tokens: every daemon has written its part."""
        same = held.packed_tokens, held.adapter
        for other in [other for other in self._slots if (other.packed_tokens, other.adapter) == same]:
            self.discard(other)
        held.alive = True
        self._slots.append(held)

    def discard(self, held: HostSlot) -> None:
        """Let a slot be found no more, and release its memory when nothing needs it."""
        if held.alive:
            held.alive = False
            self._slots.remove(held)
        self._release(held)

    def forget(self, tokens: TokenBuffer) -> None:
        """Discard the slots that tokens begin with, and those based on them: what they hold is wrong."""
        packed = tokens.packed()
        for held in self.slots:
            if held.adapter == tokens.adapter and any(packed.startswith(one.packed_tokens) for one in _chain(held)):
                self.discard(held)

    def close(self) -> None:
        for held in self.slots:
            self.discard(held)

    # ---- read

    def touch(self, held: HostSlot, now: float) -> None:
        for one in [*_chain(held)][::-1]:
            one.last_use, one.used_at = self._index.n_prompts, now
            if one.alive:
                self._slots.remove(one)
                self._slots.append(one)

    def pin(self, held: HostSlot) -> None:
        held.pins += 1

    def unpin(self, held: HostSlot | None) -> None:
        """Remove a pin; with the last one goes a slot that cannot be found."""
        if held is not None:
            held.pins -= 1
            if not held.alive:
                self._release(held)

    def units(self, held: HostSlot, place: SlotPlace, *, with_draft: bool) -> list[tuple[TransferFile, SlotPlace]]:
        """Return what daemons read for as many tokens of a slot as ``place`` has."""
        return [
            (TransferFile(one.file, one.unit.fd, tensors, with_draft), replace(place, n_tokens=stop))
            for one, tensors, stop in self._parts(held, place.n_tokens)
        ]

    def copy_to(self, fd: int, held: HostSlot, tensors: Iterable[TransferTensor]) -> int:
        """Write the tensors of a slot to their places in a file; return the bytes.  Raises OSError."""
        n_copied, parts = 0, self._parts(held, held.n_tokens)[::-1]
        for tensor in tensors:
            os.lseek(fd, tensor.offset, os.SEEK_SET)
            for one, contents, _ in parts:
                for source in contents:
                    at, end = source.offset, source.offset + source.n_bytes
                    while source.name == tensor.name and at < end:
                        if not (n_moved := os.sendfile(fd, one.unit.fd, at, end - at)):
                            raise OSError(errno.EIO, f"{one.file} ends at byte {at}")
                        at += n_moved
                    n_copied += source.n_bytes if source.name == tensor.name else 0
        return n_copied

    # ---- inside

    def _parts(self, held: HostSlot, n_tokens: int) -> list[tuple[HostSlot, list[TransferTensor], int]]:
        """Return the slots that hold the first tokens of one, which tensors of them, and up to where."""
        parts, stop = [], n_tokens
        for one in _chain(held):
            contents = list(one.unit.contents)
            if stop < one.n_tokens or one is not held:
                contents = [_first_rows(t, stop) for t in contents if (t.draft, t.layer) in self._full]
            if one.start < stop:
                parts.append((one, contents, stop))
                stop = one.start
        return parts

    def _longest_base(self, tokens: TokenBuffer, *, drafted: bool) -> HostSlot | None:
        """Return the slot whose whole pages a text begins with, the most of them."""
        packed = tokens.packed()
        fitting = (
            held
            for held in (self._slots if self._full else ())
            if held.adapter == tokens.adapter and held.paged_out is None and (held.with_draft or not drafted)
            and 0 < _whole_pages(held) < len(packed) // TOKEN_BYTES
            and packed.startswith(held.packed_tokens[: _whole_pages(held) * TOKEN_BYTES])
        )  # fmt: skip
        return max(fitting, key=_whole_pages, default=None)

    def _open(self, tensors: Sequence[TransferTensor]) -> HostState | None:
        n_bytes, limit = _bytes_of(tensors), self.limit_bytes
        while n_bytes <= limit and (self.n_bytes + n_bytes > limit or len(self._slots) >= self._max_slots):
            idle = [held for held in self._slots if not held.pins]
            if not idle:
                break
            victim = min(idle, key=lambda held: held.value / (self._index.n_prompts - held.last_use + 1))
            self.on_evict(victim)
            self.discard(victim)
        try:
            return HostState(self._memory, HostOwner.PREFIXES, "a prefix slot", [tensors], limit)
        except HostMemoryShort as error:
            log.debug("prefix slot not copied to host memory", reason=str(error))
            return None

    def _release(self, held: HostSlot) -> None:
        if not held.pins and not held.released:
            held.released = True
            held.state.close()
            self.unpin(held.base)


def _chain(held: HostSlot) -> Iterator[HostSlot]:
    at: HostSlot | None = held
    while at is not None:
        yield at
        at = at.base


def _whole_pages(held: HostSlot) -> int:
    return held.n_tokens // PAGE_TOKENS * PAGE_TOKENS


def _first_rows(tensor: TransferTensor, stop: int) -> TransferTensor:
    n, n_rows = stop - tensor.first, tensor.shape[0]
    return replace(tensor, shape=(n, *tensor.shape[1:]), n_bytes=tensor.n_bytes // n_rows * n)


def _bytes_of(tensors: Iterable[TransferTensor]) -> int:
    return sum(tensor.n_bytes for tensor in tensors)
