"""Every request gets the tokens it would get alone, whatever happens around it.

Requests over toy daemons with any limits, with and without a drafter that comes and goes, and any widths of drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine import drafting, validation
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import ContextOverflow, GenerationRequest, RequestHandle, RequestState
from lucevisor.engine.spec_decode.controller import DrafterSuspension, RequestDrafts, SpecDecodeController
from lucevisor.engine.spec_decode.ngram import MAX_MATCH, NgramLookup, NgramMatch
from lucevisor.engine.step import StepPlan
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.model.pages import max_window_pages
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import Drafted, SamplingParams
from tests.engine.toy_engine import ALL_KV_GROUPS, HYBRID, LOST, ToyEngine, events_of, told
from tests.engine.toy_pipeline import VOCABULARY, ToyConstraint, mix


class AnyWidth(SpecDecodeController):
    """Any number of drafts for any step, padding and too many included; now and then none are asked for a while."""

    def __init__(self, max_drafts: int, seed: int) -> None:
        super().__init__(max_drafts)
        self.most, self.seed, self.n = max_drafts, seed, 0

    def _any(self) -> int:
        self.n += 1
        return mix(self.seed, self.n) % (self.most + 3)

    @property
    def no_drafts(self) -> str:
        return "says the test"

    def num_draft_tokens(self, own: RequestDrafts, n_decoding: int) -> int:
        found = self._any()
        return found if mix(self.seed, self.n // 16) % 2 else 0

    def num_verify_tokens(self, drafts: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        widths = [len(drafted.tokens) for _, drafted in drafts]
        return [max(widths), min(widths), self._any()][self._any() % 3]


class AnySuspension(DrafterSuspension):
    """Suspended and resumed after a few decodes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.n = seed, 0

    def is_due(self, *, idle: bool) -> bool:
        return self._n_steps > mix(self.seed, self.n) % 7 or (idle and self.suspended and self.n % 2 == 0)

    def toggle(self) -> None:
        super().toggle()
        self.n += 1


@contextmanager
def lookups(toy: ToyEngine, wrong: int) -> Iterator[None]:
    """N-grams that match in every second place, and of whose proposals one in ``wrong`` is wrong."""

    class Ngrams(NgramLookup):
        def match(self) -> NgramMatch | None:
            n = len(self._tokens)
            return NgramMatch(n, MAX_MATCH) if n % 2 else None

        def continuation(self, match: NgramMatch, n: int) -> list[int]:
            text = next(text for text in toy.texts.values() if text[: match.start] == self._tokens)
            found = text[match.start : match.start + n]
            return [(t + 1) % VOCABULARY if mix(match.start, i) % wrong == 0 else t for i, t in enumerate(found)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "NgramLookup", Ngrams)
        yield


@dataclass(frozen=True)
class Scenario:
    limits: EngineLimits
    n_stages: int
    with_output: bool
    wrong: int
    requests: tuple[GenerationRequest, ...]
    actions: tuple[tuple[str, int], ...]
    homes: tuple[int, ...] = ()


