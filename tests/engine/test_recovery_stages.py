"""Lost stages are rebuilt alone, from the journal: the others keep what they have, and no token changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.kv.residency import Residency
from lucevisor.protocol.loading import PoolSizes
from tests.engine.test_speculation_outputs import Play, Scenario, lookups, scenarios
from tests.engine.toy_engine import ALL_SPACES, ToyEngine, events_of, limits, request, told


def ready(n_stages: int = 3, **changes: object) -> ToyEngine:
    toy = ToyEngine(limits(**changes), n_stages=n_stages, hold_s=60.0, journal_pages=100)
    toy.attach()
    return toy


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2), (2, 0), (1, 2), (0, 1)])
async def test_only_lost_stages_compute_again(lost: tuple[int, ...]) -> None:
    toy = ready(spaces=ALL_SPACES, window_tokens=70, pools=PoolSizes(16, 12, 4), max_step_tokens=200)
    asked = [request(name, range(i, 190 + i), n=70) for i, name in enumerate("ab")]
    handles = [toy.engine.submit(one) for one in asked]
    for i in range(150):
        toy.work(i)
    before = list(toy.daemons)
    for stage in lost:
        assert toy.crash([daemon.stages.keys() for daemon in toy.daemons].index({stage}))
        toy.work(0)
    toy.come_back()
    assert toy.engine.holding
    n_steps = len(toy.steps)
    toy.run()
    assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    assert not toy.engine.holding
    for one, handle in zip(asked, handles, strict=True):
        assert told(await events_of(handle))[0] == toy.alone(one)
    assert len(toy.steps) > n_steps
    counts = toy.engine.statistics().recovery
    assert (counts.n_sequences, counts.n_tokens) == (2 * len(lost), 0)
    assert counts.n_rebuilt >= 190 * 2 * len(lost)
    assert len([daemon for daemon in toy.daemons if daemon in before]) == 3 - len(lost)


async def test_without_room_in_the_journal_all_stages_compute_again() -> None:
    toy = ToyEngine(limits(), n_stages=2, hold_s=60.0, journal_pages=1)
    toy.attach()
    one = request("a", range(190), n=20)
    handle = toy.engine.submit(one)
    for i in range(12):
        toy.work(i)
    assert toy.crash(1)
    toy.come_back()
    for i in range(12):
        toy.work(i)
    assert toy.n_given_up == 1
    toy.attach()
    toy.run()
    assert told(await events_of(handle))[0] == toy.alone(one)


async def test_sequences_with_pages_paged_out_are_computed_again() -> None:
    toy = ready(2, max_context=900, residency=Residency(6))
    handle = toy.engine.submit(request("a", range(600), n=20))
    while not toy.engine.statistics().generated_tokens:
        toy.work(0)
    assert toy.crash(1)
    toy.come_back()
    for i in range(12):
        toy.work(i)
    assert toy.n_given_up == 1
    toy.attach()
    toy.run()
    tokens, finished = told(await events_of(handle))
    assert (len(tokens), finished.reason) == (20, "length")


class Crashes(Play):
    """A scenario in which a daemon dies where others lose the pipeline, and returns some actions later."""

    def __init__(self, scenario: Scenario, pages: int) -> None:
        super().__init__(scenario, hold_s=60.0, journal_pages=pages)

    def act(self, kind: str, index: int) -> None:
        toy = self.toy
        with_stages = [daemon for daemon in toy.daemons if daemon.stages]
        if kind == "lose":
            if toy.engine.ready and toy.crash(index % len(with_stages)):
                event("crash")
                return
            kind = "back"
        if kind in ("many", "swap", "attach") or not toy.engine.ready:
            self.return_()
        if kind != "back":
            super().act(kind, index)

    def return_(self) -> None:
        toy = self.toy
        if toy.pipeline is not None and toy.engine._pipeline is toy.pipeline and not toy.engine.ready:
            toy.come_back()
            for _ in range(1000):
                if toy.engine.ready or not toy.work(0):
                    break
            event(f"rebuilt: {toy.engine.ready}")
        if not toy.engine.ready:
            toy.attach()
        if not toy.engine._scheduler.drafting.attached:
            self.attach()

    def play(self) -> None:
        self.toy.attach()
        self.attach()
        for _ in range(4):
            self.act("submit", 0)
        for kind, index in self.scenario.actions:
            self.act(kind, index)
        self.return_()
        while self.waiting:
            self.act("submit", 0)
        self.toy.run()


@settings(max_examples=160, deadline=None)
@given(scenarios(), st.sampled_from([200, 200, 4]))
def test_crashes_change_no_token(scenario: Scenario, pages: int) -> None:
    play = Crashes(scenario, pages)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()

    async def check() -> None:
        for name, handle in play.handles.items():
            one = next(one for one in scenario.requests if one.request_id == name)
            ids, finished = told(await events_of(handle))
            assert finished.error is None
            expected = play.toy.alone(one)
            assert ids == (expected[: len(ids)] if finished.reason == "cancelled" else expected)

    asyncio.run(check())
