"""Recurrent states in the memory of pages on a GPU: numbers, captured steps and slots are those of two memories."""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from lucevisor.model.values import Backend, Dtype
from lucevisor.protocol.messages import Restored
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model, states_of
from tests.daemons.test_extents import MODELS, logits
from tests.daemons.test_snapshot import opened
from tests.families.pipeline import How, Pipeline, load_stages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

GPU = Backend.HIP if torch.version.hip else Backend.CUDA


@pytest.mark.parametrize(
    "dtypes", [(Dtype.FLOAT32, Dtype.FLOAT32), (Dtype.BFLOAT16, Dtype.BFLOAT16), (Dtype.BFLOAT16, Dtype.Q8_0)]
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_two_memories(name, dtypes):
    """Twice, so that steps are captured and replayed."""
    prepare(GPU, 0)
    spec = golden_spec(name)
    one, two = (
        Pipeline(spec, load_stages(spec, MODELS[name], How(*dtypes, GPU, one_memory=shared)))
        for shared in (True, False)
    )
    for _ in range(2):
        for found, wanted in zip(logits(one), logits(two), strict=True):
            assert torch.equal(found, wanted)
        for c in (one, two):
            for sequence in [*c.texts]:
                c.close(sequence)


def test_slots_are_saved_and_restored(tmp_path):
    spec, n = golden_spec("qwen35"), 150
    ids = ids_of(spec, n)
    saving, restoring = (SlotPipeline(spec, seed=i, backend=GPU, one_memory=i == 1) for i in range(2))
    saving.open(0)
    saving.run(0, ids)
    place = checkpoint(saving, 0, 5)
    wanted = saving.greedy(0, [3, 1], 16)
    store = opened(tmp_path, state_model(spec))
    entry = saving.save(store, ids, place)
    fresh = restoring.fresh_place(n, 2)
    assert all(isinstance(answer, Restored) for answer in restoring.restore(store, entry, fresh))
    before, after = states_of(saving, 5), states_of(restoring, 2)
    assert all(torch.equal(before[key], after[key]) for key in before)
    restoring.adopt(1, fresh, live_state=3)
    assert restoring.greedy(1, [3, 1], 16) == wanted
    store.close()