def limits_of(draw: st.DrawFn) -> EngineLimits:
    kv_groups = draw(
        st.sampled_from([HYBRID, ALL_KV_GROUPS, frozenset({KvGroup.FULL}), frozenset({KvGroup.FULL, KvGroup.WINDOW})])
    )
    max_sequences = draw(st.sampled_from([1, 2, 4, 8]))
    chunk = draw(st.sampled_from([7, 32, 64, 100]))
    window = draw(st.sampled_from([1, 40, 64, 130])) if KvGroup.WINDOW in kv_groups else None
    max_context = draw(st.sampled_from([150, 260]))
    max_drafts = draw(st.integers(0, 6))
    n_window = max_window_pages(window, chunk, max_context) + draw(st.integers(0, 3)) if window is not None else 0
    slots = draw(st.sampled_from([0, 0, 3]))
    n_states = max_sequences + draw(st.integers(0, 2)) + slots
    n_least, every = draw(st.sampled_from([1, 40])), draw(st.sampled_from([1, 4]))
    cached = PrefixSettings(max_slots=slots, memory_bytes=1 << 30, min_tokens=n_least, checkpoint_pages=every)
    n_full, n_host = draw(st.sampled_from([3, 4, 6, 12, 24])), draw(st.sampled_from([0, slots]))
    state_pages = draw(st.sampled_from([0, 1, 3, 4])) if kv_groups == HYBRID else 0
    if state_pages:  # of one memory, which holds all states, or a few
        n_full = max(n_full, 2 * state_pages)
        n_states = min(n_states - n_host, n_full // state_pages) + n_host
    return EngineLimits(
        max_sequences=max_sequences,
        max_context=max_context,
        prefill_chunk=chunk,
        max_step_tokens=chunk + max_sequences * (1 + max_drafts) + draw(st.sampled_from([0, 100])),
        kv_groups=kv_groups,
        pools=PoolSizes(
            n_full,
            n_window * draw(st.sampled_from([1, max_sequences])),
            n_states,
            host_states=n_host,
            draft_states=draw(st.integers(0, 2 * max_drafts)),
            state_pages=state_pages,
        ),
        window_tokens=window,
        prefix=cached,
        speculation=SpeculationSettings(max_drafts=max_drafts, drafter=max_drafts > 0, lookup=draw(st.booleans())),
    )


@st.composite
def scenarios(draw: st.DrawFn, *, shared_daemons: bool = False) -> Scenario:
    """``shared_daemons``: some have several stages, so steps are not posted."""
    limits = limits_of(draw)
    requests = []
    for i in range(draw(st.integers(1, 8))):
        n_prompt = draw(st.sampled_from([5, 30, 63, 64, 65, 100]))
        first = draw(st.sampled_from([0, 0, i]))  # some begin alike
        same = draw(st.sampled_from([0, 60, n_prompt]))
        prompt = [1 + i, *((first + k * k) % 97 if k < same else (i + k) % 97 for k in range(n_prompt - 1))]
        prompt[0] = 7 if first == 0 else prompt[0]
        requests.append(
            GenerationRequest(
                request_id=f"r{i}",
                prompt=tuple(prompt),
                max_tokens=draw(st.sampled_from([1, 20, 45, 90, 140])),
                sampling=SamplingParams(seed=i, presence_penalty=draw(st.sampled_from([0.0, 0.5]))),
                stop_ids=frozenset(draw(st.sampled_from([(), (), (5, 11, 50)]))),
                turn_boundaries=draw(st.sampled_from([(), (n_prompt // 2,)])),
                constraint=ToyConstraint(i) if draw(st.booleans()) else None,
            )
        )
    kinds = ["submit", "work", "work", "many", "many", "cancel", "lose", "attach", "detach", "swap"]
    actions = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 11)), min_size=10, max_size=40))
    wrong, n_stages = draw(st.sampled_from([0, 1, 3])), draw(st.integers(1, 3))
    homes = draw(st.sampled_from([(), tuple(s % 2 for s in range(n_stages))])) if shared_daemons else ()
    return Scenario(limits, n_stages, draw(st.booleans()), wrong, tuple(requests), tuple(actions), homes)


class Play:
    """Plays a scenario and checks accounts after every action."""

    def __init__(self, scenario: Scenario, hold_s: float = 0.0, journal_pages: int = 0) -> None:
        self.scenario = scenario
        self.toy = ToyEngine(
            scenario.limits,
            n_stages=scenario.n_stages,
            homes=scenario.homes,
            hold_s=hold_s,
            journal_pages=journal_pages,
            max_losses=1000,
        )
        for one in scenario.requests:
            answer = self.toy.model.alone(one.prompt, one.sampling, one.max_tokens, frozenset(), one.constraint)
            self.toy.texts[one.sampling.seed] = [*one.prompt, *answer]
        scheduled = self.toy.engine.core.scheduler.drafting
        scheduled.speculation = AnyWidth(scenario.limits.speculation.max_drafts, scenario.wrong)
        scheduled.suspension = self.suspension = AnySuspension(scenario.wrong + scenario.n_stages)
        self.waiting = list(scenario.requests)
        self.handles: dict[str, RequestHandle] = {}
        self.n_drafted = 0

    def act(self, kind: str, index: int) -> None:
        self.toy.now += 0.01
        match kind:
            case "submit" if self.waiting:
                one = self.waiting.pop(0)
                if len(one.prompt) < self.scenario.limits.capacity_tokens:
                    self.handles[one.request_id] = self.toy.engine.submit(one)
                else:
                    with pytest.raises(ContextOverflow):
                        self.toy.engine.submit(one)
            case "work":
                self.toy.work(index)
            case "many":
                for i in range(2 * index):
                    self.toy.work(i * index)
            case "cancel" if self.handles:
                [*self.handles.values()][index % len(self.handles)].cancel()
            case "lose" if index < 3:
                self.toy.lose()
                self.toy.attach()
                self.attach()
            case "attach" if not self.toy.engine.core.scheduler.drafting.attached:
                self.attach()
            case "detach":
                self.toy.lose_drafter()
            case "swap":
                self.toy.lose_drafter()
                self.attach()
        validation.check(self.toy.engine.core.scheduler)
        self.check_sharing()

    def attach(self) -> None:
        if not self.scenario.limits.speculation.drafter:
            return
        if self.toy.drafter is not None:
            self.n_drafted += self.toy.drafter.n_drafted
        self.toy.attach_drafter(with_output=self.scenario.with_output, wrong=self.scenario.wrong)

    def check_sharing(self) -> None:
        """Pages behind what is computed are their sequence's alone."""
        scheduler = self.toy.engine.core.scheduler
        for record in scheduler.running:
            assert record.live is not None
            first = -(-record.live.n_computed // 64)
            for kv_group in (KvGroup.FULL, KvGroup.WINDOW):
                if kv_group in scheduler.pools:
                    pages = record.live.table.entries(kv_group, first, 1 << 20)
                    assert all(scheduler.pools[kv_group].ref_count(page) == 1 for page in pages)

    def play(self) -> None:
        self.toy.attach()
        self.attach()
        for _ in range(4):
            self.act("submit", 0)
        for kind, index in self.scenario.actions:
            self.act(kind, index)
        while self.waiting:
            self.act("submit", 0)
        self.toy.run()

    async def check(self) -> None:
        for one in self.scenario.requests:
            if one.request_id not in self.handles:
                continue
            ids, finished = told(await events_of(self.handles[one.request_id]))
            expected = self.toy.alone(one)
            event(finished.reason)
            assert (finished.usage.prompt_tokens, finished.usage.generated_tokens) == (len(one.prompt), len(ids))
            assert min(finished.timings.queue_s, finished.timings.prefill_s, finished.timings.decode_s) >= 0
            if finished.reason in ("stop", "length"):
                assert ids == expected
                assert finished.reason == ("stop" if expected[-1] in one.stop_ids else "length")
            else:
                assert ids == expected[: len(ids)]
                assert (finished.error == LOST) == (finished.reason == "error")
        statistics = self.toy.engine.statistics()
        event(f"preempted: {statistics.preemptions > 0}")
        assert (statistics.running, statistics.queued, statistics.in_flight) == (0, 0, 0)
        assert all(use.used == use.evictable for use in statistics.pages.values())
        assert (self.toy.failures, self.toy.lost) == ([], [])
        drafts = statistics.drafts
        usages = [handle.finished.usage for handle in self.handles.values() if handle.finished is not None]
        assert drafts.n_accepted == sum(usage.accepted_tokens for usage in usages)
        assert drafts.n_verified == sum(usage.draft_tokens for usage in usages)
        assert drafts.n_accepted <= drafts.n_verified <= drafts.n_drafted
        assert all(usage.accepted_tokens <= usage.generated_tokens for usage in usages)
        event(f"suspended: {self.suspension.n > 1}")
        if self.toy.drafter is not None:
            event(f"drafted: {self.n_drafted + self.toy.drafter.n_drafted > 0}")


@settings(max_examples=240, deadline=None)
@given(scenarios(shared_daemons=True))
def test_every_request_gets_the_tokens_it_gets_alone(scenario: Scenario) -> None:
    play = Play(scenario)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()
    asyncio.run(play.check())


@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_who_has_drafts_is_verified_before_others_are_twice(scenario: Scenario) -> None:
    """Decoding sequences that are ready are left out by no more steps of decodes than there are micro-batches."""
    play = Play(scenario)
    scheduler = play.toy.engine.core.scheduler
    n_steps, ready_since, longest = 0, {}, 0
    plan_next = scheduler.next_plan

    def next_plan(now: float) -> StepPlan | None:
        nonlocal n_steps, longest
        plan = plan_next(now)
        if plan is not None and scheduler.in_flight[-1].decodes:
            n_steps += 1
        for record in scheduler.running:
            live = record.live
            assert live is not None
            ready = (
                record.state is RequestState.DECODE
                and not live.waiting_for_step
                and live.n_scheduled < len(record.tokens)
            )
            if not ready:
                ready_since.pop(live, None)
            longest = max(longest, n_steps - ready_since.setdefault(live, n_steps) if ready else 0)
        return plan

    with pytest.MonkeyPatch.context() as patch, lookups(play.toy, scenario.wrong + 1):
        patch.setattr(scheduler, "next_plan", next_plan)
        play.play()
    assert longest <= scenario.n_stages + 1
