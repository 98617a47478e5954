"""Warming up runs every kind of step and leaves the stage as it was."""

from __future__ import annotations

import pytest
import torch

from daemons.models.stage import Stage
from daemons.warm import RUNS, warm_up
from tests.families.chain import Chain, load_stages
from tests.families.test_golden import FIXTURES, opened


@pytest.mark.parametrize("name", FIXTURES)
def test_a_warm_chain_is_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(name)
    stages = load_stages(golden.spec, golden.cuts()[:1])
    lengths: list[int] = []
    forward = Stage.forward

    def watched(self, step, rows):
        lengths.append(step.n_tokens)
        return forward(self, step, rows)

    monkeypatch.setattr(Stage, "forward", watched)
    for stage in stages:
        lengths.clear()
        warm_up(stage)
        assert set(lengths) == set(RUNS)
        assert not stage.sequences.by_id
    c = Chain(golden.spec, stages)
    c.open(0)
    assert torch.allclose(c.run((0, golden.ids)), golden.logits, atol=5e-4)


def test_a_small_pool_is_warmed_as_far_as_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = opened(FIXTURES[0])
    [stage] = load_stages(golden.spec)
    stage.max_step_tokens = 40
    stage.sequences.units = {space: min(n, 1) for space, n in stage.sequences.units.items()}
    warm_up(stage)
    assert not stage.sequences.by_id
