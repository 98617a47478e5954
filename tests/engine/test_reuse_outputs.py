"""Whatever is remembered, however little memory there is: every request gets the tokens it gets alone, uncached."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine import validation
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest, RequestHandle
from lucevisor.kv.prefix_cache import PrefixSettings, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.pages import max_window_pages
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import SamplingParams
from tests.engine.toy_engine import ALL_SPACES, HYBRID, ToyEngine, events_of, told

SPACES = [HYBRID, ALL_SPACES, frozenset({Space.FULL}), frozenset({Space.FULL, Space.WINDOW})]
SYSTEMS = [[(s * 31 + k * k) % 97 for k in range(n)] for s, n in ((0, 130), (0, 64), (1, 75))]
"""System prompts; the second is how the first begins."""


@st.composite
def bounds(draw: st.DrawFn) -> EngineLimits:
    spaces = draw(st.sampled_from(SPACES))
    chunk = draw(st.sampled_from([7, 32, 64, 100]))
    window = draw(st.sampled_from([1, 40, 64, 130])) if Space.WINDOW in spaces else None
    max_sequences = draw(st.sampled_from([1, 2, 4]))
    n_states, in_host = draw(st.sampled_from([0, 1, 5])), draw(st.booleans())
    n_window = 0 if window is None else max_window_pages(window, chunk, 500) + draw(st.sampled_from([0, 2, 9]))
    return EngineLimits(
        max_sequences=max_sequences,
        max_context=500,
        prefill_chunk=chunk,
        max_step_tokens=chunk + max_sequences + draw(st.sampled_from([0, 150])),
        spaces=spaces,
        pools=PoolSizes(
            draw(st.sampled_from([5, 8, 12, 30])), n_window, max_sequences + n_states, n_states if in_host else 0
        ),
        window_tokens=window,
        prefix=PrefixSettings(
            max_slots=draw(st.sampled_from([1, 20, 20, 20])),
            memory_bytes=draw(st.sampled_from([9, 1000, 1000])),
            min_tokens=draw(st.sampled_from([0, 20, 70])),
            checkpoint_pages=1,
            unit_bytes={Space.FULL: 1, Space.WINDOW: 1, Space.RECURRENT: 3},
        ),
    )


@dataclass
class Conversation:
    """A chat that grows: each prompt is the last one, its answer, and what the user says next."""

    number: int
    prompt: list[int]
    turns: list[int] = field(default_factory=list)
    handle: RequestHandle | None = None
    n_asked: int = 0


class Play:
    """Conversations on a toy engine."""

    def __init__(self, limits: EngineLimits, n_stages: int, systems: list[int]) -> None:
        self.limits = limits
        self.toy = ToyEngine(limits, n_stages=n_stages)
        self.chats = [
            Conversation(i, list(SYSTEMS[system]), [len(SYSTEMS[system])]) for i, system in enumerate(systems)
        ]
        self.asked: list[tuple[GenerationRequest, RequestHandle]] = []
        self.pinned: list[PrefixSlot] = []
        self.reserved: list[Reservation] = []
        self.disturbed = False  # a request was cancelled or lost: some steps came to nothing

    def act(self, kind: str, index: int) -> None:
        self.toy.now += 0.01
        prefixes = self.toy.engine.prefixes
        match kind:
            case "say":
                self.say(self.chats[index % len(self.chats)], 5 + 23 * (index % 5), again=index == 11)
            case "work":
                for i in range(1 + 20 * index):
                    if not self.toy.work(i * index):
                        break
            case "cancel":
                if self.asked:
                    self.disturbed = True
                    self.asked[-1 - index % min(3, len(self.asked))][1].cancel()
            case "lose" if index < 4:
                self.disturbed = True
                self.toy.lose()
                self.toy.attach()
            case "pin" if prefixes.slots:
                self.pinned.append(prefixes.slots[index % len(prefixes.slots)])
                prefixes.pin(self.pinned[-1])
            case "reserve" if prefixes.enabled:
                reservation = prefixes.reserve(100 + index)
                if reservation is not None:
                    self.reserved.append(reservation)
            case "let go":
                self.let_go()
        validation.check(self.toy.engine.scheduler)

    def let_go(self) -> None:
        for slot in self.pinned:
            self.toy.engine.slots.release(slot)
        for reservation in self.reserved:
            self.toy.engine.slots.cancel_reservation(reservation)
        self.pinned, self.reserved = [], []

    def say(self, chat: Conversation, n_tokens: int, *, again: bool) -> None:
        """Ask the next question of a conversation, or the last one again."""
        if chat.handle is not None and chat.handle.finished is None:
            return
        if not again:
            first = 7 * chat.number + 13 * chat.n_asked
            chat.prompt += [(first + k * k * k) % 97 for k in range(n_tokens)]
            chat.turns.append(len(chat.prompt))
        chat.n_asked += 1
        one = GenerationRequest(
            request_id=f"c{chat.number}-{chat.n_asked}",
            prompt=(*chat.prompt, 96),  # what opens an answer
            max_tokens=1 + n_tokens,
            sampling=SamplingParams(seed=chat.number, presence_penalty=0.5 * (chat.number % 2)),
            turn_boundaries=tuple(chat.turns),
        )
        if len(one.prompt) + 1 > self.limits.capacity_tokens:
            return
        chat.handle = self.toy.engine.submit(one)
        self.asked.append((one, chat.handle))
        if not again:
            answer = self.toy.alone(one)
            chat.prompt += [96, *answer]
            chat.turns.append(len(chat.prompt))

    async def check(self) -> None:
        n_computed = 0
        for one, handle in self.asked:
            ids, finished = told(await events_of(handle))
            usage = finished.usage
            assert ids == self.toy.alone(one)[: len(ids)]
            assert finished.reason != "length" or len(ids) == len(self.toy.alone(one))
            assert 0 <= usage.cached_tokens < usage.prompt_tokens
            n_computed += usage.prompt_tokens - usage.cached_tokens + usage.generated_tokens - 1
        now = self.toy.engine.statistics()
        event(f"hits: {min(3, now.cache.n_hits)}, preempted: {now.preemptions > 0}")
        if not self.disturbed and not now.preemptions:
            assert now.steps.n_tokens == n_computed
            assert sum(now.cache.tokens.values()) == sum(h.finished.usage.cached_tokens for _, h in self.asked)
        assert (now.running, now.queued, now.in_flight, self.toy.failures) == (0, 0, 0, [])
        assert all(use.used == use.evictable for use in now.pages.values())
        assert now.cache.n_slots <= self.limits.prefix.max_slots
        assert now.cache.n_bytes <= self.limits.prefix.memory_bytes
        prefixes = self.toy.engine.prefixes
        assert all(prefixes.drop(slot) for slot in prefixes.slots)
        assert all(use.used == 0 for use in self.toy.engine.statistics().pages.values())


KINDS = ["say"] * 8 + ["work"] * 8 + ["cancel", "lose", "pin", "reserve", "let go"]


@settings(max_examples=100, deadline=None)
@given(
    bounds(),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), min_size=20, max_size=50),
)
def test_conversations_get_what_they_get_without_a_cache(
    limits: EngineLimits, n_stages: int, systems: list[int], actions: list[tuple[str, int]]
) -> None:
    play = Play(limits, n_stages, systems)
    play.toy.attach()
    for kind, index in actions:
        play.act(kind, index)
    play.let_go()
    play.toy.run()
    asyncio.run(play.check())
