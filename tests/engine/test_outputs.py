"""The property of the whole engine: every request gets the tokens it would get alone, whatever happens around it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine import validation
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import (
    ContextOverflow,
    GenerationRequest,
    RequestHandle,
)
from lucevisor.model.pages import max_window_pages
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import SamplingParams
from tests.engine.toy_engine import ALL_SPACES, HYBRID, LOST, ToyEngine, events_of, told


@dataclass(frozen=True)
class Scenario:
    limits: EngineLimits
    n_stages: int
    homes: tuple[int, ...]
    requests: tuple[GenerationRequest, ...]
    actions: tuple[tuple[str, int], ...]


@st.composite
def scenarios(draw: st.DrawFn, *, crowded: bool = False) -> Scenario:
    """``crowded``: prompts that fit beside each other and outputs that do not, so that requests are preempted."""
    spaces = draw(st.sampled_from([HYBRID, ALL_SPACES, frozenset({Space.FULL}), frozenset({Space.FULL, Space.WINDOW})]))
    n_stages = draw(st.integers(1, 3 if crowded else 4))
    max_sequences = 5 if crowded else draw(st.sampled_from([1, 2, 3, 5]))
    chunk = draw(st.sampled_from([7, 32, 64, 100]))
    window = draw(st.sampled_from([1, 40, 64, 130])) if Space.WINDOW in spaces else None
    max_context = draw(st.sampled_from([150, 260, 400]))
    full_pages = draw(st.sampled_from([4, 5, 6] if crowded else [2, 3, 4, 5, 7]))
    window_pages = 0
    if window is not None:
        window_pages = max_window_pages(window, chunk, max_context) + draw(st.integers(0, 3))
    bounds = EngineLimits(
        max_sequences=max_sequences,
        max_context=max_context,
        prefill_chunk=chunk,
        max_step_tokens=chunk + max_sequences + draw(st.sampled_from([0, 30, 200])),
        spaces=spaces,
        pools=PoolSizes(full_pages, window_pages, max_sequences),
        window_tokens=window,
    )
    requests = []
    for i in range(draw(st.sampled_from([4, 5, 6] if crowded else [1, 2, 4, 6, 8]))):
        n_prompt = draw(st.sampled_from([5, 30, 50, 62] if crowded else [1, 5, 30, 50, 63, 64, 65, 120, 200]))
        first = draw(st.integers(0, 96))
        requests.append(
            GenerationRequest(
                request_id=f"r{i}",
                prompt=tuple((first + k * k) % 97 for k in range(n_prompt)),
                max_tokens=draw(st.sampled_from([110, 140] if crowded else [1, 2, 20, 70, 110])),
                sampling=SamplingParams(
                    seed=draw(st.integers(0, 3)), presence_penalty=draw(st.sampled_from([0.0, 0.5]))
                ),
                stop_ids=frozenset(() if crowded else draw(st.sampled_from([(), (5,), (5, 11, 50)]))),
            )
        )
    kinds = st.sampled_from(
        ["submit", "work", "many"] if crowded else ["submit", "submit", "submit", "work", "many", "cancel", "lose"]
    )
    actions = draw(st.lists(st.tuples(kinds, st.integers(0, 11)), min_size=10, max_size=40))
    homes = draw(st.sampled_from([(), tuple(s % 2 for s in range(n_stages))]))
    return Scenario(bounds, n_stages, homes, tuple(requests), tuple(actions))


class Play:
    """Plays a scenario on a toy engine and checks what its requests were told."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.toy = ToyEngine(scenario.limits, n_stages=scenario.n_stages, homes=scenario.homes)
        self.waiting = list(scenario.requests)
        self.handles: dict[str, RequestHandle] = {}

    def submit(self) -> None:
        if self.waiting:
            one = self.waiting.pop(0)
            if len(one.prompt) + 1 > self.scenario.limits.capacity_tokens:
                with pytest.raises(ContextOverflow):
                    self.toy.engine.submit(one)
            else:
                self.handles[one.request_id] = self.toy.engine.submit(one)

    def act(self, kind: str, index: int) -> None:
        self.toy.now += 0.01
        match kind:
            case "submit":
                self.submit()
            case "work":
                self.toy.work(index)
            case "many":
                for i in range(4 * index):
                    self.toy.work(i * index)
            case "cancel":
                handles = list(self.handles.values())
                if handles:
                    handles[index % len(handles)].cancel()
            case "lose" if index < 4:
                self.toy.lose()
                self.toy.attach()
        validation.check(self.toy.engine.scheduler)

    def play(self) -> None:
        self.toy.attach()
        for kind, index in self.scenario.actions:
            self.act(kind, index)
        while self.waiting:
            self.submit()
        self.toy.run()

    async def check(self) -> None:
        for one in self.scenario.requests:
            if one.request_id not in self.handles:
                continue
            ids, finished = told(await events_of(self.handles[one.request_id]))
            expected = self.toy.alone(one)
            event(finished.reason)
            assert finished.usage.prompt_tokens == len(one.prompt)
            assert finished.usage.generated_tokens == len(ids)
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
        assert all(use.used == 0 for use in statistics.pages.values())
        assert self.toy.failures == []


@settings(max_examples=100, deadline=None)
@given(scenarios())
def test_every_request_gets_the_tokens_it_gets_alone(scenario: Scenario) -> None:
    play = Play(scenario)
    play.play()
    asyncio.run(play.check())


@settings(max_examples=10, deadline=None)
@given(scenarios(crowded=True))
def test_preemption_changes_no_tokens(scenario: Scenario) -> None:
    play = Play(scenario)
    play.play()
    asyncio.run(play.check())
