"""Requests that are held while a daemon is away: who is kept, who is ended, and that no token changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine.core import FrozenState
from lucevisor.engine.recovery import Pauses
from lucevisor.engine.request import NotReady, RequestError
from lucevisor.engine.spec_decode.controller import RequestDrafts, SpecDecodeController
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import Drafted
from tests.combinations import combinations
from tests.engine.test_outputs import Play, Scenario, lookups, scenarios
from tests.engine.toy_engine import (
    ALL_SPACES,
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
    assert (after.held, after.held_s, after.pauses["loss"], after.n_sequences) == (0, 0.0, Pauses(1, 4.0), 2)
    assert after.n_tokens > 2 * 90


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
    assert toy.engine.holding
    toy.engine.detach(error, permanent=True)
    assert not toy.engine.holding
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
        event(f"recovered: {play.toy.engine.statistics().recovery.n_sequences > 0}")

    asyncio.run(check())


# ---- lost stages, rebuilt from the journal


SLIDING = frozenset({Space.FULL, Space.WINDOW})


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
    toy = rebuilding(spaces=ALL_SPACES, window_tokens=70, pools=PoolSizes(16, 12, 4), max_step_tokens=200)
    asked = [request(name, range(i, 190 + i), n=70) for i, name in enumerate("ab")]
    handles = [toy.engine.submit(one) for one in asked]
    for i in range(150):
        toy.work(i)
    before = list(toy.daemons)
    for stage in lost:
        assert toy.crash_stage(stage)
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


class Idle(SpecDecodeController):
    """Asks for no drafts but now and then, and verifies all."""

    n = 0

    def num_draft_tokens(self, own: RequestDrafts, n_decoding: int) -> int:
        self.n += 1
        return 3 if self.n % 11 == 0 else 0

    def num_verify_tokens(self, drafts: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        return max(len(drafted.tokens) for _, drafted in drafts)


@combinations(with_output=[True, False], lost=[0, 1, 2], n_streams=[1, 3])
async def test_stages_lost_while_steps_run_ahead_beside_a_drafter(
    *, with_output: bool, lost: int, n_streams: int
) -> None:
    speculation = SpeculationSettings(max_drafts=3, drafter=True)
    num_draft_tokens = n_drafted = 0
    for n_turns in range(40, 60, 3):
        toy = rebuilding(3, pools=PoolSizes(24, 0, 4, draft_states=12), speculation=speculation)
        toy.engine.core.scheduler.drafting.speculation = Idle(3)
        asked = [request(name, range(i, 70 + i), n=40) for i, name in enumerate("abc"[:n_streams])]
        for one in asked:
            toy.texts[one.sampling.seed] = [*one.prompt, *toy.alone(one)]
        toy.late = n_turns % 2 == 1
        toy.attach_drafter(with_output=with_output, wrong=3)
        handles = [toy.engine.submit(one) for one in asked]
        for i in range(n_turns):
            toy.work(i)
        num_draft_tokens += any(step.depends_on_step for step in toy.engine.core.scheduler.in_flight)
        assert toy.crash_stage(lost)
        toy.work(0)
        toy.come_back()
        toy.run()
        assert (toy.n_rebuilt, toy.n_given_up, toy.lost) == (1, 0, [])
        for one, handle in zip(asked, handles, strict=True):
            assert told(await events_of(handle))[0] == toy.alone(one)
        assert toy.drafter is not None
        n_drafted += toy.drafter.n_drafted
    assert num_draft_tokens >= 3
    assert n_drafted


async def test_without_room_in_the_journal_all_stages_compute_again() -> None:
    toy = attached(limits(), n_stages=2, hold_s=60.0, journal_pages=1)
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


async def test_a_loss_that_delivers_results_does_not_go_on_with_an_earlier_rebuild() -> None:
    """The second stage has a new daemon when the first is lost, whose answer to a step that passed all stages was not
    heard: now that step ends, all others wait, and a rebuild by daemons of the earlier loss must not begin."""
    n_delivered = 0
    for n_told in range(8, 20):
        toy = rebuilding(3)
        one = request("a", range(100), n=60)
        handle = toy.engine.submit(one)
        while toy.engine.statistics().generated_tokens < n_told:
            toy.work(0)
        toy.work_without(toy.links[0])
        assert toy.crash(1)
        toy.come_back()
        toy.work_without(toy.links[0])
        before = len(toy.steps)
        assert toy.crash(0)
        n_delivered += len(toy.steps) > before
        toy.daemons.remove(toy.links[1])  # it is to be reset
        toy.come_back()
        toy.run()
        assert told(await events_of(handle))[0] == toy.alone(one)
        assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    assert n_delivered


@combinations(lost=[0, 1, 2], again=[0, 1, 2])
async def test_slices_of_a_request_that_ended_stay_out_when_a_stage_is_lost_again(lost: int, again: int) -> None:
    """The first rebuild has taken them out of the steps that wait; the second one finds the same steps."""
    n_waiting = 0
    for n_before in range(4, 40, 3):
        toy = rebuilding(3, pools=PoolSizes(24, 0, 16))
        asked = [request(name, range(i, 70 + i), n=40) for i, name in enumerate("abcdef")]
        handles = {one.request_id: toy.engine.submit(one) for one in asked}
        for i in range(n_before):
            toy.work(i)
        handles["b"].cancel()
        assert toy.crash_stage(lost)
        while any(daemon.ready for daemon in toy.daemons):
            toy.work(0)
        toy.come_back()
        assert toy.pipeline is not None
        n_waiting += any(len(entry.step.slices) > 1 for entry in toy.pipeline.in_flight)
        assert toy.crash_stage(again)
        toy.daemons = [daemon for daemon in toy.daemons if not daemon.stages.keys() & toy.pipeline.lost]  # to be reset
        toy.come_back()
        toy.run()
        assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
        await check_answers(toy, asked, handles)
    assert n_waiting


@combinations(lost=[0, 1, 2], spaces=[HYBRID, frozenset({Space.FULL})], n_host=[0, 8])
async def test_slots_that_running_sequences_begin_with_come_back(
    lost: int, spaces: frozenset[Space], n_host: int
) -> None:
    """The prompt's checkpoints, also inside a page; those of others are partial, for some of their bytes are gone."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)
    n_states = 16 if Space.RECURRENT in spaces else 0
    toy = rebuilding(
        3, spaces=spaces, prefix=prefix, pools=PoolSizes(30, 0, n_states, host_states=n_host if n_states else 0)
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


@combinations(lost=[(0,), (1,), (2,), (0, 1)], window=[12, 70])
async def test_a_prompt_behind_a_loss_reads_no_window_pages_that_nobody_needed_then(
    lost: tuple[int, ...], window: int
) -> None:
    """A sequence may still own pages behind which its window has moved: they are not rebuilt."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1, checkpoint_pages=1)
    pools = PoolSizes(30, 30, 0)
    for n_turns in range(40):
        toy = rebuilding(3, spaces=SLIDING, window_tokens=window, prefix=prefix, pools=pools)
        one = request("a", range(150), n=20)
        handle = toy.engine.submit(one)
        for i in range(n_turns):
            toy.work(i)
        for stage in lost:
            assert toy.crash_stage(stage)
            toy.come_back()
            toy.run()
        assert (toy.n_rebuilt, toy.n_given_up) == (len(lost), 0)
        again = request("again", [*range(150), 7], n=5)
        other = toy.engine.submit(again)
        toy.run()
        assert told(await events_of(handle))[0] == toy.alone(one), n_turns
        assert told(await events_of(other))[0] == toy.alone(again), n_turns


@combinations(lost=[0, 1, 2], spaces=[HYBRID, frozenset({Space.FULL})])
async def test_a_slot_whose_slices_were_dropped_is_gone_though_another_request_begins_alike(
    lost: int, spaces: frozenset[Space]
) -> None:
    """Lost stages could copy its end from the other one's pages; those behind them never had it."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)
    n_kept = 0
    for n_turns in range(16):
        toy = rebuilding(3, spaces=spaces, prefix=prefix, pools=PoolSizes(30, 0, 16 * (Space.RECURRENT in spaces)))
        long, short = request("long", range(150), n=40), request("short", [*range(90), 5], n=9, turn_boundaries=(90,))
        handles = {"long": toy.engine.submit(long)}
        for i in range(20):
            toy.work(i)
        handles["short"] = toy.engine.submit(short)
        for i in range(n_turns):
            toy.work(i)
        handles["short"].cancel()
        assert toy.crash(lost)
        toy.come_back()
        toy.run()
        assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
        again = request("again", [*range(90), 7], n=9)
        handles["again"] = toy.engine.submit(again)
        toy.run()
        n_kept += handles["again"].finished is not None and handles["again"].finished.usage.cached_tokens > 64
        await check_answers(toy, [long, short, again], handles)
    assert n_kept


async def test_a_page_that_waiting_steps_write_is_not_rebuilt_for_another_sequence() -> None:
    """It left the window of a prompt, and got the end of a slot that another request begins with."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)
    n_given_up = 0
    for n_turns in range(30):
        toy = rebuilding(
            2, spaces=SLIDING, window_tokens=12, prefix=prefix, pools=PoolSizes(30, 16, 0), prefill_chunk=40
        )
        toy.engine.submit(request("slot", range(92), n=1, turn_boundaries=(90,)))
        toy.run()
        asked = [request("other", range(200, 292), n=9), request("again", [*range(90), 7], n=9)]
        handles = {"other": toy.engine.submit(asked[0])}
        for i in range(n_turns // 5):
            toy.work(i)
        handles["again"] = toy.engine.submit(asked[1])
        for _ in range(n_turns % 5):
            toy.work(0)
        assert toy.crash(1)
        end_loss(toy)
        n_given_up += toy.n_given_up
        await check_answers(toy, asked, handles)
    assert n_given_up


async def ask_replay(toy: ToyEngine, stage: int) -> None:
    """Ask what a lost stage may compute while its daemon loads, and make no use of it."""
    asked = asyncio.create_task(toy.engine.make_replay([stage], 60.0))
    await asyncio.sleep(0)
    await toy.play()
    replay = await asked
    if replay is not None:
        replay.file.close()


@pytest.mark.parametrize("spaces", [HYBRID, frozenset({Space.FULL})])
@pytest.mark.parametrize("replays", [False, True])
def test_who_began_with_a_slot_that_was_not_whole_everywhere_is_computed_again(
    *, spaces: frozenset[Space], replays: bool
) -> None:
    """The slot of a request that was cancelled is ahead of its slices, which wait for the lost stage and are taken
    out: stages behind never have them.  ``replays``: its new daemon asks for what it may compute while it loads."""
    prefix = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)
    n_given_up = 0
    for n_before in range(1, 10):
        for n_after in range(3):
            toy = rebuilding(
                spaces=spaces,
                prefix=prefix,
                max_step_tokens=68,
                pools=PoolSizes(40, 0, 16 * (Space.RECURRENT in spaces)),
            )
            asked = [
                request(name, [*range(150), *range(n)], n=10, turn_boundaries=(64, 128))
                for name, n in (("a", 40), ("b", 9))
            ]
            handles = {"a": toy.engine.submit(asked[0])}
            for i in range(n_before):
                toy.work(i)
            handles["b"] = toy.engine.submit(asked[1])
            for _ in range(n_after):
                toy.work(0)
            handles["a"].cancel()
            toy.work(0)
            assert toy.crash(1)
            if replays:
                asyncio.run(ask_replay(toy, 1))
            end_loss(toy)
            n_given_up += toy.n_given_up
            asyncio.run(check_answers(toy, asked, handles))
    assert n_given_up


class Crashes(Play):
    """A scenario in which a daemon dies where others lose the pipeline, and returns some actions later."""

    def __init__(self, scenario: Scenario, pages: int, *, late: bool) -> None:
        super().__init__(scenario, hold_s=60.0, journal_pages=pages)
        self.toy.late = late

    def act(self, kind: str, index: int) -> None:
        toy = self.toy
        with_stages = [daemon for daemon in toy.daemons if daemon.stages]
        if kind == "lose":
            if toy.engine.ready and toy.crash(index % len(with_stages)):
                event("crash")
                return
            kind = "back"
        if kind in ("many", "swap", "attach") or (not toy.engine.ready and kind not in ("cancel", "submit")):
            self.return_()
        if kind != "back":
            super().act(kind, index)

    def return_(self) -> None:
        toy = self.toy
        if toy.pipeline is not None and not toy.engine.ready:
            toy.come_back()
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


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("lost", "heard"), [((1, 2), (0,)), ((0, 2), (1,))], ids=["middle, then last", "first and last"]
)
async def test_steps_that_wait_for_drafts_when_two_stages_are_lost(
    lost: tuple[int, int], heard: tuple[int], seed: int
) -> None:
    """The last one has the drafter; before that and in between the supervisor hears the other stage alone."""
    rng = random.Random(seed)
    speculation = SpeculationSettings(max_drafts=3, drafter=True, fixed=True)
    toy = rebuilding(3, pools=PoolSizes(24, 0, 32, draft_states=24), speculation=speculation, max_sequences=8)
    asked = [request(name, range(i, 70 + i), n=40) for i, name in enumerate("abc")]
    for one in asked:
        toy.texts[one.sampling.seed] = [*one.prompt, *toy.alone(one)]
    toy.attach_drafter(with_output=True, wrong=3)
    handles = {one.request_id: toy.engine.submit(one) for one in asked}
    for _ in range(rng.randrange(20, 120)):
        toy.work(rng.randrange(100))
    daemons = {next(iter(daemon.stages)): daemon for daemon in toy.daemons if daemon.stages}
    assert toy.pipeline is not None
    other = daemons[heard[0]]
    for _ in range(rng.randrange(12) if lost[0] == 0 else 0):
        if busy := [daemon for daemon in daemons.values() if daemon.ready]:
            one = rng.choice(busy)
            answer = one.run_one()
            if one is other:
                toy.engine.receive(*answer)
    for stage in lost:
        toy.crash_stage(stage)
        while other.ready:
            toy.engine.receive(*other.run_one())
    end_loss(toy)
    assert await check_answers(toy, asked, handles) == ["length"] * 3


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


@pytest.mark.parametrize("kept", [True, False])
async def test_all_daemons_are_replaced_and_a_lost_one_is_rebuilt_behind_it(kept: bool) -> None:
    """What was frozen before does not count any more; the journal of the new pipeline has what came after it."""
    toy = rebuilding(3, pools=PoolSizes(24, 0, 8))
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
    toy = rebuilding(3)
    handle = toy.engine.submit(request("a", range(100), n=60))
    for i in range(40):
        toy.work(i)
    frozen = await freeze(toy)
    assert toy.crash(2)
    handle.cancel()
    toy.come_back()
    toy.run()
    assert toy.engine.ready
    toy.engine.core.scheduler.flush()
    toy.engine.tick()  # as for a snapshot
    toy.run()
    assert toy.crash(0)
    toy.come_back(frozen)
    one = request("b", range(100), n=20)
    handle = toy.engine.submit(one)
    toy.run()
    assert told(await events_of(handle))[0] == toy.alone(one)


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
