"""Snapshots on disk: speed of a save beside a raw fallocate + write + fsync of the same bytes, and of a restore.

    python bench/snapshot.py [--tokens 4096] [--shape small|27b] [--device cpu|cuda] [--dir DIR] [--rounds 9] [--save]
                             [--decode MODEL.gguf]

One slot of the shape: full-attention layers in bfloat16 and recurrent states in float32, pages scattered over the pool.
Raw and save alternate, so that drift of the disk hits both alike; the first round is not counted.  A save is all of it:
lay out, allocate, copy from the pools, checksums, header, two fsyncs, rename, fsync of the directory.  --save writes
bench/results/snapshot-DEVICE.json.

--decode: instead, how much slower a daemon decodes one sequence of MODEL while it saves slots of the shape one after
the other without a pause; the supervisor's part runs in a process of its own.  A second with and one without in turns.
"""

import argparse
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import structlog
import torch
from records import save

from daemons.kv.pools import Pools
from daemons.models.stage import LoadedStage
from daemons.snapshots.state_map import StateMap
from daemons.snapshots.transfers import TransferExecutor
from lucevisor.model.families import open_spec
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor, attention_state
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.files import LocalFile
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Restore, Save, SlotPlace, TransferFailed
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step
from lucevisor.snapshots.file_format import SlotRecord, StateModel
from lucevisor.snapshots.store import SnapshotStore

SHAPES = {  # layers, kv heads, head dim, delta heads, delta dim, channels
    "small": (16, 2, 128, 16, 64, 4096),
    "27b": (64, 4, 256, 48, 128, 10240),
}
TARGET = 0.7


def made_spec(shape):
    """A hybrid model: every fourth layer attends, the others are recurrent."""
    n, heads, dim, delta_heads, delta_dim, channels = SHAPES[shape]
    recurrent = (
        StateTensor("conv", (3, channels), Dtype.FLOAT32),
        StateTensor("delta", (delta_heads, delta_dim, delta_dim), Dtype.FLOAT32),
    )
    layers = tuple(
        LayerSpec(i, KvGroup.FULL, {}, attention_state(heads, dim, dim))
        if i % 4 == 3
        else LayerSpec(i, KvGroup.RECURRENT, {}, recurrent)
        for i in range(n)
    )
    return ModelSpec("made", shape, "none", 1, 1000, 1 << 20, layers, {}, {}, 1, None)


