"""The state of a drafter goes into the file of a slot and comes back, also in a daemon that runs the drafter alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from daemons.errors import StateError
from daemons.kv.pools import Pools
from daemons.snapshots.state_map import DraftPools, StateMap
from daemons.snapshots.transfers import TransferExecutor
from lucevisor.model.spec import LayerSpec, StateTensor, attention_state
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import Restored
from lucevisor.snapshots.file_format import DraftModel
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model

N = 133
DRAFTER = (
    LayerSpec(0, Space.FULL, {}, attention_state(2, 8, 8)),
    LayerSpec(1, Space.RECURRENT, {}, (StateTensor("hidden", (1, 12), Dtype.FLOAT32),)),
)


def drafter(spec, seed, kv_dtype=Dtype.FLOAT32):
    """Pools of the drafter, full of random numbers."""
    every = LayerRange(0, len(DRAFTER))
    pools = Pools(replace(spec, layers=DRAFTER), every, torch.device("cpu"), kv_dtype, PoolSizes(40, 0, 8))
    generator = torch.Generator().manual_seed(seed)
    for name in ("k", "v"):
        pages = pools.paged(0, name).pages
        pages.copy_(torch.randn(pages.shape, generator=generator))
    states = pools.state(1, "hidden")
    states.copy_(torch.randn(states.shape, generator=generator))
    return DraftPools(DRAFTER, pools)


def rows(draft, place):
    """The drafter's state of a slot: keys, values, the recurrent state."""
    paged = [draft.pools.paged(0, name).pages for name in ("k", "v")]
    return [
        *(torch.stack([pages[place.full[i // 64], i % 64] for i in range(N)]) for pages in paged),
        draft.pools.state(1, "hidden")[place.state],
    ]


@pytest.fixture
def spec():
    return golden_spec("qwen35")


@pytest.fixture
def store(spec, tmp_path):
    model = replace(state_model(spec), draft=DraftModel("d" * 64, DRAFTER))
    found = SnapshotStore(tmp_path, model, 1 << 30)
    found.scan()
    yield found
    found.close()


def saved_with_draft(spec, store, draft):
    """A slot of a pipeline of one daemon that runs the drafter too."""
    pipeline = SlotPipeline(spec, seed=1)
    shard_pools = [shard.pools for shard in pipeline.stages[0].shards]
    pipeline.transfers = [TransferExecutor(StateMap(spec, shard_pools, draft), pipeline._answer)]
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    place = checkpoint(pipeline, 0, 5)
    return pipeline, place, pipeline.save(store, ids_of(spec, N), place, with_draft=True)


def test_saved_beside_the_model_restored_in_a_daemon_of_its_own(spec, store):
    of_one = drafter(spec, 1)
    pipeline, place, entry = saved_with_draft(spec, store, of_one)
    assert entry.snapshot.draft_fingerprint == "d" * 64
    wanted = pipeline.greedy(0, [3, 1], 8)

    other, of_other = SlotPipeline(spec, [[3], []], seed=2), drafter(spec, 2)
    other.transfers.append(TransferExecutor(StateMap(spec, [], of_other), other._answer))
    fresh = other.fresh_place(N, 3)
    assert not any(map(torch.equal, rows(of_other, fresh), rows(of_one, place)))
    answers = other.restore(store, entry, fresh)
    assert all(isinstance(answer, Restored) for answer in answers)
    assert all(map(torch.equal, rows(of_other, fresh), rows(of_one, place)))
    other.adopt(0, fresh)
    assert other.greedy(0, [3, 1], 8) == wanted


def test_a_file_without_the_drafters_state_leaves_its_pools_alone(spec, store):
    of_one = drafter(spec, 1)
    pipeline, place, _ = saved_with_draft(spec, store, of_one)
    entry = pipeline.save(store, ids_of(spec, N), place)
    assert entry.snapshot.draft_fingerprint == ""
    fresh = pipeline.fresh_place(N, 3)
    before = [part.clone() for part in rows(of_one, fresh)]
    assert all(isinstance(answer, Restored) for answer in pipeline.restore(store, entry, fresh))
    assert all(map(torch.equal, rows(of_one, fresh), before))


def test_a_daemon_without_the_drafter_refuses_its_tensors(spec, store):
    pipeline, place, entry = saved_with_draft(spec, store, drafter(spec, 1))
    states = StateMap(spec, [shard.pools for shard in pipeline.stages[0].shards])
    with pytest.raises(StateError, match="layer 0 of the drafter is not on this daemon"):
        states.to_save(place, entry.snapshot.of_draft())
