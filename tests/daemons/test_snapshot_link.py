"""Save and Restore through the link of a real daemon process."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Restore, Restored, Role, Save, Saved, Shutdown, SlotPlace, TransferFailed
from lucevisor.protocol.steps import (
    CopyState,
    OpenSequence,
    Reset,
    ResetDone,
    Sampling,
    SetPages,
    Slice,
    Step,
    ZeroState,
)
from lucevisor.protocol.transport import BlockingLink
from lucevisor.snapshots.file_format import SlotRecord
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import GOLDEN, golden_spec, ids_of, state_model

SPEC = golden_spec("qwen35")
ALL = LayerRange(0, SPEC.n_layers)
N = 150
GREEDY = Sampling(temperature=0.0)


class Daemon:
    """A daemon process with one stage of the golden model."""

    def __init__(self):
        ends = [socket.socketpair() for _ in range(2)]
        theirs = [b.fileno() for _, b in ends]
        arguments = f"--group=left --backend=cpu --link-fd={theirs[0]} --pulse-fd={theirs[1]}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "daemons",
                *arguments.split(),
                f"--parent-pid={os.getpid()}",
                "--threads=1",
                "--cores=",
            ],
            cwd=Path(__file__).parents[2],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _, b in ends:
            b.close()
        self.link = BlockingLink(ends[0][0], role=Role.SUPERVISOR)
        self._pulse = ends[1][0]
        self.receive()
        stage = StagePlan(0, [ShardPlan(0, ALL)], None, None, embedding=True, output=True)
        files = [str(GOLDEN / "qwen35" / "model.gguf")]
        self.link.send(Load(files, Dtype.FLOAT32, Dtype.FLOAT32, [stage], [], PoolSizes(16, 0, 8), 4, 512, threads=1))
        self.receive()

    def receive(self):
        frame = self.link.receive()
        assert frame is not None, self.link.closed_because
        return frame.message

    def ask(self, message, fds=()):
        """Send, and wait for the answer with the same request id."""
        request_id = getattr(message, "transfer", 0)
        self.link.send(message, request_id=request_id, fds=fds)
        frame = self.link.receive()
        assert frame is not None, self.link.closed_because
        assert isinstance(message, Step | Reset) or frame.request_id == request_id
        return frame.message

    def step(self, operations, start, tokens):
        """The sampled token."""
        result = self.ask(Step(1, 0, operations, [Slice(0, start, list(tokens), True)]))
        return result.sampled[0].token

    def greedy(self, operations, start, tokens, n):
        out = [self.step(operations, start, tokens)]
        while len(out) < n:
            out.append(self.step([], start + len(tokens) + len(out) - 1, out[-1:]))
        return out

    def close(self):
        with contextlib.suppress(Exception):
            self.link.send(Shutdown())
        self.link.close()
        self._pulse.close()
        return self.process.wait(10)


@pytest.fixture
def start():
    started = []

    def make():
        started.append(Daemon())
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.close()


def prefill(daemon):
    """Sequence 0 of N tokens in pages 3, 1, 2, its checkpoint in state 5."""
    operations = [OpenSequence(0, 0, GREEDY), ZeroState(0), SetPages(0, Space.FULL, 0, [3, 1, 2])]
    daemon.step(operations, 0, ids_of(SPEC, N))
    daemon.ask(Step(2, 0, [CopyState(0, 5)]))
    return SlotPlace(N, [3, 1, 2], state=5)


def test_a_slot_survives_its_daemon(start, tmp_path):
    store = SnapshotStore(tmp_path, state_model(SPEC), 1 << 30)
    one = start()
    place = prefill(one)
    writing = store.begin(SlotRecord(ids_of(SPEC, N), time.time()))
    saved = one.ask(Save(11, writing.file, place, writing.tensors(ALL)), [writing.fd])
    assert isinstance(saved, Saved)
    assert saved.n_bytes == writing.data_bytes
    entry = store.finish(writing, saved.n_bytes)
    wanted = one.greedy([], N, [3, 1], 12)

    # a save under way when the daemon dies: the supervisor gives it up, the other file stays good
    writing = store.begin(SlotRecord(ids_of(SPEC, N)[:-1], time.time()))
    one.link.send(Save(12, writing.file, place, writing.tensors(ALL)), request_id=12, fds=[writing.fd])
    one.process.kill()
    one.process.wait(10)
    store.abort(writing, "group left was lost")

    two = start()
    reading = store.open_for_restore(store.scan()[0])
    restored = two.ask(Restore(13, reading.file, SlotPlace(N, [9, 4, 7], state=2), reading.tensors(ALL)), [reading.fd])
    store.check(reading)
    assert restored == Restored(13, reading.n_bytes(reading.tensors(ALL)), restored.seconds)
    operations = [OpenSequence(0, 1, GREEDY), CopyState(2, 1), SetPages(0, Space.FULL, 0, [9, 4, 7])]
    assert two.greedy(operations, N, [3, 1], 12) == wanted
    assert reading.entry.file == entry.file
    assert two.close() == 0
    store.close_snapshot(reading)
    store.close()


def test_a_failed_transfer_leaves_the_daemon_working(start, tmp_path):
    store = SnapshotStore(tmp_path, state_model(SPEC), 1 << 30)
    daemon = start()
    place = prefill(daemon)
    writing = store.begin(SlotRecord(ids_of(SPEC, N), time.time()))
    tensors = writing.tensors(ALL)
    full, memory = os.open("/dev/full", os.O_RDWR), os.open("/proc/self/mem", os.O_RDONLY)
    try:
        answer = daemon.ask(Save(21, writing.file, place, tensors), [full])
        assert isinstance(answer, TransferFailed)
        assert answer.transfer == 21
        assert "ENOSPC" in answer.reason
        assert any(t.name in answer.where for t in tensors)  # of several threads any may fail first
        assert writing.file in answer.where
        first = [t for t in tensors if t.name == tensors[0].name]
        zero = [type(t)(t.name, t.layer, t.kind, t.dtype, t.shape, 0, t.n_bytes, t.first) for t in first]
        answer = daemon.ask(Restore(22, writing.file, SlotPlace(N, [9, 4, 7], state=2), zero), [memory])
        assert isinstance(answer, TransferFailed)
        assert answer.transfer == 22
        assert "EIO" in answer.reason
    finally:
        os.close(full)
        os.close(memory)
    os.ftruncate(writing.fd, tensors[-1].offset)
    answer = daemon.ask(Restore(23, writing.file, SlotPlace(N, [9, 4, 7], state=2), tensors), [writing.fd])
    assert isinstance(answer, TransferFailed)
    assert "the file ends at byte" in answer.reason
    store.abort(writing, "this test is over")
    assert daemon.greedy([], N, [3, 1], 4)
    assert daemon.ask(Reset(77)) == ResetDone(77)
    assert daemon.close() == 0
    store.close()