class Bench:
    def __init__(self, options, directory):
        self.directory = directory
        self.device = torch.device(options.device, None if options.device == "cpu" else 0)
        spec = made_spec(options.shape)
        n_pages = -(-options.tokens // PAGE_TOKENS)
        self.sizes = PoolSizes(2 * n_pages, 0, 4)
        model = StateModel("0" * 64, "made", options.shape, Dtype.BFLOAT16, Dtype.BFLOAT16, spec.layers)
        self.model, self.spec = model, spec
        self.layers = LayerRange(0, spec.n_layers)
        pages = list(range(2 * n_pages))
        random.Random(0).shuffle(pages)
        self.saved_from = SlotPlace(options.tokens, pages[:n_pages], state=1)
        self.restored_to = SlotPlace(options.tokens, pages[n_pages:], state=2)
        self.tokens = list(range(options.tokens))
        self.answers, self.came = [], threading.Event()

    def make_store(self):
        self.store = SnapshotStore(self.directory, self.model, 1 << 40)

    def start(self):
        self.pools = Pools(self.spec, self.layers, self.device, Dtype.BFLOAT16, self.sizes)
        for _, tensors in self.pools._stacks:
            for tensor in tensors:
                tensor.random_(0, 100)
        self.transfers = TransferExecutor(StateMap(self.spec, [self.pools]), self.answer)

    def answer(self, message, _):
        self.answers.append(message)
        self.came.set()

    def transfer(self, order, fd):
        self.came.clear()
        self.transfers.submit(order, LocalFile(os.dup(fd)))
        self.came.wait()
        answer = self.answers[-1]
        if isinstance(answer, TransferFailed):
            raise SystemExit(f"transfer {answer.transfer}: {answer.where}: {answer.reason}")
        return answer

    def raw(self, n_bytes):
        """What the disk can do: seconds to allocate, write and sync as many bytes from warm memory."""
        piece = memoryview(bytearray(os.urandom(1 << 20)) * 8)
        path = self.directory / "raw.tmp"
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        began = time.perf_counter()
        os.posix_fallocate(fd, 0, n_bytes)
        for at in range(0, n_bytes, len(piece)):
            os.pwrite(fd, piece[: n_bytes - at], at)
        os.fsync(fd)
        seconds = time.perf_counter() - began
        os.close(fd)
        path.unlink()
        return seconds

    def save(self):
        began = time.perf_counter()
        writing = self.store.begin(SlotRecord(self.tokens, 0.0))
        allocated = time.perf_counter()
        answer = self.transfer(Save(1, writing.file, self.saved_from, writing.tensors(self.layers)), writing.fd)
        copied = time.perf_counter()
        entry = self.store.finish(writing, answer.n_bytes)
        ended = time.perf_counter()
        return entry, {"save": ended - began, "copy out": copied - allocated, "seal": ended - copied}

    def restore(self, entry):
        began = time.perf_counter()
        reading = self.store.open_for_restore(entry)
        check = threading.Thread(target=self.store.check, args=(reading,))
        check.start()  # beside the daemon, as the supervisor does
        self.transfer(Restore(2, reading.file, self.restored_to, reading.tensors(self.layers)), reading.fd)
        copied = time.perf_counter()
        check.join()
        ended = time.perf_counter()
        self.store.close_snapshot(reading)
        return {"restore": ended - began, "copy in": copied - began}

    def same(self):
        """Whether the restored rows equal the saved ones."""
        for kv_group, tensors in self.pools._stacks:
            for t in tensors:
                if kv_group is KvGroup.RECURRENT:
                    assert torch.equal(t[:, 1], t[:, 2])
                else:
                    assert torch.equal(t[:, self.saved_from.full], t[:, self.restored_to.full])


def keep_saving(sock, bench):
    """The supervisor's part: lay out, hand the descriptor over, seal; until the other end closes."""
    while True:
        writing = bench.store.begin(SlotRecord(bench.tokens, 0.0))
        order = Save(1, writing.file, bench.saved_from, writing.tensors(bench.layers))
        data = msgspec.msgpack.encode(order)
        try:
            socket.send_fds(sock, [len(data).to_bytes(8, "little")], [writing.fd])
            sock.sendall(data)
            answer = sock.recv(8)
        except ConnectionError:
            answer = b""
        if len(answer) < 8:
            bench.store.abort(writing, "the other end closed")
            return
        entry = bench.store.finish(writing, int.from_bytes(answer, "little"))
        (bench.directory / entry.file).unlink()


class Decoder:
    """One sequence of a model on one stage, one token a step."""

    def __init__(self, path, device):
        self.spec = open_spec(path)
        backend = Backend.CPU if device == "cpu" else Backend.CUDA
        dtype = Dtype.FLOAT32 if device == "cpu" else Dtype.BFLOAT16
        plan = StagePlan(0, [ShardPlan(0, LayerRange(0, self.spec.n_layers))], None, None, embedding=True, output=True)
        load = Load([], dtype, dtype, [plan], [], PoolSizes(64, 64, 2), 1, 512, threads=1)
        self.stage = LoadedStage.load(self.spec, plan, load, backend, lambda _: None)
        pages = [SetPages(0, s, 0, list(range(64))) for s in self.spec.kv_groups() if s is not KvGroup.RECURRENT]
        self.stage.apply([OpenSequence(0, 0, SamplingParams()), *pages])
        self.position = 0

    def run(self, seconds):
        """Tokens a second."""
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step = Step(1, 0, [], [Slice(0, self.position % 2048, [5], True)])
            self.stage.logits(self.stage.forward(step, None).rows, None).argmax().item()
            self.position += 1
            n += 1
        return n / (time.perf_counter() - began)


def decode_beside_saves(bench, options):
    ours, theirs = socket.socketpair()
    pid = os.fork()  # before any thread is started and any device touched
    if pid == 0:
        ours.close()
        bench.make_store()
        keep_saving(theirs, bench)
        os._exit(0)
    theirs.close()
    bench.start()
    decoder = Decoder(Path(options.decode), options.device)
    decoder.run(1.0)
    alone, beside, n_saves = [], [], 0
    for _ in range(options.rounds):
        alone.append(decoder.run(1.0))
        stop = threading.Event()

        def save(stop=stop):
            nonlocal n_saves
            while not stop.is_set():
                head, fds, _, _ = socket.recv_fds(ours, 8, 1)
                n, data = int.from_bytes(head, "little"), b""
                while len(data) < n:
                    data += ours.recv(n - len(data))
                answer = bench.transfer(msgspec.msgpack.decode(data, type=Save), fds[0])
                os.close(fds[0])
                ours.sendall(answer.n_bytes.to_bytes(8, "little"))
                n_saves += 1

        saver = threading.Thread(target=save)
        saver.start()
        beside.append(decoder.run(1.0))
        stop.set()
        saver.join()
    ours.close()
    os.waitpid(pid, 0)
    slower = statistics.median(1 - b / a for a, b in zip(alone, beside, strict=True))
    a, b = statistics.median(alone), statistics.median(beside)
    print(f"decode {a:.1f} tokens/s alone, {b:.1f} beside {n_saves / options.rounds:.1f} saves/s: {slower:.1%} slower")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decode", default="")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(dir=options.dir) as directory, torch.inference_mode():
        bench = Bench(options, Path(directory))
        if options.decode:
            decode_beside_saves(bench, options)
            return
        bench.make_store()
        bench.start()
        seconds: dict[str, list[float]] = {}
        n_bytes = 0
        for i in range(options.rounds + 1):
            entry, found = bench.save()
            n_bytes = entry.n_bytes
            found |= bench.restore(entry)
            (Path(directory) / entry.file).unlink()  # so that both write into as much recycled page cache
            found["raw"] = bench.raw(n_bytes)
            if i:
                for name, s in found.items():
                    seconds.setdefault(name, []).append(s)
        bench.same()
    rows = {}
    for name, found in seconds.items():
        middle = statistics.median(found)
        rows[name] = {
            "p50_s": middle,
            "p90_s": sorted(found)[int(len(found) * 0.9)],
            "GB_per_s": n_bytes / middle / 1e9,
        }
    ratio = statistics.median(r / s for r, s in zip(seconds["raw"], seconds["save"], strict=True))
    print(f"{options.shape} on {options.device}, {options.tokens} tokens, {n_bytes / 1e6:.0f} MB")
    print("metric | p50 ms | p90 ms | GB/s")
    for name, row in rows.items():
        print(f"{name} | {row['p50_s'] * 1e3:.1f} | {row['p90_s'] * 1e3:.1f} | {row['GB_per_s']:.2f}")
    print(f"save at {ratio:.0%} of raw speed (target {TARGET:.0%})")
    if options.save:
        facts = {"shape": options.shape, "tokens": options.tokens, "n_bytes": n_bytes, "rows": rows, "ratio": ratio}
        save(f"snapshot-{options.device}", facts)


if __name__ == "__main__":
    main()
