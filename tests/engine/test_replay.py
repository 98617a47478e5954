"""A recorded core replays to the same instructions; a link that dies at any instruction changes no token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.engine.events import EngineState, StageAnswer
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CancelPending, Masks, StepResult
from tests.engine.recording import ReplayDiffers, record, replay
from tests.engine.test_outputs import AnySuspension, AnyWidth, Scenario, lookups, scenarios
from tests.engine.test_recovery import Crashes, end_loss, rebuilding
from tests.engine.toy_engine import ToyEngine, check_answers, limits, request
from tests.engine.toy_pipeline import ToyConstraint, ToyDaemon


@settings(max_examples=25, deadline=None)
@given(scenarios(), st.sampled_from([200, 4]), st.booleans())
def test_recorded_crashes_replay_to_the_same_instructions(scenario: Scenario, pages: int, late: bool) -> None:
    play = Crashes(scenario, pages, late=late)
    recording = record(play.toy.engine)
    with lookups(play.toy, scenario.wrong + 1):
        play.play()
        core = recording.new_core()
        core.scheduler.drafting.speculation = AnyWidth(scenario.limits.speculation.max_drafts, scenario.wrong)
        core.scheduler.drafting.suspension = AnySuspension(scenario.wrong + scenario.n_stages)
        replay(recording, core)
    assert core.state is play.toy.engine.core.state
    assert [*core.transitions] == [*play.toy.engine.core.transitions]


def test_a_replay_names_the_first_event_that_leads_elsewhere() -> None:
    toy = ToyEngine(limits(), n_stages=2)
    recording = record(toy.engine)
    toy.attach()
    toy.engine.submit(request("a", n=9))
    toy.run()
    replay(recording, recording.new_core())
    number, answer = next(
        (number, one.event)
        for number, one in enumerate(recording.events)
        if isinstance(one.event, StageAnswer) and isinstance(one.event.result, StepResult) and one.event.result.sampled
    )
    assert isinstance(answer.result, StepResult)
    [sampled] = answer.result.sampled
    other = StepResult(answer.result.step_id, answer.result.stage, [type(sampled)(sampled.sequence, sampled.token ^ 1)])
    recording.events[number] = replace(recording.events[number], event=StageAnswer(other))
    with pytest.raises(ReplayDiffers, match=f"event {number} "):
        replay(recording, recording.new_core())


class DyingLink(ToyDaemon):
    """Takes ``n_left`` frames, then its process is gone."""

    n_left = 1 << 30

    def send(self, message: bytes | Masks | CancelPending, /, *, payload: Sequence[bytearray] = ()) -> None:
        if not self.n_left:
            raise LinkClosed("end of file", "link", "the daemon has exited")
        self.n_left -= 1
        super().send(message, payload=payload)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_link_that_dies_at_any_instruction_changes_no_token(stage: int) -> None:
    n_died = 0
    for n_frames in range(stage, 40, 3):
        toy = rebuilding(3, pools=PoolSizes(24, 0, 16), max_sequences=4)
        toy.links[stage].__class__ = DyingLink
        toy.links[stage].n_left = n_frames  # type: ignore[attr-defined]
        asked = [
            request(name, range(i, 70 + i), n=8, constraint=ToyConstraint(i) if i == 2 else None)
            for i, name in enumerate("abc")
        ]
        handles = {one.request_id: toy.engine.submit(one) for one in asked}
        toy.run()
        if toy.engine.core.state is EngineState.REBUILDING:
            n_died += 1
            end_loss(toy)
        assert toy.engine.core.state is EngineState.SERVING
        asyncio.run(check_answers(toy, asked, handles))
    assert n_died > 3


def test_a_drafter_that_cannot_be_sent_to_is_detached() -> None:
    toy = rebuilding(2)
    asked = request("a", n=20)
    toy.texts[asked.sampling.seed] = [*asked.prompt, *toy.alone(asked)]
    toy.attach_drafter(with_output=False)
    drafter = toy.daemons[-1]
    drafter.__class__ = DyingLink
    drafter.n_left = 0  # type: ignore[attr-defined]
    handles = {"a": toy.engine.submit(asked)}
    toy.run()
    assert [failure.code for failure in toy.lost] == ["shard_lost"]
    assert "could not be sent to stage 2" in toy.lost[0].message
    toy.lost.clear()
    asyncio.run(check_answers(toy, [asked], handles))
