"""Requests that are held while a daemon is away: who is kept, who is ended, and that no token changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine.core import FrozenState
from lucevisor.engine.recovery import Pauses
from lucevisor.engine.request import NotReady, RequestError
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from tests.combinations import combinations
from tests.engine.test_outputs import Play, Scenario, lookups, scenarios
from tests.engine.toy_engine import (
    ALL_KV_GROUPS,
    HYBRID,
    LOST,
    ToyEngine,
    attached,
    check_answers,
    events_of,
    limits,
    request,
    told,
)

N_LOSSES = 4  # in a row


def ready(n_stages: int = 2, journal_pages: int = 0, **changes: object) -> ToyEngine:
    return attached(limits(**changes), n_stages=n_stages, hold_s=60.0, journal_pages=journal_pages)


async def test_a_loss_changes_no_token_of_what_runs_waits_and_comes() -> None:
    toy = ready(max_sequences=2, pools=PoolSizes(16, 0, 2))
    asked = [request(name, range(i, 90 + i), n=20) for i, name in enumerate("abcd")]
    handles = [toy.engine.submit(one) for one in asked[:3]]
    for i in range(30):
        toy.work(i)
    toy.lose()
    assert not toy.engine.ready
    handles.append(toy.engine.submit(asked[3]))  # it waits with the others
    toy.now = 4.0
    assert toy.engine.statistics().recovery.held == 4
    assert toy.engine.statistics().recovery.held_s == 4.0
    assert all(handle.finished is None for handle in handles)
    toy.attach()
    toy.run()
    for one, handle in zip(asked, handles, strict=True):
        assert told(await events_of(handle))[0] == toy.alone(one)
    after = toy.engine.statistics().recovery
    assert (after.held, after.held_s, after.pauses["loss"], after.n_continued) == (0, 0.0, Pauses(1, 4.0), 2)
    assert after.n_recomputed > 2 * 90


async def test_pauses_in_a_row_are_one_to_a_client() -> None:
    toy = ready()
    handle = toy.engine.submit(request("a", n=20))
    for i in range(30):
        toy.work(i)
    for at in (10.0, 12.0, 14.5):  # each is lost again before it gave a token
        toy.now = at
        toy.lose()
        toy.now = at + 1.0
        toy.attach()
    toy.now = 17.0
    toy.run()
    assert handle.finished is not None
    after = toy.engine.statistics().recovery
    assert after.pauses["loss"] == Pauses(3, 3.0)
    assert after.longest_pause_s == 7.0


@pytest.mark.parametrize("error", [LOST, RequestError("shutting_down", "the server stops")])
async def test_a_loss_for_good_ends_what_is_held(error: RequestError) -> None:
    toy = ready(max_sequences=1)
    handles = [toy.engine.submit(request(name)) for name in "ab"]
    toy.lose()
    assert toy.engine.core.recovery.holding
    toy.engine.detach(error, permanent=True)
    assert not toy.engine.core.recovery.holding
    assert [handle.finished.error for handle in handles if handle.finished] == [error, error]
    with pytest.raises(NotReady, match=error.message):
        toy.engine.submit(request("c"))
    toy.attach()
    assert toy.engine.statistics().recovery.pauses["loss"].n == 0  # nobody waited to its end


async def test_what_may_kill_a_daemon_is_not_tried_for_ever() -> None:
    toy = ready()
    killer = toy.engine.submit(request("a", n=30))
    for _ in range(N_LOSSES - 1):
        toy.work(0)
        toy.lose()
        assert killer.finished is None
        toy.attach()
    toy.lose()
    assert killer.finished is not None
    assert killer.finished.error == LOST


async def test_a_prompt_that_waits_for_its_turn_survives_any_number_of_losses() -> None:
    toy = ready(max_sequences=2, pools=PoolSizes(16, 0, 2))
    asked = [request("a", range(300), n=4), request("b", range(7, 307), n=4)]
    first, second = (toy.engine.submit(one) for one in asked)
    for _ in range(N_LOSSES):
        toy.lose()  # before a chunk of the second prompt was sent
        toy.attach()
    assert first.finished is not None
    toy.run()
    assert told(await events_of(second))[0] == toy.alone(asked[1])


async def test_a_request_that_makes_progress_survives_any_number_of_losses() -> None:
    toy = ready()
    one = request("a", n=3 * N_LOSSES)
    handle = toy.engine.submit(one)
    while handle.finished is None:
        n_known = toy.engine.statistics().generated_tokens
        while toy.engine.statistics().generated_tokens < n_known + 1 and handle.finished is None:
            toy.work(0)
        toy.lose()
        toy.attach()
    assert told(await events_of(handle))[0] == toy.alone(one)


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_losses_change_no_token(scenario: Scenario) -> None:
    """Requests over toy daemons with any limits, drafters and widths: whatever is lost, all get their tokens."""
    play = Play(scenario, hold_s=60.0)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()

    async def check() -> None:
        for reason in await check_answers(play.toy, scenario.requests, play.handles):
            event(reason)
        event(f"recovered: {play.toy.engine.statistics().recovery.n_continued > 0}")

    asyncio.run(check())


# ---- lost stages, rebuilt from the journal


def rebuilding(n_stages: int = 3, **changes: object) -> ToyEngine:
    return ready(n_stages, journal_pages=100, **changes)


def end_loss(toy: ToyEngine) -> None:
    """The lost stages are there again, and all work is done; a pipeline that cannot be rebuilt is attached anew."""
    toy.come_back()
    while toy.work(0):
        pass
    if not toy.engine.ready:
        toy.attach()
        toy.run()


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2), (2, 0), (1, 2), (0, 1)])
async def test_only_lost_stages_compute_again(lost: tuple[int, ...]) -> None:
    toy = rebuilding(kv_groups=ALL_KV_GROUPS, window_tokens=70, pools=PoolSizes(16, 12, 4), max_step_tokens=200)
    asked = [request(name, range(i, 190 + i), n=70) for i, name in enumerate("ab")]
    handles = [toy.engine.submit(one) for one in asked]
    for i in range(150):
        toy.work(i)
    before = list(toy.daemons)
    for stage in lost:
        assert toy.crash_stage(stage)
        toy.work(0)
    toy.come_back()
    assert toy.engine.core.recovery.holding
    n_steps = len(toy.steps)
    toy.run()
    assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    assert not toy.engine.core.recovery.holding
    for one, handle in zip(asked, handles, strict=True):
        assert told(await events_of(handle))[0] == toy.alone(one)
    assert len(toy.steps) > n_steps
    counts = toy.engine.statistics().recovery
    assert (counts.n_continued, counts.n_recomputed) == (2 * len(lost), 0)
    assert counts.n_rebuilt >= 190 * 2 * len(lost)
    assert len([daemon for daemon in toy.daemons if daemon in before]) == 3 - len(lost)


async def test_sequences_with_pages_paged_out_are_computed_again() -> None:
    toy = rebuilding(2, max_context=900, residency=Residency(6))
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


@combinations(lost=[0, 1, 2], kv_groups=[HYBRID, frozenset({KvGroup.FULL})], n_host=[0, 8])
async def test_slots_that_running_sequences_begin_with_come_back(
    lost: int, kv_groups: frozenset[KvGroup], n_host: int
) -> None:
    """The prompt's checkpoints, also inside a page; those of others are partial, for some of their bytes are gone."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)
    n_states = 16 if KvGroup.RECURRENT in kv_groups else 0
    toy = rebuilding(
        3, kv_groups=kv_groups, prefix=prefix, pools=PoolSizes(30, 0, n_states, host_states=n_host if n_states else 0)
    )
    over = toy.engine.submit(request("o", range(40, 140), n=3))
    toy.run()
    assert over.finished is not None
    one = request("a", range(190), n=60, turn_boundaries=(64, 150))
    handle = toy.engine.submit(one)
    for i in range(40):
        toy.work(i)
    before = toy.engine.prefixes.slots
    assert toy.crash(lost)
    toy.come_back()
    for i in range(60):
        toy.work(i)
    assert toy.engine.ready
    kept = [slot for slot in before if slot.alive]
    assert {slot.n_tokens for slot in kept} >= {64, 150}
    assert not any(slot.tokens[0] == 40 for slot in kept)
    more = [request(name, [*range(n), *range(20)], n=10) for name, n in (("b", 64), ("c", 150))]
    handles = [toy.engine.submit(each) for each in more]
    toy.run()
    assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    for each, its in zip([one, *more], [handle, *handles], strict=True):
        assert told(await events_of(its))[0] == toy.alone(each)
    cached = [its.finished.usage.cached_tokens for its in handles if its.finished is not None]
    assert cached == [64, 150]


