"""State that is frozen, and handed to new daemons: they go on where the old ones stopped, and no token changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import event, given, settings

from lucevisor.engine.core import FrozenState
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.protocol.loading import PoolSizes
from tests.engine.test_outputs import Play, Scenario, lookups, scenarios
from tests.engine.toy_engine import ALL_SPACES, ToyEngine, check_answers, events_of, limits, request, told

SLOTS = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)


async def freeze(toy: ToyEngine) -> FrozenState:
    """Let the daemons work until the engine is at rest."""
    frozen = asyncio.create_task(toy.engine.freezer.freeze(60.0))
    while not frozen.done():
        await asyncio.sleep(0)
        toy.work(0)
    found = frozen.result()
    assert found is not None
    return found


def ready(n_stages: int, journal_pages: int = 100, **changes: object) -> ToyEngine:
    toy = ToyEngine(limits(**changes), n_stages=n_stages, hold_s=60.0, journal_pages=journal_pages)
    toy.attach()
    return toy


@pytest.mark.parametrize(("n_stages", "lost"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("journal_pages", [0, 100])
async def test_nothing_is_computed_again_and_slots_are_kept(n_stages: int, lost: int, journal_pages: int) -> None:
    pools = PoolSizes(24, 16, 8)
    toy = ready(
        n_stages, journal_pages, spaces=ALL_SPACES, window_tokens=70, pools=pools, max_step_tokens=200, prefix=SLOTS
    )
    asked = [request(name, range(i, 190 + i), n=70, turn_boundaries=(128,)) for i, name in enumerate("ab")]
    handles = [toy.engine.submit(one) for one in asked]
    for i in range(30 * n_stages):
        toy.work(i)
    frozen = await freeze(toy)
    assert not toy.work(0)
    n_steps = len(toy.steps)
    assert toy.crash(lost)
    toy.come_back(frozen)
    toy.run()
    assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    for one, handle in zip(asked, handles, strict=True):
        assert told(await events_of(handle))[0] == toy.alone(one)
    counts = toy.engine.statistics().recovery
    assert (counts.n_kept, counts.n_rebuilt, counts.n_tokens) == (frozen.n_tokens, 0, 0)
    assert (counts.n_sequences, counts.pauses["restart"].n, counts.pauses["loss"].n) == (2, 1, 0)
    assert len(toy.steps) > n_steps
    again = toy.engine.submit(request("c", range(190), n=5))
    toy.run()
    tokens, finished = told(await events_of(again))
    assert tokens == toy.alone(request("c", range(190), n=5))
    assert finished.usage.cached_tokens > 0


@pytest.mark.parametrize("policy", ["lru", "exact", "qk"])
@pytest.mark.parametrize("n_stages", [1, 2])
async def test_sequences_with_pages_paged_out_are_kept(n_stages: int, policy: ResidencyPolicy) -> None:
    """Those in host memory, too: tokens are the ones of an undisturbed run."""
    host_pages = 0 if policy == "lru" else 24
    pools, asked = PoolSizes(24, 0, 4, host_pages=host_pages), request("a", [k * k % 83 for k in range(600)], n=80)
    answers = []
    for disturbed in (False, True):
        toy = ready(n_stages, max_context=900, residency=Residency(6, policy, tau=16), pools=pools)
        handle = toy.engine.submit(asked)
        while toy.engine.statistics().generated_tokens < 20:
            toy.work(0)
        if disturbed:
            frozen = await freeze(toy)
            assert toy.crash(n_stages - 1)
            toy.come_back(frozen)
            assert (toy.n_rebuilt, toy.n_given_up) == (0, 0)
        toy.run()
        assert toy.n_given_up == 0
        tokens, finished = told(await events_of(handle))
        answers.append(tokens)
        assert (len(tokens), finished.reason) == (80, "length")
    assert answers[0] == answers[1]
    if policy == "exact":
        assert answers[0] == toy.alone(asked)


@pytest.mark.parametrize("kept", [True, False])
async def test_all_daemons_are_replaced_and_a_lost_one_is_rebuilt_behind_it(kept: bool) -> None:
    """What was frozen before does not count any more; the journal of the new pipeline has what came after it."""
    toy = ready(3, pools=PoolSizes(24, 0, 8))
    asked = [request(name, range(i, 190 + i), n=70) for i, name in enumerate("ab")]
    handles = [toy.engine.submit(one) for one in asked]
    for i in range(40):
        toy.work(i)
    frozen = await freeze(toy)
    handles += [toy.engine.submit(request("c", range(100), n=70))]
    toy.move(frozen if kept else None)
    counts = toy.engine.statistics().recovery
    assert counts.pauses["restart"].n == 1
    assert (counts.n_kept, counts.n_tokens) == ((3 * frozen.n_tokens, 0) if kept else (0, frozen.n_tokens))
    for i in range(60):
        toy.work(i)
    assert toy.crash(1)
    toy.come_back()
    while not toy.engine.ready and toy.work(0):
        pass
    if kept:
        assert toy.n_given_up == 1  # the journal lacks the rows of the earlier pipeline
        toy.attach()
    toy.run()
    for one, handle in zip([*asked, request("c", range(100), n=70)], handles, strict=True):
        assert told(await events_of(handle))[0] == toy.alone(one)


async def test_frozen_state_is_of_no_use_after_steps_without_slices() -> None:
    """Another stage is lost and back before the one that is restarted goes: what ended since must stay closed."""
    toy = ready(3)
    handle = toy.engine.submit(request("a", range(100), n=60))
    for i in range(40):
        toy.work(i)
    frozen = await freeze(toy)
    assert toy.crash(2)
    handle.cancel()
    toy.come_back()
    toy.run()
    assert toy.engine.ready
    toy.engine.scheduler.flush()
    toy.engine.proceed()  # as for a snapshot
    toy.run()
    assert toy.crash(0)
    toy.come_back(frozen)
    one = request("b", range(100), n=20)
    handle = toy.engine.submit(one)
    toy.run()
    assert told(await events_of(handle))[0] == toy.alone(one)


async def test_frozen_state_is_of_no_use_after_another_loss() -> None:
    toy = ready(3)
    one = request("a", range(190), n=20)
    handle = toy.engine.submit(one)
    for i in range(12):
        toy.work(i)
    frozen = await freeze(toy)
    assert toy.crash(0)
    assert toy.crash(1)  # the one in the middle
    toy.come_back(frozen)
    toy.run()
    assert told(await events_of(handle))[0] == toy.alone(one)
    counts = toy.engine.statistics().recovery
    assert counts.n_kept == 0
    assert counts.n_rebuilt > 0


async def test_a_pipeline_that_is_lost_meanwhile_freezes_nothing() -> None:
    toy = ready(2)
    handle = toy.engine.submit(request("a", range(100)))
    frozen = asyncio.create_task(toy.engine.freezer.freeze(60.0))
    await asyncio.sleep(0)
    toy.lose()
    assert await frozen is None
    toy.attach()
    toy.run()
    assert handle.finished is not None
    assert handle.finished.reason == "length"


class Restarts(Play):
    """A scenario in which daemons are restarted in order, or all replaced, or not, and requests come, and are
    cancelled, at every moment of it; some successors have what was frozen, others do not."""

    def __init__(self, scenario: Scenario, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(scenario, hold_s=60.0, journal_pages=200)
        self._loop = loop

    def act(self, kind: str, index: int) -> None:
        if kind != "lose":
            super().act(kind, index)
            return
        toy = self.toy
        frozen = self._loop.run_until_complete(freeze(toy))
        self._meanwhile(index)
        if index % 5 == 0:
            toy.engine.freezer.thaw()
            return
        if index % 5 == 1:
            toy.move(frozen if index % 2 else None)
            self.attach()
            return
        if not toy.crash(index % self.scenario.n_stages):
            toy.attach()
            self.attach()
            return
        self._meanwhile(index // 2)
        toy.come_back(frozen if index % 4 else None)
        for i in range(index):
            toy.work(i)
        self._meanwhile(index // 3)
        toy.run()
        event(f"kept: {toy.engine.statistics().recovery.n_kept > 0}")
        if not toy.engine.ready:
            toy.attach()
        if not toy.engine.scheduler.drafting.attached:
            self.attach()

    def _meanwhile(self, index: int) -> None:
        super().act(["work", "cancel", "submit"][index % 3], index)


@settings(max_examples=80, deadline=None)
@given(scenarios())
def test_restarts_change_no_token(scenario: Scenario) -> None:
    loop = asyncio.new_event_loop()
    play = Restarts(scenario, loop)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()

    loop.run_until_complete(check_answers(play.toy, scenario.requests, play.handles))
    loop.close()
