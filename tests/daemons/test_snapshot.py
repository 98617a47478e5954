"""Slots of real models go to a file and come back, under another split, in other pages, in other number formats."""

import os
import random
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors import safe_open

from daemons.errors import StateError
from daemons.ops.paged import Pages
from daemons.snapshots.state_map import StateMap
from daemons.snapshots.transfers import TransferExecutor
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.protocol import files
from lucevisor.protocol.files import LocalFile
from lucevisor.protocol.messages import Restore, Restored, Save, Saved, SlotPlace, TransferFailed
from lucevisor.snapshots.file_format import SlotRecord
from lucevisor.snapshots.store import SnapshotStore
from tests.combinations import combinations
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model

FAMILIES = ["qwen35", "qwen3", "gemma4_e2b"]
N = 133  # two whole pages and a part of a third; windows begin inside the second page


@pytest.fixture
def spec():
    return golden_spec("qwen35")


def opened(directory, model):
    store = SnapshotStore(directory, model, 1 << 30)
    store.scan()
    return store


def saved(spec, tmp_path, kv_dtype=Dtype.FLOAT32):
    """A pipeline that computed N tokens, and what it saved of them."""
    pipeline = SlotPipeline(spec, kv_dtype=kv_dtype, seed=1)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    place = checkpoint(pipeline, 0, 5)
    store = opened(tmp_path, state_model(spec, kv_dtype))
    return pipeline, store, place, pipeline.save(store, ids_of(spec, N), place)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_under_one_split_restored_under_others(name, tmp_path):
    spec = golden_spec(name)
    legal = [i for i in range(1, spec.n_layers) if spec.legal_boundary(i)]
    ids = ids_of(spec, N)
    saving = SlotPipeline(spec, [legal[:1], []], seed=1)
    saving.open(0)
    saving.run(0, ids)
    place = checkpoint(saving, 0, 5)
    wanted = saving.greedy(0, [3, 1], 16)  # the sequence goes on; the slot stays
    store = opened(tmp_path, state_model(spec))
    entry = saving.save(store, ids, place)
    store.close()

    splits = [[[]], [legal[-1:], []], [legal[:1], legal[1:2], []], [legal[1:3], []]]
    for seed, layer_split in enumerate(splits):
        other = SlotPipeline(spec, layer_split, seed=10 + seed, n_pages=60)
        restarted = opened(tmp_path, state_model(spec))
        fresh = other.fresh_place(N, 2 if KvGroup.RECURRENT in spec.kv_groups() else -1)
        answers = other.restore(restarted, restarted.find([*ids, 3], N).entry, fresh)
        assert all(isinstance(a, Restored) and a.converted == "" for a in answers)
        other.adopt(1, fresh, live_state=3)
        assert other.greedy(1, [3, 1], 16) == wanted, layer_split
        restarted.close()
    assert entry.n_tokens == N


@combinations(name=["qwen35", "laguna"], kv_dtype=[Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.Q8_0])
def test_equal_formats_come_back_bit_by_bit(name, kv_dtype, tmp_path):
    spec = golden_spec(name)
    _, store, _, first = saved(spec, tmp_path, kv_dtype)
    with safe_open(tmp_path / first.file, "pt") as file:
        before = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    other = SlotPipeline(spec, [[3], []] if spec.legal_boundary(3) else [[]], kv_dtype=kv_dtype, seed=2)
    fresh = other.fresh_place(N, 2 if KvGroup.RECURRENT in spec.kv_groups() else -1)
    assert all(isinstance(a, Restored) for a in other.restore(store, first, fresh))
    second = other.save(store, ids_of(spec, N), fresh)
    with safe_open(tmp_path / second.file, "pt") as file:
        for name, tensor in before.items():
            assert torch.equal(file.get_tensor(name), tensor), name
    assert first.snapshot.checksums == second.snapshot.checksums
    store.close()


@pytest.mark.parametrize("name", ["qwen35", "laguna"])
@pytest.mark.parametrize(
    ("before", "restored", "limit"),
    [
        (Dtype.FLOAT32, Dtype.BFLOAT16, 2**-8),
        (Dtype.FLOAT32, Dtype.FLOAT16, 2**-11),
        (Dtype.BFLOAT16, Dtype.FLOAT32, 0.0),
        (Dtype.FLOAT32, Dtype.Q8_0, 0.02),
        (Dtype.Q8_0, Dtype.FLOAT32, 0.0),
        (Dtype.Q8_0, Dtype.BFLOAT16, 2**-8),
    ],
)
def test_other_number_formats_are_converted(name, before, restored, limit, tmp_path):
    spec = golden_spec(name)
    one, store, place, entry = saved(spec, tmp_path, before)
    store.close()
    store = opened(tmp_path, state_model(spec, restored))
    other = SlotPipeline(spec, [[2], []] if spec.legal_boundary(2) else [[]], kv_dtype=restored, seed=2)
    fresh = other.fresh_place(N, 2 if KvGroup.RECURRENT in spec.kv_groups() else -1)
    answers = other.restore(store, entry, fresh)
    short = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16", Dtype.FLOAT16: "F16", Dtype.Q8_0: "q8_0"}
    assert {a.converted for a in answers} - {""} == {f"{short[before]} to {short[restored]}"}  # "": no attention there
    for layer in spec.layers:
        for state in layer.state:
            if layer.kv_group is KvGroup.RECURRENT:
                continue
            found, wanted = (numbers(c, layer, state.name, p) for c, p in ((other, fresh), (one, place)))
            assert found.shape == wanted.shape
            assert float((found - wanted).abs().max()) <= limit * float(wanted.abs().max()), layer.index
    store.close()


