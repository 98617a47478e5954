"""bench/speculation.py: what the policy hears of forced drafts, and when the drafter may rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from speculation import FixedWidth, Knob

from lucevisor.engine.drafting.rest import AWAKE_STEPS, MOST_REST_STEPS
from lucevisor.engine.step import ScheduledSlice
from lucevisor.protocol.steps import Drafted, StepResult
from tests.engine.test_drafting import Bench, speculating
from tests.engine.toy_pipeline import VOCABULARY


@pytest.fixture
def bench() -> Bench:
    return Bench(speculating())


@pytest.fixture
def knob(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Knob:
    monkeypatch.setattr(ScheduledSlice, "drafts_pend", ScheduledSlice.drafts_pend)  # the knob's is undone
    spec = SimpleNamespace(vocabulary=VOCABULARY)
    return Knob(SimpleNamespace(engine=SimpleNamespace(_scheduler=bench.scheduler), model=SimpleNamespace(spec=spec)))


def test_the_policy_hears_the_probabilities_of_the_drafts_that_are_verified(bench: Bench, knob: Knob) -> None:
    heard = []

    class Hearing(FixedWidth):
        width = ahead = 3

        def drafted(self, own, drafted, n_left_out=0):
            heard.append(drafted.probabilities)

    knob.drafting.speculation, knob.right = Hearing(4), 2
    bench.submit("a")
    step = bench.plan()
    bench.answer(step)
    sequence = bench.live("a").sequence
    knob.drafting.answered(StepResult(step.step.step_id, 1, drafts=[Drafted(sequence, [5, 5, 5], [0.5] * 3)]))
    bench.plan()
    [record] = bench.scheduler.running
    assert heard == [record.drafts.probabilities] == [[0.9, 0.9, 0.1]]


def test_a_phase_begins_with_a_drafter_that_does_not_rest(knob: Knob) -> None:
    rest = knob.drafting._rest
    for _ in range(AWAKE_STEPS - 1):
        rest.stepped()
    knob.adapt(1)
    rest.stepped()
    assert not rest.due(idle=False)
    rest.turn()
    knob.adapt(1)
    assert rest._n_steps == MOST_REST_STEPS
    assert rest.due(idle=False)
