"""What a step sent now would wait for."""

from __future__ import annotations

import pytest

from lucevisor.engine.scheduling.backlog import Backlog


def test_an_empty_pipeline_waits_for_the_step() -> None:
    backlog = Backlog(3)
    assert backlog.empty
    assert backlog.first_stage_free
    assert backlog.wait_s(1.0, 10.0) == pytest.approx(-12.0)  # since ever, and for two stages


def test_equal_steps_one_behind_the_other_wait_for_nothing() -> None:
    backlog = Backlog(3)
    for at in (0.0, 1.0, 2.0):
        backlog.sent(1.0, at)
        assert not backlog.first_stage_free
        backlog.first_stage_done(at + 1.0)
        assert backlog.wait_s(1.0, at + 1.0) == pytest.approx(0.0)
    backlog.answered(3.0)
    assert backlog.wait_s(1.0, 3.0) == pytest.approx(0.0)
    assert not backlog.empty


def test_a_late_answer_moves_what_is_behind_it() -> None:
    backlog = Backlog(2)
    backlog.sent(1.0, 0.0)
    backlog.first_stage_done(1.0)
    backlog.sent(1.0, 1.0)
    backlog.first_stage_done(2.0)
    assert backlog.wait_s(1.0, 2.0) == pytest.approx(0.0)
    assert backlog.wait_s(1.0, 2.5) == pytest.approx(0.0)  # the oldest is overdue: at any moment
    backlog.answered(2.6)
    assert backlog.wait_s(1.0, 2.6) == pytest.approx(0.0)


def test_steps_that_wait_at_the_head_begin_when_it_answers() -> None:
    backlog = Backlog(2)
    backlog.sent(3.0, 0.0)
    backlog.sent(1.0, 0.0)
    backlog.first_stage_done(3.0)
    assert not backlog.first_stage_free
    backlog.first_stage_done(4.0)
    assert backlog.first_stage_free
    assert backlog.wait_s(1.0, 4.0) == pytest.approx(6.0 + 1.0 - 5.0)


def test_the_last_stage_idles_while_a_longer_step_comes() -> None:
    backlog = Backlog(2)
    backlog.sent(1.0, 0.0)
    backlog.sent(1.0, 1.0)
    assert backlog.idle_s(1.0) == pytest.approx(0.0)
    assert backlog.idle_s(1.5) == pytest.approx(0.5)


def test_a_pipeline_of_one_stage_hears_of_the_last_stage_only() -> None:
    backlog = Backlog(1)
    backlog.sent(1.0, 0.0)
    assert not backlog.first_stage_free
    backlog.answered(1.0)
    assert backlog.first_stage_free
    backlog.sent(1.0, 1.0)
    backlog.clear()
    assert backlog.empty
    assert backlog.first_stage_free
