"""State over TCP: bytes a second of saves and restores through the supervisor's files, beside a raw copy over TCP.

    python bench/remote_files.py [--tokens 4096] [--shape small|27b] [--rounds 9] [--save]

Loopback, two processes: a server with a memfd, as the supervisor has for prefix slots, and a daemon's pools and copy
threads on a cpu.  Raw: the same number of bytes in chunks of 1 MiB through one connection, `sendall` to `recv_into`,
without checksums.  Local: the same transfer by descriptor.  Kinds take turns, and the first round is not counted.
--save writes bench/results/remote-files-cpu.txt.
"""

import argparse
import os
import random
import socket
import statistics
import time
from pathlib import Path

import torch
from snapshot import SHAPES, Bench

from lucevisor.kv_transfer.layout import slot_tensors, with_offsets
from lucevisor.model.values import Dtype
from lucevisor.protocol.files import CHUNK_BYTES, FileClient, FileServer, LocalFile
from lucevisor.protocol.messages import Restore, Save, StreamKind
from lucevisor.protocol.transport import BlockingLink

RESULT = Path(__file__).parent / "results" / "remote-files-cpu.txt"


def serve(fd, n_bytes, files, raw, orders, n_orders):
    """The supervisor's process: offer the file for every order, and send raw bytes when asked."""
    server = FileServer(files)
    server.start(lambda error: print(error))
    block = memoryview(bytearray(random.Random(0).randbytes(CHUNK_BYTES)))
    save, restore = orders
    for _ in range(n_orders):
        server.offer(save, [fd])
        server.offer(restore, [fd])
        raw.recv(1)
        for at in range(0, n_bytes, CHUNK_BYTES):
            raw.sendall(block[: n_bytes - at])
    raw.recv(1)


def pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return ours, theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.device = "cpu"
    bench = Bench(options, Path())
    tensors = with_offsets(slot_tensors(bench.spec.layers, options.tokens, Dtype.BFLOAT16), 0)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    save, restore = Save(1, "memory", bench.saved_from, tensors), Restore(2, "memory", bench.restored_to, tensors)
    (files, files_below), (raw, raw_below) = pair(), pair()
    fd = os.memfd_create("state")
    if os.fork() == 0:
        raw_below.close()
        files_below.close()
        serve(fd, n_bytes, files, raw, (save, restore), options.rounds + 1)
        os._exit(0)
    raw.close()
    files.close()
    bench.start()
    client = FileClient(BlockingLink(files_below, stream=StreamKind.FILES))
    buffer = memoryview(bytearray(CHUNK_BYTES))
    seconds = {}

    def timed(name, work):
        began = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    def copy_raw():
        raw_below.sendall(b"x")
        left = n_bytes
        while left:
            left -= raw_below.recv_into(buffer[: min(left, CHUNK_BYTES)])

    def transfer(order, file):
        bench.came.clear()
        bench.transfers.submit(order, file)
        bench.came.wait()
        assert bench.answers[-1].n_bytes == n_bytes, bench.answers[-1]

    with torch.inference_mode():
        for i in range(options.rounds + 1):
            timed("save, TCP", lambda i=i: transfer(save, client.file(2 * i)))
            timed("restore, TCP", lambda i=i: transfer(restore, client.file(2 * i + 1)))
            bench.same()
            timed("raw copy, TCP", copy_raw)
            timed("save, descriptor", lambda: transfer(save, LocalFile(os.dup(fd))))
            timed("restore, descriptor", lambda: transfer(restore, LocalFile(os.dup(fd))))
    raw_below.close()
    rates = {name: n_bytes / statistics.median(found[1:]) / 1e9 for name, found in seconds.items()}
    lines = [
        f"State of a slot of {options.tokens} tokens, shape {options.shape}, {n_bytes / 1e6:.0f} MB; loopback, "
        f"{os.cpu_count()} cores; median of {options.rounds}.",
        f"`python bench/remote_files.py --shape {options.shape}`",
        "",
        *(f"{name:20} {rate:6.2f} GB/s   {rate / rates['raw copy, TCP']:5.0%} of raw" for name, rate in rates.items()),
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