def numbers(pipeline, layer, name, place):
    """The slot's rows of one layer in float32, read with the pool's own read."""
    for stage in pipeline.stages:
        for shard in stage.shards:
            if layer.index in shard.pools.layers:
                full = layer.kv_group is KvGroup.FULL
                index = torch.tensor(place.full if full else place.window)
                first = 0 if full else max(0, place.n_tokens - layer.window + 1) - 64 * place.first_window
                stop = place.n_tokens - (0 if full else 64 * place.first_window)
                pages = Pages(index, 1, first, stop - first)
                return shard.pools.paged(layer.index, name).read(pages, torch.float32)[0]
    raise AssertionError(layer.index)


def test_a_part_of_a_slot_where_slots_can_be_cut(tmp_path):
    spec = golden_spec("qwen3")
    assert spec.kv_groups() == {KvGroup.FULL}
    ids = ids_of(spec, N)
    one = SlotPipeline(spec, seed=1)
    one.open(0)
    one.run(0, ids)
    store = opened(tmp_path, state_model(spec))
    entry = one.save(store, ids, one.place(0))
    one.open(1)
    one.run(1, ids[:100])
    wanted = one.greedy(1, [9, 8], 12)
    other = SlotPipeline(spec, [[1], []], seed=3)
    fresh = other.fresh_place(100)
    other.restore(store, entry, fresh)
    other.adopt(0, fresh)
    assert other.greedy(0, [9, 8], 12) == wanted
    store.close()


def test_short_writes_and_reads_go_on_where_they_stopped(spec, tmp_path, monkeypatch):
    """A disk that takes and gives a part of what it is asked for, as the kernel may."""
    pipeline, store, place, first = saved(spec, tmp_path)
    source = random.Random(7)

    def part(real):
        def call(fd, views, offset):
            n = source.randrange(1, sum(map(len, views)) + 1)
            short = []
            for view in views:
                short.append(view[:n])
                n -= len(short[-1])
            return real(fd, [view for view in short if len(view)], offset)

        return call

    monkeypatch.setattr(files.os, "pwritev", part(os.pwritev))
    assert pipeline.save(store, ids_of(spec, N), place).snapshot.checksums == first.snapshot.checksums
    monkeypatch.undo()
    real = os.preadv
    monkeypatch.setattr(files, "os", SimpleNamespace(pwritev=os.pwritev, preadv=part(real), close=os.close))
    fresh = pipeline.fresh_place(N, 3)
    assert all(isinstance(a, Restored) for a in pipeline.restore(store, first, fresh))
    monkeypatch.undo()
    assert pipeline.save(store, ids_of(spec, N), fresh).snapshot.checksums == first.snapshot.checksums
    store.close()


# ---- places and tensors that do not fit


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (SlotPlace(N, [0, 1, 99], state=2), "page 99 is outside the pool of 40"),
        (SlotPlace(N, [0, 1], state=2), "no page is given for position 128"),
        (SlotPlace(N, [0, 1, 2], state=8), "state 8 is outside the pool of 8"),
        (SlotPlace(N, [0, 1, 2], state=-1), "state -1 is outside the pool of 8"),
        (SlotPlace(N + 1, [0, 1, 2], state=2), "a slot of 134 tokens"),
        (SlotPlace(-1, [0, 1, 2], state=2), "a slot of -1 tokens"),
    ],
)
def test_an_impossible_place_is_refused_and_the_daemon_lives_on(spec, tmp_path, place, text):
    pipeline, store, good, entry = saved(spec, tmp_path)
    reading = store.open_for_restore(entry)
    for kind in (Save, Restore):
        (answer,) = pipeline.transfer(kind, reading, place)
        assert isinstance(answer, TransferFailed)
        assert text in answer.reason
        assert "tensor layers." in answer.where
    (answer,) = pipeline.transfer(Restore, reading, SlotPlace(N, good.full, state=3))
    assert isinstance(answer, Restored)
    store.close_snapshot(reading)
    store.close()