class Crashes(Play):
    """A scenario in which a daemon dies where others lose the pipeline, and returns some actions later."""

    def __init__(self, scenario: Scenario, pages: int, *, late: bool) -> None:
        super().__init__(scenario, hold_s=60.0, journal_pages=pages)
        self.toy.late = late

    def act(self, kind: str, index: int) -> None:
        toy = self.toy
        if kind == "lose":
            if toy.pipeline is not None and not toy.engine.ready and index % 2:  # lost again while it is rebuilt
                self.come_back()
                for i in range(index):
                    toy.work(i)
            with_stages = [daemon for daemon in toy.daemons if daemon.stages]
            if with_stages and toy.pipeline is not None:
                event(f"crash while ready: {toy.engine.ready}")
                if toy.crash(index % len(with_stages)):
                    return
            kind = "back"
        if kind in ("many", "swap", "attach") or (not toy.engine.ready and kind not in ("cancel", "submit")):
            self.return_()
        if kind != "back":
            super().act(kind, index)

    def come_back(self) -> None:
        toy = self.toy
        assert toy.pipeline is not None
        toy.daemons = [daemon for daemon in toy.daemons if not daemon.stages.keys() & toy.pipeline.lost]  # to be reset
        toy.come_back()

    def return_(self) -> None:
        toy = self.toy
        if toy.pipeline is not None and not toy.engine.ready:
            self.come_back()
            for _ in range(1000):
                if toy.engine.ready or not toy.work(0):
                    break
            event(f"rebuilt: {toy.engine.ready}")
        if not toy.engine.ready:
            toy.attach()
        if not toy.engine.core.scheduler.drafting.attached:
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
@given(scenarios(), st.sampled_from([200, 200, 4]), st.booleans())
def test_crashes_change_no_token(scenario: Scenario, pages: int, late: bool) -> None:
    """``late``: what daemons answer is heard some time later, or never."""
    play = Crashes(scenario, pages, late=late)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()

    asyncio.run(check_answers(play.toy, scenario.requests, play.handles))


