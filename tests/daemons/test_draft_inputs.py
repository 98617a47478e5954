"""What a daemon keeps for its draft stage: until the DraftStep, and of no more steps than may be in flight."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from daemons.draft.inputs import DraftInputs
from daemons.draft.stage import DraftStage
from daemons.errors import StateError
from lucevisor.model.values import LayerRange
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, arena_regions
from lucevisor.protocol.steps import PENDING, Drafted, DraftStep, Sampled, Slice, Step

PLAN = DraftPlan(1, DraftKind.MTP, [], 0, LayerRange(0, 1), [CaptureSource(0, [3], None)])


def step(step_id: int) -> Step:
    return Step(step_id, 0, [], [Slice(0, step_id, [7], True)])


def test_without_draft_steps_only_the_newest_steps_are_kept() -> None:
    inputs, n = DraftInputs(PLAN, []), arena_regions(2)
    for i in range(1, 11):
        inputs.store_captures(step(i), 0, torch.zeros(1, 2))
        inputs.store_tokens(step(i), [Sampled(0, i)])
    with pytest.raises(StateError, match="no sampled tokens"):
        inputs.pop_step(DraftStep(step(10 - n)))
    for i in range(11 - n, 11):
        assert inputs.pop_step(DraftStep(step(i)))[2] == [[i]]


class OneDraft:
    """A draft stage with a draft for each sequence that asks."""

    device = torch.device("cpu")

    def has_extended(self, step: Step) -> bool:
        return False

    def run(
        self, step: Step, captures: list[torch.Tensor], tokens: list[list[int]], *, defer: bool = False
    ) -> list[Drafted]:
        return [Drafted(s.sequence, [30 + s.sequence] * s.num_draft_tokens) for s in step.slices if s.num_draft_tokens]


def test_pending_drafts_are_those_made_last() -> None:
    inputs = DraftInputs(PLAN, [])
    verify = Step(4, 0, [], [Slice(0, 5, [7, PENDING, PENDING, PENDING], True, 3), Slice(1, 9, [8], True)])
    with pytest.raises(StateError, match="sequence 0 at 5: no drafts were made before it"):
        inputs.with_drafts(verify)
    asking = Step(3, 0, [], [Slice(0, 4, [6], True, num_draft_tokens=2)])
    inputs.store_captures(asking, 0, torch.zeros(1, 2))
    inputs.store_tokens(asking, [Sampled(0, 7)])
    inputs.run(cast("DraftStage", OneDraft()), DraftStep(asking))
    assert [s.tokens for s in inputs.with_drafts(verify)[0].slices] == [[7, 30, 30, 30], [8]]
    with pytest.raises(StateError, match="no drafts"):  # they are verified once
        inputs.with_drafts(verify)


# ---- drafts behind placeholders