def test_tensors_of_another_shape_are_refused(spec, tmp_path):
    pipeline, store, place, entry = saved(spec, tmp_path)
    states = StateMap(spec, [pipeline.stages[0].shards[0].pools])
    paged = next(t for t in entry.snapshot.tensors if t.kind == "k")
    state = next(t for t in entry.snapshot.tensors if t.kind == "delta")
    for tensor, change in (
        (paged, {"shape": (N, 9, 16)}),
        (paged, {"dtype": "F16"}),
        (paged, {"kind": "z"}),
        (paged, {"kind": "k.scale"}),
        (state, {"shape": (1, 2, 3)}),
        (state, {"dtype": "BF16"}),
        (state, {"kind": "z"}),
    ):
        with pytest.raises(StateError, match=r"tensor layers\.\d+\.\w+: .*does not fit"):
            states.to_save(place, [msgspec.structs.replace(tensor, **change)])
    store.close()


# ---- transfers beside the compute thread


class Gate:
    """Holds a transfer at its first system call."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, _):
        self.reached.set()
        assert self.open.wait(30)


def gated(pipeline):
    gate, answers = Gate(), []
    states = StateMap(pipeline.spec, [k.pools for k in pipeline.stages[0].shards])
    return gate, answers, TransferExecutor(states, lambda message, _: answers.append(message), before_io=gate)


def test_a_thread_that_finds_no_memory_to_begin_is_not_waited_for(spec, request):
    states = StateMap(spec, [k.pools for k in SlotPipeline(spec, seed=1).stages[0].shards])
    request.getfixturevalue("no_thread_begins")  # those of the pipeline did
    with pytest.raises(MemoryError, match="did not begin"):
        TransferExecutor(states, lambda *_: None)


def test_a_thread_that_cannot_go_on_ends_the_daemon(spec, tmp_path, capfd):
    """Transfers behind it would wait for it for ever."""
    pipeline, store, place, _ = saved(spec, tmp_path)
    lost, said = threading.Event(), []

    def answer(*_):
        raise MemoryError

    def on_broken():
        said.append(capfd.readouterr().err)
        lost.set()

    states = StateMap(spec, [k.pools for k in pipeline.stages[0].shards])
    transfers = TransferExecutor(states, answer, on_broken=on_broken)
    writing = store.begin(made_slot(spec))
    transfers.submit(
        Save(1, writing.file, place, writing.tensors(LayerRange(0, spec.n_layers))), LocalFile(os.dup(writing.fd))
    )
    assert lost.wait(60)
    assert "MemoryError" in said[0], "the process may end now"
    store.abort(writing, "the daemon is lost")
    store.close()


def test_steps_go_on_while_a_slot_is_saved(spec, tmp_path):
    """The sequence appends to the slot's last, partial page and runs its live state meanwhile."""
    alone = SlotPipeline(spec, seed=1)
    alone.open(0)
    alone.run(0, ids_of(spec, N))
    wanted = alone.greedy(0, [3], 40)
    pipeline, store, place, first = saved(spec, tmp_path)
    gate, answers, transfers = gated(pipeline)
    writing = store.begin(made_slot(spec))
    order = Save(1, writing.file, place, writing.tensors(LayerRange(0, spec.n_layers)))
    began = time.monotonic()
    transfers.submit(order, LocalFile(os.dup(writing.fd)))
    assert time.monotonic() - began < 20  # the gate opens after 30 s by itself, with an error
    assert gate.reached.wait(20)
    assert pipeline.greedy(0, [3], 40) == wanted
    gate.open.set()
    assert wait_for(answers, 1) == [Saved(1, writing.data_bytes, answers[0].seconds)]
    assert store.finish(writing, writing.data_bytes).snapshot.checksums == first.snapshot.checksums
    store.close()


def made_slot(spec):
    return SlotRecord(ids_of(spec, N), 100.0)


def wait_for(answers, n):
    deadline = time.monotonic() + 60
    while len(answers) < n:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return answers


def test_cancel_returns_when_no_page_is_touched_any_more(spec, tmp_path):
    pipeline, store, place, entry = saved(spec, tmp_path)
    gate, answers, transfers = gated(pipeline)
    reading = store.open_for_restore(entry)
    order = Restore(9, reading.file, SlotPlace(N, place.full, state=3), reading.tensors(LayerRange(0, spec.n_layers)))
    for _ in range(3):
        transfers.submit(order, LocalFile(os.dup(reading.fd)))
    assert gate.reached.wait(20)
    threading.Timer(1.0, gate.open.set).start()  # when `cancel` waits
    transfers.cancel("the supervisor dropped every sequence")
    assert len(answers) == 3
    assert len(transfers) == 0
    assert all(isinstance(a, TransferFailed) and a.transfer == 9 for a in answers)
    assert all("dropped every sequence" in a.reason for a in answers)
    before = pipeline.bytes_of(KvGroup.FULL)
    time.sleep(0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, pipeline.bytes_of(KvGroup.FULL), strict=True))
    store.close_snapshot(reading)
    store.close()
