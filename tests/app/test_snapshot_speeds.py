"""What a restore is judged by: speeds as seen, steps apart from their waiting."""

from __future__ import annotations

import types
from typing import Any

import pytest

from lucevisor.app.snapshots import SpeedMeter
from lucevisor.engine.chain import ChainResult
from lucevisor.memory.snapshot_store import StoreStatistics
from lucevisor.wire.messages import Slice, Step, StepResult


def result(n_tokens: int, compute_s: list[float], seconds: float) -> ChainResult:
    step = Step(1, 0, [], [Slice(0, 0, list(range(n_tokens)), sample=True)], want_logits=False, want_hidden=False)
    answers = tuple(
        StepResult(step_id=1, stage=i, sampled=[], compute_s=s, wait_s=0.0) for i, s in enumerate(compute_s)
    )
    return ChainResult(step, answers, (), (), seconds)


def store(**seen: Any) -> Any:
    return types.SimpleNamespace(store=types.SimpleNamespace(statistics=StoreStatistics(**seen)))


def test_guesses_before_anything_was_seen() -> None:
    speeds = SpeedMeter().speeds(store())
    assert speeds.prefill_tokens_per_s > 0
    assert speeds.write_bytes_per_s > 0
    assert 0 < speeds.step_s < 1


def test_long_steps_tell_how_fast_prompts_are_and_short_ones_what_a_check_costs() -> None:
    meter = SpeedMeter()
    meter.add(result(512, [0.2, 0.4], 0.6))  # stages work at the same time on different chunks
    meter.add(result(2, [0.01, 0.02], 0.65))  # it waited behind the long one
    speeds = meter.speeds(store(saved_bytes=10**9, save_s=0.5))
    assert speeds.prefill_tokens_per_s == pytest.approx(512 / 0.4)
    assert speeds.step_s == pytest.approx(0.03)
    assert speeds.write_bytes_per_s == pytest.approx(2e9)


def test_files_are_read_as_fast_as_they_were_written_until_one_was_read() -> None:
    meter = SpeedMeter()
    assert meter.speeds(store(saved_bytes=10**9, save_s=0.5)).read_bytes_per_s == pytest.approx(2e9)
    meter.add_read(3 * 10**8, 0.05)
    meter.add_read(10**8, 0.05)
    speeds = meter.speeds(store(saved_bytes=10**9, save_s=0.5))
    assert speeds.read_bytes_per_s == pytest.approx(4e9)
    assert speeds.write_bytes_per_s == pytest.approx(2e9)
