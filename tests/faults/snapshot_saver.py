"""A process that saves a slot of a real model and is killed at a point of its choice.

    python -m tests.faults.snapshot_saver DIRECTORY

Reads one number a line from standard input; for each it forks a child that begins, writes (with the daemon's own
threads) and finishes the slot, and kills itself with SIGKILL at that point: every step of the supervisor's write
protocol and every system call of the daemon on the file is one.  Prints "killed POINT NAME", "done N_POINTS" or
"failed CODE".
"""

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import structlog

from daemons.snapshots import state_map
from daemons.snapshots.transfers import TransferExecutor
from lucevisor.model.values import LayerRange
from lucevisor.protocol.files import LocalFile
from lucevisor.protocol.messages import Save, Saved
from lucevisor.snapshots.file_format import SlotRecord
from lucevisor.snapshots.store import SnapshotStore
from tests.daemons.snapshot_pipeline import SlotPipeline, StateMap, checkpoint, golden_spec, ids_of, state_model

N = 150
NEW, OLD = 0, 1  # seeds of the slot that is being saved, and of one that was saved before


def save_and_die(directory, pipeline, place, point):
    at_point, lock = [0], threading.Lock()

    def at(name):
        with lock:
            if at_point[0] == point:
                os.write(1, f"killed {point} {name}".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            at_point[0] += 1

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one saving thread: the points come in the same order
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    state_map.SEGMENT_BYTES = 20000  # several system calls for a tensor
    spec = pipeline.spec
    store = SnapshotStore(directory, state_model(spec), 1 << 30, at=at)
    answers, came = [], threading.Event()

    def answer(message, _):
        answers.append(message)
        came.set()

    transfers = TransferExecutor(
        StateMap(spec, [k.pools for s in pipeline.stages for k in s.shards]), answer, before_io=at
    )
    writing = store.begin(SlotRecord(ids_of(spec, N, seed=NEW), 100.0))
    order = Save(1, writing.file, place, writing.tensors(LayerRange(0, spec.n_layers)))
    transfers.submit(order, LocalFile(os.dup(writing.fd)))
    came.wait(30)
    assert isinstance(answers[0], Saved), answers
    store.finish(writing, answers[0].n_bytes)
    os.write(1, f"done {at_point[0]}".encode())


def main():
    directory = Path(sys.argv[1])
    pipeline = SlotPipeline(golden_spec("qwen35"), seed=1)
    pipeline.open(0)
    pipeline.run(0, ids_of(pipeline.spec, N, seed=NEW))
    place = checkpoint(pipeline, 0, 5)
    for line in sys.stdin:
        pid = os.fork()  # no other thread lives here: those of the save are the child's
        if pid == 0:
            try:
                save_and_die(directory, pipeline, place, int(line))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            os.write(1, f"failed {os.WEXITSTATUS(status)}".encode())
        os.write(1, b"\n")  # the line is whole when the child is gone


if __name__ == "__main__":
    main()
