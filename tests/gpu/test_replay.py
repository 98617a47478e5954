"""A replay in a thread beside the loading leaves on a GPU what the steps leave one after the other."""

from __future__ import annotations

import pytest
import torch

from daemons.models.replay import layerwise_replays
from lucevisor.model.values import Backend
from lucevisor.protocol.loading import StageReplay
from lucevisor.protocol.steps import Slice, Step
from tests.daemons.snapshot_pipeline import golden_spec
from tests.daemons.test_replay import file_of, load_of, loaded, one_after_the_other, plans_of, pools_for, steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3", "qwen35moe"])
def test_a_replay_leaves_what_the_steps_leave(architecture: str) -> None:
    spec, rows = golden_spec(architecture), None
    plans = plans_of(spec)
    for plan in plans:
        right, out = one_after_the_other(spec, plan, rows, Backend.CUDA)
        load = load_of(pools_for(spec), plans, replay=[StageReplay(plan.stage, steps_of(spec), first_row=3)])
        fd = file_of(torch.empty(0, spec.boundary_width) if rows is None else rows.cpu(), 3)
        [replay] = layerwise_replays(load, spec, fd).values()
        stage = loaded(spec, plan, load, replay, Backend.CUDA)
        assert stage.replayed(replay), replay.problem
        assert stage.sequences.by_id == right.sequences.by_id
        after = Step(6, 0, [], [Slice(0, 153, [11, 12], sample=False), Slice(1, 36, [13], sample=False)])
        given = None if rows is None else out.new_ones(3, spec.boundary_width)
        found, expected = stage.forward(after, given).rows, right.forward(after, given).rows
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        rows = out
