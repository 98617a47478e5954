"""Slots between a GPU's pools and a file: bit by bit, to and from a cpu, beside running steps."""

import threading

import pytest
import torch
from safetensors import safe_open

from daemons.snapshots import state_map as rows_of
from lucevisor.model.values import Backend, Dtype, KvGroup
from lucevisor.protocol.messages import Restored
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

N = 133
GPU = Backend.HIP if torch.version.hip else Backend.CUDA


@pytest.fixture(params=[8 << 20, 3000], ids=["whole tensors", "many pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr(rows_of, "SEGMENT_BYTES", request.param)


def prepared(spec, backend, **options):
    pipeline = SlotPipeline(spec, backend=backend, seed=1, **options)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    return pipeline, checkpoint(pipeline, 0, 5)


def tensors_of(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["qwen35", "laguna"])
@pytest.mark.parametrize("kv_dtype", list(Dtype))
@pytest.mark.parametrize("to", [GPU, Backend.CPU])
def test_a_slot_of_a_gpu_comes_back_bit_by_bit(name, kv_dtype, to, tmp_path):
    spec = golden_spec(name)
    pipeline, place = prepared(spec, GPU, kv_dtype=kv_dtype)
    store = SnapshotStore(tmp_path, state_model(spec, kv_dtype), 1 << 30)
    ids = ids_of(spec, N)
    first = pipeline.save(store, ids, place)
    before = tensors_of(tmp_path / first.file)
    assert all(float(t.float().abs().max()) > 0 for t in before.values())
    other = SlotPipeline(spec, [[3], []] if spec.legal_boundary(3) else [[]], kv_dtype=kv_dtype, seed=2, backend=to)
    fresh = other.fresh_place(N, 2 if KvGroup.RECURRENT in spec.kv_groups() else -1)
    assert all(isinstance(a, Restored) for a in other.restore(store, first, fresh))
    second = other.save(store, ids, fresh)
    after = tensors_of(tmp_path / second.file)
    assert all(torch.equal(after[key], before[key]) for key in before)
    store.close()


@pytest.mark.parametrize("backend", [GPU, Backend.CPU])
def test_greedy_tokens_go_on_on_a_gpu(backend, tmp_path):
    """Saved by either backend in float32, restored on the GPU under another split."""
    spec = golden_spec("qwen35")
    pipeline, place = prepared(spec, backend)
    wanted = pipeline.greedy(0, [3, 1], 16)
    store = SnapshotStore(tmp_path, state_model(spec), 1 << 30)
    entry = pipeline.save(store, ids_of(spec, N), place)
    other = SlotPipeline(spec, [[1], [2, 6], []], seed=2, backend=GPU)
    fresh = other.fresh_place(N, 2)
    other.restore(store, entry, fresh)
    other.adopt(1, fresh, live_state=3)
    assert other.greedy(1, [3, 1], 16) == wanted
    store.close()


def test_steps_go_on_while_slots_are_saved_and_restored(tmp_path):
    spec = golden_spec("qwen35")
    alone, _ = prepared(spec, GPU)
    wanted = alone.greedy(0, [3], 200)
    pipeline, place = prepared(spec, GPU)
    store = SnapshotStore(tmp_path, state_model(spec), 1 << 30)
    first = pipeline.save(store, ids_of(spec, N), place)
    fresh = pipeline.fresh_place(N, 2)
    stop, entries = threading.Event(), []

    def keep_going():
        while not stop.is_set():
            entries.append(pipeline.save(store, ids_of(spec, N), place))
            pipeline.restore(store, entries[-1], fresh)
            entries.append(pipeline.save(store, ids_of(spec, N), fresh))

    thread = threading.Thread(target=keep_going)
    thread.start()
    try:
        assert pipeline.greedy(0, [3], 200) == wanted
    finally:
        stop.set()
        thread.join()
    assert len(entries) > 1
    assert {tuple(e.snapshot.checksums.items()) for e in entries} == {tuple(first.snapshot.checksums.items())}
    store.close()
