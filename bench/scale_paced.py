"""One cell of ``scale.py measure``: paced daemons (paced_daemon.py) behind a link, and what the simulator predicts.

    python bench/scale_paced.py MODEL '{"transport": "tcp", "hosts": 2, ...}'      prints JSON on its last line

Real processes, sockets and boundary memory; stages that take a set time from when their rows are there.  The model that
they load is small, but its rows are as wide as those of a 27B model.
"""

import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvloop
from model_shapes import decoder
from services import paced_python, running

from lucevisor.app import logs
from lucevisor.app.run import freeze_gc
from lucevisor.cli.bench import PLAIN, Case, tokens_per_s

TOKEN = 300


def wide_model():
    """Rows of 5,120 numbers, and hardly anything else."""
    return decoder("llama", "wide", n_layers=6, embedding=5120, width=256, heads=(4, 1), vocabulary=512)


def round_trip_s(n=200):
    """Median time of 64 bytes to a thread and back, over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            theirs, _ = server.accept()
            with theirs:
                theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := theirs.recv(64):
                    theirs.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        times = []
        with socket.create_connection(server.getsockname()) as ours:
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(n):
                began = time.perf_counter()
                ours.sendall(b"x" * 64)
                ours.recv(64)
                times.append(time.perf_counter() - began)
                time.sleep(0.002)
        return statistics.median(times)


def one_way_s(n_bytes, n=6):
    """Median time in which so many bytes reach a thread and are acknowledged, and that of the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def sink():
            theirs, _ = server.accept()
            with theirs:
                n_received, room = 0, bytearray(1 << 20)
                while got := theirs.recv_into(room):
                    n_received += got
                    if n_received == n_bytes:
                        n_received = 0
                        theirs.sendall(b"x")

        threading.Thread(target=sink, daemon=True).start()
        times, data = [], os.urandom(n_bytes)
        with socket.create_connection(server.getsockname()) as ours:
            for _ in range(n):
                began = time.perf_counter()
                ours.sendall(data)
                ours.recv(1)
                times.append(time.perf_counter() - began)
        return statistics.median(times[1:]), times[0]


def configuration(model, cell, directory):
    python = paced_python(directory)
    names = [f"g{i}" for i in range(cell["hosts"])]
    env = f'{{PACED_STAGE_S = "{cell["stage_s"]:.6f}", PACED_ROW_S = "{cell["row_s"]:.9f}", PACED_IDS = "{TOKEN}"}}'
    text = f'[model]\npath = "{model}"\n' + "".join(
        f'[groups.{name}]\nbackend = "cpu"\nthreads = 1\npython = "{python}"\nenv = {env}\n'
        f'transport = "{cell["transport"]}"\n'
        for name in names
    )
    devices = ", ".join(f'"{name}:0"' for name in names)
    text += f"[placement]\ntarget_devices = [{devices}]\ntarget_layer_split = {[1] * len(names)}\n"
    text += f'[engine]\nmax_sequences = {max(cell["streams"])}\ndtype = "bfloat16"\nprefill_chunk = {cell["chunk"]}\n'
    text += f"max_context = {cell['chunk'] * cell['chunks'] + 64}\n"
    path = Path(directory) / "scale.toml"
    path.write_text(text)
    return path


def stage_times(service):
    totals = service.only.engine.core.totals
    return [(stage.n_steps, stage.compute_s) for stage in totals.stages]


def hop_times(service):
    totals = service.only.engine.core.totals
    return [(boundary.n_hops, boundary.seconds) for boundary in totals.boundaries]


def means(before, after):
    return [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in zip(before or [(0, 0.0)] * len(after), after, strict=True)]


async def measure(model, cell):
    found = {
        "round_trip_s": round_trip_s(),
        "chunk_s": one_way_s(cell["chunk"] * 10_240),
        "load": os.getloadavg()[0],
        "decode": {},
        "stage_s": {},
        "hop_s": {},
        "prompt_s": [],
        "prompt_cpu_s": [],
    }
    with tempfile.TemporaryDirectory(prefix="lv") as directory:
        path = configuration(model, cell, directory)
        async with running(path, directory, PLAIN) as service:
            freeze_gc()
            await tokens_per_s(service, Case(answer=32), -1)
            for turn in range(cell["rounds"]):
                for n in cell["streams"]:
                    before, hops = stage_times(service), hop_times(service)
                    rate = await tokens_per_s(service, Case(answer=cell["answer"], streams=n), turn)
                    found["decode"].setdefault(str(n), []).append(rate)
                    found["stage_s"].setdefault(str(n), []).append(means(before, stage_times(service)))
                    found["hop_s"].setdefault(str(n), []).append(means(hops, hop_times(service)))
                n_tokens = cell["chunk"] * cell["chunks"]
                before, cpu = stage_times(service), time.process_time()
                for i in range(3):
                    rate = await tokens_per_s(service, Case(prompt=n_tokens), 3 * turn + i)
                    found["prompt_s"].append(n_tokens / rate)
                found["prompt_cpu_s"].append((time.process_time() - cpu) / 3)
                found["stage_s"].setdefault("prompt", []).append(means(before, stage_times(service)))
    return found


if __name__ == "__main__":
    logs.configure("console", "warning")
    print(json.dumps(uvloop.run(measure(sys.argv[1], json.loads(sys.argv[2])))))
