"""Measured speeds, by which saves and restores are decided."""

from __future__ import annotations

import pytest

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.protocol.steps import Slice, Step, StepResult
from lucevisor.snapshots.policy import (
    Candidate,
    SavePolicy,
    SaveTrigger,
    SpeedMeter,
    StoreStatistics,
    reject_save_reason,
)


def result(n_tokens: int, compute_s: list[float], seconds: float) -> PipelineResult:
    step = Step(1, 0, [], [Slice(0, 0, list(range(n_tokens)), sample=True)], want_logits=False, want_hidden=False)
    answers = tuple(
        StepResult(step_id=1, stage=i, sampled=[], compute_s=s, wait_s=0.0) for i, s in enumerate(compute_s)
    )
    return PipelineResult(step, answers, (), (), seconds)


def test_guesses_before_the_first_measurement() -> None:
    speeds = SpeedMeter().speeds(StoreStatistics())
    assert speeds.prefill_tokens_per_s > 0
    assert speeds.write_bytes_per_s > 0


def test_long_steps_measure_prefill() -> None:
    meter = SpeedMeter()
    meter.add(result(512, [0.2, 0.4], 0.6))  # stages work at the same time on different chunks
    meter.add(result(2, [0.01, 0.02], 0.65))  # it waited behind the long one
    speeds = meter.speeds(StoreStatistics(saved_bytes=10**9, save_s=0.5))
    assert speeds.prefill_tokens_per_s == pytest.approx(512 / 0.4)
    assert speeds.write_bytes_per_s == pytest.approx(2e9)


def test_reads_count_as_fast_until_measured_or_writes_are_slow() -> None:
    meter = SpeedMeter()
    assert meter.speeds(StoreStatistics()).read_bytes_per_s == pytest.approx(4e9)
    fast, slow = (
        StoreStatistics(n_saved=1, saved_bytes=10**9, save_s=0.2),
        StoreStatistics(n_saved=1, saved_bytes=10**9, save_s=5.0),
    )
    assert meter.speeds(fast).read_bytes_per_s == pytest.approx(4e9)
    assert meter.speeds(slow).read_bytes_per_s == pytest.approx(4e8)
    meter.add_read(3 * 10**8, 0.05)
    meter.add_read(10**8, 0.05)
    for seen in (StoreStatistics(), fast, slow):
        assert meter.speeds(seen).read_bytes_per_s == pytest.approx(4e9)
    meter.add_read(10**8, 0.4)
    assert meter.speeds(fast).read_bytes_per_s == pytest.approx(1e9)


def test_a_fast_gpu_saves_its_first_prompt() -> None:
    """1,024 tokens of a large hybrid model: 221 MB, computed in 0.17 s.  Were it not saved, no speed would be known."""
    meter = SpeedMeter()
    meter.add(result(512, [0.04, 0.042], 0.085))
    meter.add(result(512, [0.042, 0.043], 0.085))
    meter.add(result(1, [0.006, 0.006], 0.012))
    policy = SavePolicy(min_tokens=256, disk_bytes=10**11)
    assert not reject_save_reason(
        Candidate(0, 1024, 221_000_000), SaveTrigger.TURN, policy, meter.speeds(StoreStatistics())
    )
    slow = StoreStatistics(n_saved=1, saved_bytes=10**9, save_s=5.0)
    assert "reading them" in reject_save_reason(
        Candidate(0, 1024, 221_000_000), SaveTrigger.TURN, policy, meter.speeds(slow)
    )