# ---- frozen state, handed to new daemons


SLOTS = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)


async def freeze(toy: ToyEngine) -> FrozenState:
    """Let the daemons work until the engine is at rest."""
    frozen = asyncio.create_task(toy.engine.freeze(60.0))
    while not frozen.done():
        await asyncio.sleep(0)
        toy.work(0)
    found = frozen.result()
    assert found is not None
    return found


@pytest.mark.parametrize(("n_stages", "lost"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("journal_pages", [0, 100])
async def test_nothing_is_computed_again_and_slots_are_kept(n_stages: int, lost: int, journal_pages: int) -> None:
    pools = PoolSizes(24, 16, 8)
    toy = ready(
        n_stages,
        journal_pages,
        kv_groups=ALL_KV_GROUPS,
        window_tokens=70,
        pools=pools,
        max_step_tokens=200,
        prefix=SLOTS,
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
    assert (counts.n_kept, counts.n_rebuilt, counts.n_recomputed) == (frozen.n_tokens, 0, 0)
    assert (counts.n_continued, counts.pauses["restart"].n, counts.pauses["loss"].n) == (2, 1, 0)
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
        toy = rebuilding(n_stages, max_context=900, residency=Residency(6, policy, tau=16), pools=pools)
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


async def test_frozen_state_is_of_no_use_after_another_loss() -> None:
    toy = rebuilding(3)
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
    toy = rebuilding(2)
    handle = toy.engine.submit(request("a", range(100)))
    frozen = asyncio.create_task(toy.engine.freeze(60.0))
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
            toy.engine.thaw()
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
        if not toy.engine.core.scheduler.drafting.attached:
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
