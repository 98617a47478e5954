"""Recurrent states of which some lie in host memory: copies both ways, snapshots of them, and what they cannot be."""

import gc
from pathlib import Path

import pytest
import torch

from daemons import device
from daemons.device import CPU
from daemons.errors import DeviceError, StateError
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import Restored
from lucevisor.protocol.steps import CopyState, OpenSequence, SamplingParams, ZeroState
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model, states_of

SIZES = PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3)
N = 133


@pytest.fixture(scope="module")
def spec():
    return golden_spec("qwen35")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_device_holds_what_may_be_live_and_the_host_the_rest(spec):
    layers = LayerRange(0, spec.n_layers)
    pools = Pools(spec, layers, CPU, Dtype.FLOAT32, SIZES)
    full, state = (spec.unit_bytes(space, layers, Dtype.FLOAT32) for space in (Space.FULL, Space.RECURRENT))
    updates = 4 * sum(t.update_width for layer in spec.layers for t in layer.state)
    assert updates
    assert pools.nbytes == 4 * full + 2 * (state + updates)
    assert pools.host_nbytes == 3 * state
    first = next(layer.index for layer in spec.layers if layer.space is Space.RECURRENT)
    assert pools.state(first, "delta").shape[0] == 2
    for state_id, (n_rows, row) in enumerate([(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]):
        rows, found = pools.rows_with(first, "delta", state_id)
        assert (rows.shape[0], found) == (n_rows, row)
        assert not rows.any()


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 2), (0, 4), (3, 1), (4, 0)])
def test_a_copy_is_bit_by_bit_and_touches_nothing_else(spec, source, target):
    pools = Pools(spec, LayerRange(0, spec.n_layers), CPU, Dtype.FLOAT32, SIZES)
    generator = torch.Generator().manual_seed(source * 5 + target)
    shards = [*pools._of(Space.RECURRENT), *pools._host_stacks]
    for tensor in shards:  # any bits, those of no number included
        tensor.view(torch.int32).random_(-(2**31), 2**31, generator=generator)
    sequences = Sequences([pools], SIZES, max_sequences=2)
    names = [(i.index, t.name) for i in spec.layers if i.space is Space.RECURRENT for t in i.state]

    def bits(state):
        return [pools.rows_with(*name, state)[0][pools.rows_with(*name, state)[1]].view(torch.int32) for name in names]

    before = {state: [b.clone() for b in bits(state)] for state in range(5)}
    sequences.apply(CopyState(source, target))
    for state in range(5):
        wanted = before[source if state == target else state]
        assert all(torch.equal(a, b) for a, b in zip(bits(state), wanted, strict=True))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (OpenSequence(1, 2, SamplingParams()), "OpenSequence 1: state 2 lies in host memory"),
        (OpenSequence(1, 5, SamplingParams()), "OpenSequence 1: state 5 is outside the pool of 5"),
        (ZeroState(4), "ZeroState: state 4 lies in host memory"),
        (CopyState(2, 4), "CopyState: states 2 and 4 both lie in host memory"),
        (CopyState(1, 5), "CopyState: state 5 is outside the pool of 5"),
        (CopyState(-1, 4), "CopyState: state -1 is outside the pool of 5"),
    ],
)
def test_what_a_state_in_host_memory_cannot_be_is_refused(spec, operation, message):
    pools = Pools(spec, LayerRange(0, spec.n_layers), CPU, Dtype.FLOAT32, SIZES)
    sequences = Sequences([pools], SIZES, max_sequences=2)
    with pytest.raises(StateError, match=message):
        sequences.apply(operation)
    assert not sequences.by_id


def test_a_sequence_goes_on_from_a_checkpoint_in_host_memory(spec):
    pipeline = SlotPipeline(spec, [[3], []], host_states=4, seed=1)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    place = checkpoint(pipeline, 0, 6)
    kept = states_of(pipeline, 6)
    assert equal(kept, states_of(pipeline, 0))
    wanted = pipeline.greedy(0, [3, 1], 16)
    assert equal(kept, states_of(pipeline, 6))  # it did not move with the sequence
    assert not equal(kept, states_of(pipeline, 0))
    pipeline.adopt(1, place, live_state=3)
    assert equal(kept, states_of(pipeline, 3))
    assert pipeline.greedy(1, [3, 1], 16) == wanted


@pytest.mark.parametrize("saved", [2, 6])
@pytest.mark.parametrize("restored", [1, 5])
def test_snapshots_of_states_wherever_they_lie_are_the_same(spec, saved, restored, tmp_path):
    one = SlotPipeline(spec, host_states=4, seed=1)
    one.open(0)
    one.run(0, ids_of(spec, N))
    place = checkpoint(one, 0, saved)
    kept = states_of(one, saved)
    wanted = one.greedy(0, [3, 1], 16)
    store = SnapshotStore(tmp_path, state_model(spec), 1 << 30)
    entry = one.save(store, ids_of(spec, N), place)
    other = SlotPipeline(spec, [[3], []], host_states=4, seed=2)
    with torch.inference_mode():
        for shard in (shard for stage in other.stages for shard in stage.shards):
            for tensor in (*shard.pools._of(Space.RECURRENT), *shard.pools._host_stacks):
                tensor.fill_(7.0)
    fresh = other.fresh_place(N, restored)
    assert all(isinstance(a, Restored) for a in other.restore(store, entry, fresh))
    assert equal(states_of(other, restored), kept)
    for state in set(range(8)) - {restored}:
        assert all((numbers == 7.0).all() for numbers in states_of(other, state).values())
    other.adopt(1, fresh, live_state=3)
    assert other.greedy(1, [3, 1], 16) == wanted
    again = other.save(store, ids_of(spec, N), fresh)
    assert again.snapshot.checksums == entry.snapshot.checksums
    store.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("extent", [(3, 2, 5), (3, 0, 5)])
def test_host_memory_is_zeros_that_can_be_written(kind, extent):
    """Where there is no accelerator it is not page-locked for one; what it holds is the same."""
    zeros, locked = device.host_zeros(extent, torch.float32, torch.device(kind), "checkpoints", "cache.states")
    assert zeros.shape == extent
    assert zeros.device == CPU
    assert not zeros.any()
    zeros += 1
    assert bool((zeros == 1).all())
    assert locked is (kind == "cpu" or (torch.cuda.is_available() and zeros.numel() > 0))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_host_without_room_is_told_of_with_the_bytes(kind):
    with pytest.raises(DeviceError, match=r"cpu: out of memory for checkpoints: \d+ bytes asked") as caught:
        device.host_zeros((1 << 45,), torch.float32, torch.device(kind), "checkpoints", "cache.states")
    assert caught.value.configuration
    assert caught.value.advice == "cache.states"


def test_memory_is_unlocked_before_it_is_unmapped(monkeypatch):
    """As long as a view lives it stays; the driver is not here, so it is seen when it would be called."""
    seen = []

    def mapped(address):
        lines = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(first, 16) <= address < int(end, 16) for first, end in lines)

    monkeypatch.setattr(device, "register_host", lambda _: True)
    monkeypatch.setattr(device, "_unregister", lambda address: seen.append((address, mapped(address))))
    zeros, locked = device.host_zeros((64, 1 << 16), torch.float32, torch.device("cuda"), "checkpoints", "")
    address, view = zeros.data_ptr(), zeros[3:].view(torch.uint8)
    assert locked
    del zeros
    assert not view.any()
    assert seen == []
    del view
    gc.collect()
    assert seen == [(address, True)]
    assert not mapped(address)
