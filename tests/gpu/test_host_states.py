"""Checkpoints of a GPU's recurrent states in host memory: bit by bit, in order with the stream, and off the device."""

import gc

import pytest
import torch

from daemons.kv.pools import Pools
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import Restored
from lucevisor.protocol.steps import CopyState
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model, states_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

N = 133
GPU = Backend.HIP if torch.version.hip else Backend.CUDA
CYCLES = 1_000_000_000
"""Half a second or more on any GPU."""


@pytest.fixture(scope="module")
def spec():
    return golden_spec("qwen35")


def prepared(spec, **options):
    pipeline = SlotPipeline(spec, backend=GPU, host_states=4, seed=1, **options)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    return pipeline


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def settled(pipeline, state):
    torch.cuda.synchronize()  # host rows are read as they are: nothing else waits for the copy
    return states_of(pipeline, state)


def test_a_checkpoint_comes_back_bit_by_bit(spec):
    pipeline = prepared(spec)
    place = checkpoint(pipeline, 0, 6)
    kept = settled(pipeline, 6)
    assert equal(kept, states_of(pipeline, 0))
    assert all(float(numbers.abs().max()) > 0 for numbers in kept.values())
    wanted = pipeline.greedy(0, [3, 1], 16)
    assert not equal(kept, states_of(pipeline, 0))
    pipeline.adopt(1, place, live_state=3)
    assert equal(settled(pipeline, 3), kept)
    assert equal(states_of(pipeline, 6), kept)
    assert pipeline.greedy(1, [3, 1], 16) == wanted


def test_the_device_holds_live_states_only(spec):
    layers = LayerRange(0, spec.n_layers)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    sizes = PoolSizes(full_pages=4, window_pages=0, states=2 + 200, host_states=200)
    pools = Pools(spec, layers, torch.device("cuda", 0), Dtype.FLOAT32, sizes)
    taken = torch.cuda.memory_allocated(0) - before
    state = spec.unit_bytes(KvGroup.RECURRENT, layers, Dtype.FLOAT32)
    full = spec.unit_bytes(KvGroup.FULL, layers, Dtype.FLOAT32)
    updates = sum(layer.device_unit_bytes(Dtype.FLOAT32) - layer.unit_bytes(Dtype.FLOAT32) for layer in spec.layers)
    assert pools.nbytes == 4 * full + 2 * (state + updates)
    n_tensors = len(pools._stacks) + 1
    assert pools.nbytes <= taken <= pools.nbytes + n_tensors * 512  # the allocator rounds up
    assert pools.host_nbytes == 200 * state
    assert pools.page_locked
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in pools._host_stacks)


def test_nobody_waits_for_a_copy_but_who_reads_it(spec):
    """Copies both ways are queued behind a kernel that is running; the call returns at once."""
    pipeline = prepared(spec)
    kept = settled(pipeline, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    pipeline.apply(CopyState(0, 6), CopyState(6, 2))
    queued = torch.cuda.Event()
    queued.record()
    assert not queued.query()
    queued.synchronize()
    assert equal(states_of(pipeline, 6), kept)
    assert equal(states_of(pipeline, 2), kept)


def test_a_restore_waits_for_who_still_reads_what_was_there(spec, tmp_path):
    """A sequence starts from a slot that is given up at once for a prefix from disk."""
    pipeline = prepared(spec)
    store = SnapshotStore(tmp_path, state_model(spec), 1 << 30)
    entry = pipeline.save(store, ids_of(spec, N), checkpoint(pipeline, 0, 6))
    saved = settled(pipeline, 6)
    pipeline.run(0, [3, 1, 4])
    pipeline.apply(CopyState(0, 6))
    newer = settled(pipeline, 6)
    assert not equal(saved, newer)
    torch.cuda._sleep(CYCLES)
    pipeline.apply(CopyState(6, 2))
    fresh = pipeline.fresh_place(N, 6)
    assert all(isinstance(a, Restored) for a in pipeline.restore(store, entry, fresh))
    assert equal(settled(pipeline, 2), newer)
    assert equal(states_of(pipeline, 6), saved)
    store.close()


@pytest.mark.parametrize("restored", [1, 5])
@pytest.mark.parametrize("to", [GPU, Backend.CPU])
def test_snapshots_of_states_in_host_memory_come_back(spec, restored, to, tmp_path):
    pipeline = prepared(spec)
    place = checkpoint(pipeline, 0, 6)
    kept = settled(pipeline, 6)
    wanted = pipeline.greedy(0, [3, 1], 16)
    store = SnapshotStore(tmp_path, state_model(spec), 1 << 30)
    entry = pipeline.save(store, ids_of(spec, N), place)
    other = SlotPipeline(spec, [[3], []], backend=to, host_states=4, seed=2)
    fresh = other.fresh_place(N, restored)
    assert all(isinstance(a, Restored) for a in other.restore(store, entry, fresh))
    assert equal(settled(other, restored), kept)
    if to is GPU:
        other.adopt(1, fresh, live_state=3)
        assert other.greedy(1, [3, 1], 16) == wanted
    store.close()
