"""Transfers beside the compute thread: steps go on, cancel waits for what must end, and the queue is bounded."""

import contextlib
import os
import threading
import time

import pytest
import torch

from daemons.snapshots.state_map import StateMap
from daemons.snapshots.transfers import MAX_PENDING, TransferExecutor
from lucevisor.model.values import LayerRange, Space
from lucevisor.protocol.messages import Restore, Restored, Save, Saved, SlotPlace, TransferFailed
from lucevisor.snapshots.file_format import SlotRecord
from tests.daemons.snapshot_pipeline import SlotPipeline, golden_spec, ids_of
from tests.daemons.test_snapshot import N, saved


@pytest.fixture
def spec():
    return golden_spec("qwen35")


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
    transfers.submit(Save(1, writing.file, place, writing.tensors(LayerRange(0, spec.n_layers))), os.dup(writing.fd))
    assert lost.wait(20)
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
    transfers.submit(order, os.dup(writing.fd))
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
    deadline = time.monotonic() + 10
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
        transfers.submit(order, os.dup(reading.fd))
    assert gate.reached.wait(20)
    threading.Timer(0.1, gate.open.set).start()
    transfers.cancel("the supervisor dropped every sequence")
    assert len(answers) == 3
    assert len(transfers) == 0
    assert all(isinstance(a, TransferFailed) and a.transfer == 9 for a in answers)
    assert all("dropped every sequence" in a.reason for a in answers)
    before = pipeline.bytes_of(Space.FULL)
    time.sleep(0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, pipeline.bytes_of(Space.FULL), strict=True))
    store.close_snapshot(reading)
    store.close()


def test_a_save_that_hangs_delays_no_reset(spec, tmp_path):
    """It may read pages that belong to others by now, so it is answered as failed whatever it wrote."""
    pipeline, store, place, _ = saved(spec, tmp_path)
    gate, answers, transfers = gated(pipeline)
    writing = store.begin(made_slot(spec))
    tensors = writing.tensors(LayerRange(0, spec.n_layers))[-1:]  # one segment: nothing is left to be stopped before
    transfers.submit(Save(9, writing.file, place, tensors), os.dup(writing.fd))
    assert gate.reached.wait(20)
    began = time.monotonic()
    transfers.cancel("the supervisor dropped every sequence")
    assert time.monotonic() - began < 20  # the gate opens after 30 s by itself, with an error
    gate.open.set()
    (answer,) = wait_for(answers, 1)
    assert isinstance(answer, TransferFailed)
    assert "dropped every sequence" in answer.reason
    store.abort(writing, "cancelled")
    store.close()


def descriptors_of(fd):
    """How many descriptors of this process are open on the file of ``fd``; other threads may open and close others."""
    wanted, n = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            n += os.path.samestat(os.fstat(int(name)), wanted)
    return n


def test_more_transfers_than_may_be_pending_are_refused(spec, tmp_path):
    pipeline, store, place, entry = saved(spec, tmp_path)
    gate, answers, transfers = gated(pipeline)
    reading = store.open_for_restore(entry)
    order = Restore(9, reading.file, SlotPlace(N, place.full, state=3), reading.tensors(LayerRange(0, spec.n_layers)))
    n_fds = descriptors_of(reading.fd)
    for _ in range(MAX_PENDING + 2):
        transfers.submit(order, os.dup(reading.fd))
    assert [a.reason for a in answers] == [f"{MAX_PENDING} transfers are pending already"] * 2
    gate.open.set()
    wait_for(answers, MAX_PENDING + 2)
    transfers.cancel("end")
    assert descriptors_of(reading.fd) == n_fds
    assert sum(isinstance(a, Restored) for a in answers) == MAX_PENDING
    store.close_snapshot(reading)
    store.close()
