"""bench/speculation.py: forced drafts, and a drafter that is never suspended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from speculation import Knob

from lucevisor.engine.spec_decode.controller import ACTIVE_STEPS
from lucevisor.engine.step import ScheduledSlice
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


def test_forced_drafts_are_verified_in_place_of_those_that_are_made(bench: Bench, knob: Knob) -> None:
    with knob.verify(3, 3):
        bench.submit("a")
        step = bench.plan()
        bench.answer(step)
        bench.draft(step)
        [piece] = bench.plan().step.slices
    assert piece.tokens == [7, 8, 9, 11]


def test_a_phase_begins_with_a_drafter_that_is_not_suspended(knob: Knob) -> None:
    suspension = knob.drafting._suspension
    for _ in range(ACTIVE_STEPS - 1):
        suspension.record_step()
    knob.adapt(1)
    suspension.record_step()
    assert not suspension.is_due(idle=False)
    suspension.toggle()
    knob.adapt(1)
    assert suspension.is_due(idle=False)
