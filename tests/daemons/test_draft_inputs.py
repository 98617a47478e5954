"""What a daemon keeps for its draft stage: until the DraftStep, and of no more steps than may be in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from daemons.draft.inputs import DraftInputs
from daemons.draft.stage import DraftStage, placeholder_draft
from daemons.errors import StateError
from daemons.kv.batch import Layout
from lucevisor.model.values import LayerRange
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, arena_regions
from lucevisor.protocol.steps import PENDING, Drafted, DraftStep, Sampled, Slice, Step

PLAN = DraftPlan(1, DraftKind.MTP, [], 0, LayerRange(0, 1), [CaptureSource(0, [3], None)])


def step(step_id: int) -> Step:
    return Step(step_id, 0, [], [Slice(0, step_id, [7], True)])


def test_captures_outlive_the_next_step_of_their_stage() -> None:
    """It may overwrite the memory that it made them in; those that were taken by then are not copied."""
    inputs, memory = DraftInputs(PLAN, []), torch.ones(1, 2)
    for i in (1, 2):
        inputs.copy_captures(0)
        inputs.store_captures(step(i), 0, memory.fill_(i))
        inputs.store_tokens(step(i), [Sampled(0, 40 + i)])
    assert inputs.pop_step(DraftStep(step(1)))[1][0].tolist() == [[1.0, 1.0]]
    [rows] = inputs.pop_step(DraftStep(step(2)))[1]
    inputs.copy_captures(0)
    assert (rows.tolist(), rows.data_ptr()) == ([[2.0, 2.0]], memory.data_ptr())


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


DRAFTS = [11, 12, 13]


def cases(*keys: str) -> list[Layout]:
    """Metadata that says which case it is, behind the token."""
    found = [
        SimpleNamespace(metadata=np.array([0, 70 + i, 5], dtype=np.int64), graph_key=k) for i, k in enumerate(keys)
    ]
    return cast("list[Layout]", found)


@pytest.mark.parametrize(
    ("drawn", "right"), [([9, 12, 13, 4], 0), ([11, 9, 13, 4], 1), ([11, 12, 9, 13], 2), ([11, 12, 13, 4], 3)]
)
def test_drafts_begin_behind_those_that_were_right(drawn: list[int], right: int) -> None:
    found = placeholder_draft(cases("a", "a", "a", "a"), DRAFTS, 2, torch.tensor(drawn))
    assert found is not None
    metadata = torch.zeros(3, dtype=torch.int64)
    found.layout.fill(metadata)
    assert metadata.tolist() == [drawn[right], 70 + right, 5]
    assert found.row.tolist() == [2 + right]


def test_without_drafts_there_is_one_case() -> None:
    found = placeholder_draft(cases("a"), [], 0, torch.tensor([8]))
    assert found is not None
    metadata = torch.zeros(3, dtype=torch.int64)
    found.layout.fill(metadata)
    assert (metadata.tolist(), found.row.tolist()) == ([8, 70, 5], [0])


def test_cases_of_different_graphs_wait_for_the_host() -> None:
    assert placeholder_draft(cases("a", "a", "b", "b"), DRAFTS, 0, torch.tensor([1, 2, 3, 4])) is None
