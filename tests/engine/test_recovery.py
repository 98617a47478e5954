"""Requests that are held while a daemon is away: who is kept, who is ended, and that no token changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import event, given, settings

from lucevisor.engine.recovery import Pauses
from lucevisor.engine.request import NotReady, RequestError
from lucevisor.protocol.loading import PoolSizes
from tests.engine.test_outputs import Play, Scenario, lookups, scenarios
from tests.engine.toy_engine import LOST, ToyEngine, check_answers, events_of, limits, request, told

N_LOSSES = 4  # in a row


def ready(**changes: object) -> ToyEngine:
    toy = ToyEngine(limits(**changes), n_stages=2, hold_s=60.0)
    toy.attach()
    return toy


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
