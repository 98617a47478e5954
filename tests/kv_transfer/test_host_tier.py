"""Prefix slots in host memory: every row of what is found is that of its tokens, and memory stays within its limit.

A daemon is played by one that writes the checksum of all tokens up to a position in its row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryFile
from zlib import crc32

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_cache import PrefixIndex, PrefixSettings
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot, SlotSource
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.host_tier import HostSlot, HostTier
from lucevisor.kv_transfer.layout import slot_tensors, with_offsets
from lucevisor.model.spec import LayerSpec, StateTensor
from lucevisor.model.values import Dtype, KvGroup
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import SlotPlace, TransferTensor
from lucevisor.snapshots.policy import longest_match

WINDOW = 100
ROW = struct.Struct("<I")


def layers_of(kv_groups: Iterable[KvGroup]) -> list[LayerSpec]:
    made = {
        KvGroup.FULL: LayerSpec(
            0, KvGroup.FULL, {}, (StateTensor("k", (64, 1), None), StateTensor("v", (64, 1), None))
        ),
        KvGroup.WINDOW: LayerSpec(1, KvGroup.WINDOW, {}, (StateTensor("k", (64, 1), None),), window=WINDOW),
        KvGroup.RECURRENT: LayerSpec(2, KvGroup.RECURRENT, {}, (StateTensor("delta", (3,), Dtype.FLOAT32),)),
    }
    return [made[kv_group] for kv_group in sorted(kv_groups)]


class Tier:
    """A tier over the index of a model, whose slots are made of nothing but tokens."""

    def __init__(self, kv_groups: frozenset[KvGroup], limit: int | None, available: int = 1 << 30) -> None:
        self.layers, self.available = layers_of(kv_groups), available
        states = 400 if KvGroup.RECURRENT in kv_groups else 0
        self.pools = PagePools(kv_groups, PoolSizes(4000, 4000 if KvGroup.WINDOW in kv_groups else 0, states))
        prefix = PrefixSettings(max_slots=10_000, memory_bytes=1 << 40, min_tokens=1)
        window = WINDOW if KvGroup.WINDOW in kv_groups else None
        self.index = PrefixIndex(self.pools, prefix, window)
        self.memory = HostMemory(lambda: self.available)
        self.tier = HostTier(self.index, self.layers, (), Dtype.FLOAT32, self.memory, limit)
        self.whole_only = kv_groups != {KvGroup.FULL}

    def slot(self, tokens: Sequence[int]) -> PrefixSlot:
        """The slot of these tokens on the devices."""
        pages = {
            kv_group: self.pools[kv_group].allocate(-(-len(tokens) // 64))
            for kv_group in self.pools.kv_groups
            if kv_group is not KvGroup.RECURRENT
        }
        states = self.pools[KvGroup.RECURRENT].allocate(1) if KvGroup.RECURRENT in self.pools else [NO_STATE]
        assert states is not None

        def entries(kv_group: KvGroup, start: int, stop: int) -> list[int]:
            return (pages[kv_group] or [])[start:stop]

        slot = self.index.publish(tokens, SlotSource(len(tokens), entries, states[0], "prompt"), 0.0)
        for kv_group, ids in pages.items():
            self.pools[kv_group].release(ids or [])
        assert slot is not None
        return slot

    def copy(self, tokens: Sequence[int], *, whole: bool = True) -> HostSlot | None:
        """Copy the slot of these tokens to host memory; False: a daemon fails."""
        slot = self.slot(tokens)
        held = self.tier.begin(slot, 0.0)
        self.index.drop(slot)
        if held is None:
            return None
        for tensor in held.unit.contents:
            os.pwrite(held.unit.fd, content(tensor, tokens), tensor.offset)
        (self.tier.finish if whole else self.tier.discard)(held)
        return held

    def check(self, held: HostSlot, n_tokens: int) -> None:
        """What daemons read for the first tokens of a slot is theirs, each row once."""
        tokens, seen = held.tokens, dict.fromkeys((t.name for t in slot_tensors(self.layers, 1, Dtype.FLOAT32)), 0)
        for file, place in self.tier.units(held, SlotPlace(n_tokens), with_draft=False):
            for tensor in file.contents:
                assert os.pread(file.fd, tensor.n_bytes, tensor.offset) == content(tensor, tokens[: place.n_tokens])
                seen[tensor.name] += tensor.n_bytes
        wanted = {t.name: t.n_bytes for t in slot_tensors(self.layers, n_tokens, Dtype.FLOAT32)}
        assert seen == wanted


def content(tensor: TransferTensor, tokens: Sequence[int]) -> bytes:
    """What a daemon has of a tensor at the end of these tokens."""
    rows = checksums(TokenBuffer.of(tokens).packed())
    if tensor.kind == "delta":
        return rows[-ROW.size :] * 3
    return rows[ROW.size * tensor.first :]


@cache
def checksums(packed: bytes) -> bytes:
    """The checksum of all tokens up to each position."""
    found, value = [], 0
    for at in range(0, len(packed), 4):
        value = crc32(packed[at : at + 4], value)
        found.append(ROW.pack(value))
    return b"".join(found)


def text(kind: int, n: int) -> list[int]:
    """One of five texts that begin alike for some while."""
    shared = (0, 70, 130, 64, 200)[kind]
    return [i if i < shared else 1000 * (kind + 1) + i for i in range(n)]


KV_GROUPS = [
    {KvGroup.FULL},
    {KvGroup.FULL, KvGroup.RECURRENT},
    set(KvGroup),
    {KvGroup.RECURRENT},
    {KvGroup.FULL, KvGroup.WINDOW},
]
TEXTS = st.builds(text, st.integers(0, 4), st.sampled_from([1, 30, 64, 65, 128, 150, 192, 230, 256, 300, 511]))
LIMIT = 6000


@dataclass
class _Reading:
    held: HostSlot
    n_tokens: int


class TierMachine(RuleBasedStateMachine):
    """Copies, reads, failures and evictions in any order."""

    @initialize(kv_groups=st.sampled_from(KV_GROUPS), limited=st.booleans())
    def begin(self, kv_groups: set[KvGroup], limited: bool) -> None:
        self.made = Tier(frozenset(kv_groups), LIMIT if limited else None, 2 * LIMIT)
        self.tier, self.limited = self.made.tier, limited
        self.reading: list[_Reading] = []
        self.saving: list[HostSlot] = []
        self.wrong: list[list[int]] = []

        def on_evict(held: HostSlot) -> None:
            event("evicts")
            if len(self.saving) < 1:
                self.tier.pin(held)
                self.saving.append(held)

        self.tier.on_evict = on_evict

    @rule(tokens=TEXTS, whole=st.sampled_from([True, True, True, False]))
    def copy(self, tokens: list[int], whole: bool) -> None:
        self.made.copy(tokens, whole=whole)

    @rule(tokens=TEXTS)
    def find(self, tokens: list[int]) -> None:
        self.made.index.n_prompts += 1
        match = longest_match(self.tier.slots, tokens, len(tokens) - 1, whole_only=self.made.whole_only)
        known = [[*held.tokens] for held in self.tier.slots]
        common = [next((i for i, (a, b) in enumerate(zip(t, tokens[:-1], strict=False)) if a != b),
                       min(len(t), len(tokens) - 1)) for t in known]  # fmt: skip
        usable = [n for n, t in zip(common, known, strict=True) if n == len(t) or not self.made.whole_only]
        assert (match.n_tokens if match is not None else 0) == max(usable, default=0)
        if match is not None:
            assert isinstance(match.entry, HostSlot)
            self.tier.pin(match.entry)
            self.tier.touch(match.entry, 0.0)
            self.reading.append(_Reading(match.entry, match.n_tokens))

    @rule(index=st.integers(0, 50))
    def read(self, index: int) -> None:
        if self.reading:
            reading = self.reading.pop(index % len(self.reading))
            self.made.check(reading.held, reading.n_tokens)
            self.tier.unpin(reading.held)

    @rule()
    def save(self) -> None:
        if self.saving:
            held = self.saving.pop()
            tensors = with_offsets(slot_tensors(self.made.layers, held.n_tokens, Dtype.FLOAT32), 4096)
            with TemporaryFile() as file:
                assert self.tier.copy_to(file.fileno(), held, tensors) == held.n_bytes
                for tensor in tensors:
                    written = os.pread(file.fileno(), tensor.n_bytes, tensor.offset)
                    assert written == content(tensor, held.tokens)
            self.tier.unpin(held)

    @rule(tokens=TEXTS)
    def forget(self, tokens: list[int]) -> None:
        self.tier.forget(TokenBuffer(tokens))
        for held in self.tier.slots:
            assert [*held.tokens] != tokens[: held.n_tokens]

    @rule(available=st.sampled_from([LIMIT, 2 * LIMIT, 2000]))
    def others_take_memory(self, available: int) -> None:
        self.made.available = available

    @invariant()
    def what_is_held_is_right_and_within_the_limit(self) -> None:
        for held in self.tier.slots[:2]:
            self.made.check(held, held.n_tokens)
        n_bytes = self.made.memory.used(HostOwner.PREFIXES)
        held = [*self.tier.slots, *self.saving, *(reading.held for reading in self.reading)]
        needed = set[HostSlot]()
        while held:
            needed.add(at := held.pop())
            held += [at.base] if at.base is not None else []
        assert n_bytes == sum(tensor.n_bytes for one in needed for tensor in one.unit.contents)
        assert not self.limited or n_bytes <= LIMIT

    def teardown(self) -> None:
        for held in [*self.saving, *(reading.held for reading in self.reading)]:
            self.tier.unpin(held)
        self.tier.close()
        assert self.made.memory.used(HostOwner.PREFIXES) == 0


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_conversation_and_what_many_share_are_held_once() -> None:
    made = Tier(frozenset({KvGroup.FULL, KvGroup.RECURRENT}), 1 << 20)
    system = list(range(640))
    first = [made.copy([*system, *range(1000 * k, 1000 * k + 320)]) for k in range(1)]
    assert made.copy(system) is not None
    more = [made.copy([*system, *range(1000 * k, 1000 * k + 320)]) for k in range(1, 8)]
    assert all(held is not None and held.start == 640 for held in more)
    longer = made.copy([*system, *range(1000, 1320), *range(5, 105)])
    assert longer is not None
    assert (longer.base, longer.start) == (more[0], 960)
    token_bytes, state_bytes = 2 * 4, 12
    n_slots, n_tokens = 10, 960 + 640 + 7 * 320 + 100
    assert made.memory.used(HostOwner.PREFIXES) == n_slots * state_bytes + n_tokens * token_bytes
    assert first[0] is not None
    for held in made.tier.slots:
        made.check(held, held.n_tokens)
    made.tier.close()


@pytest.mark.parametrize("limit", [None, 1 << 40])
def test_the_limit_follows_what_is_free(limit: int | None) -> None:
    made = Tier(frozenset({KvGroup.FULL}), limit, available=20_000)
    assert made.copy(list(range(900))) is not None
    made.available = 12_800
    assert made.tier.limit_bytes == (7200 + 12_800) // 2
    assert made.copy(list(range(5000, 5600))) is not None
    assert [held.n_tokens for held in made.tier.slots] == [600]
    assert made.copy(list(range(9000, 11_000))) is None
    assert [held.n_tokens for held in made.tier.slots] == [600], "what could not be held anyway evicts nothing"
    made.tier.close()


def test_the_same_tokens_with_another_adapter_share_nothing() -> None:
    made, ids = Tier(frozenset({KvGroup.FULL}), 1 << 20), list(range(640))
    held = {adapter: made.copy(TokenBuffer(ids, adapter)) for adapter in ("", "a")}
    longer = made.copy(TokenBuffer([*ids, *range(5, 105)], "a"))
    assert longer is not None
    assert (longer.base, longer.start) == (held["a"], 640)
    assert made.copy(TokenBuffer([*ids, *range(5, 105)], "b")).start == 0
    for adapter, slot in held.items():
        match = longest_match(made.tier.slots, TokenBuffer([*ids, 9], adapter), 641, whole_only=False)
        assert match is not None
        assert match.n_tokens == 640
        assert match.entry.tokens.adapter == adapter
        assert slot is not None
    made.tier.forget(TokenBuffer([*ids, *range(5, 105)], "a"))
    assert {slot.adapter for slot in made.tier.slots} == {"", "b"}
    made.tier.close()
