"""The process of a Ray actor, without Ray: its pipes, its end, its environment."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lucevisor.cluster import ray_actor
from lucevisor.cluster.ray_actor import RemoteProcess
from tests.waiting import wait_until

# Stands for Ray's worker: says the pid of the child that it started, and goes on until it ends itself or is killed.
WORKER = """
import sys, threading, time
from lucevisor.cluster.ray_actor import RemoteProcess
process = RemoteProcess(float(sys.argv[1]))
starting = [True]
def beat():
    while starting:
        process.beat()
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
process.start(["sh", "-c", "trap '' TERM; echo $$; exec sleep 1000"], False)
print(process.read()[0].decode().strip(), flush=True)
starting.clear()
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(ray_actor, "_INPUT_END_S", 0.5)
    monkeypatch.setattr(ray_actor, "_TERMINATED_S", 0.5)


def started(*command: str) -> RemoteProcess:
    process = RemoteProcess(1e6)  # in silence it would end this process
    assert process.start(command, False) == ""
    return process


def read_all(process: RemoteProcess) -> tuple[bytes, bytes, int]:
    outputs, status = ([], []), None
    while status is None:
        *parts, status = process.read()
        for output, part in zip(outputs, parts, strict=True):
            output.append(part)
    return b"".join(outputs[0]), b"".join(outputs[1]), status


def runs(pid: int) -> bool:
    """Not even as a zombie of a parent that has not reaped it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ten_megabytes_there_and_back():
    process = started("cat")
    sent = os.urandom(10_000_000)

    def write() -> None:
        for start in range(0, len(sent), 65536):
            assert process.write(sent[start : start + 65536], False)
        process.write(b"", True)

    writer = threading.Thread(target=write)
    writer.start()
    out, err, status = read_all(process)
    writer.join()
    assert (hashlib.sha256(out).digest(), err, status) == (hashlib.sha256(sent).digest(), b"", 0)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo out; echo err >&2; exit 7", (b"out\n", b"err\n", 7)),
        ("kill -9 $$", (b"", b"", -9)),
        ("kill -INT $$; echo blocked", (b"", b"", -2)),
    ],
)
def test_output_and_exit_status(script, expected):
    assert read_all(started("sh", "-c", script)) == expected


def test_a_program_that_does_not_exist():
    assert read_all(started("/no/such")) == (b"", b"/no/such: No such file or directory\n", 127)


def test_output_that_nobody_reads_stops_the_command(tmp_path):
    done = tmp_path / "done"
    process = started("sh", "-c", f"head -c 2000000 /dev/zero; touch {done}")
    time.sleep(0.5)
    assert not done.exists()
    assert read_all(process) == (bytes(2_000_000), b"", 0)
    assert done.exists()


def test_the_end_of_input_ends_the_command():
    process = started("sh", "-c", "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.read()[0] == b"ready\n"
    assert process.write(b"", True)
    assert read_all(process) == (b"asked\n", b"", 3)


def test_a_command_that_still_writes_is_not_ended():
    process = started("sh", "-c", "echo; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; echo; done; exit 6")
    assert process.read()[0] == b"\n"
    process.write(b"", True)
    assert read_all(process) == (b"\n" * 8, b"", 6)


def test_a_command_that_ignores_sigterm_is_killed():
    process = started("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.read()[0] == b"ready\n"
    process.write(b"", True)
    assert read_all(process)[2] == -signal.SIGKILL


def test_input_that_the_command_does_not_read():
    process = started("sh", "-c", "exec <&-; echo closed; sleep 0.3")
    assert process.read()[0] == b"closed\n"
    assert process.write(bytes(65536), False) is False


def test_signals_are_passed_on():
    process = started("sh", "-c", "trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done")
    assert process.read()[0] == b"ready\n"
    process.signal(signal.SIGUSR1)
    assert read_all(process)[2] == 5
    process.signal(signal.SIGUSR1)  # it has ended


def test_what_the_command_left_is_ended():
    out, _, status = read_all(started("sh", "-c", "sleep 1000 & echo $!"))
    assert status == 0
    wait_until(lambda: not runs(int(out)), 5.0)


@pytest.mark.parametrize("end", ["silence", "kill"])
def test_no_orphan(end):
    silence_s = "0.5" if end == "silence" else "100"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, silence_s], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(worker.stdout.readline())
        assert runs(pid)
        if end == "kill":
            worker.kill()
        assert worker.wait(20.0) == (1 if end == "silence" else -signal.SIGKILL)
        wait_until(lambda: not runs(pid), 5.0)
    finally:
        worker.kill()
        worker.communicate()


def nice_of(process: RemoteProcess) -> tuple[int, bytes]:
    out, err, status = read_all(process)
    assert status == 0
    return int(out), err


def test_the_priority_is_that_of_the_node(monkeypatch):
    here = os.nice(0)
    assert nice_of(started("nice")) == (here, b"")
    raylet = subprocess.Popen(["nice", "-n", "2", "sleep", "100"])
    try:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, raylet.pid) == here + 2, 5.0)
        assert nice_of(started("nice")) == (here + 2, b"")
    finally:
        raylet.kill()
        raylet.wait()


# As who may not raise priorities; root may no more once CAP_SYS_NICE is out of its bounding set, from the next exec on.
UNPRIVILEGED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 23)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
DENIED = """
import os
from lucevisor.cluster import ray_actor
nice = os.nice(1)
ray_actor.node_niceness = lambda: nice - 1
process = ray_actor.RemoteProcess(100.0)
process.start(["nice"], False)
out, err, status = process.read()
while status is None:
    more_out, more_err, status = process.read()
    out, err = out + more_out, err + more_err
print(int(out) == nice, err.decode())
"""


def test_a_priority_that_cannot_be_had_is_told():
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED, DENIED], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True runs at nice ")
    assert "start this node with RAY_worker_niceness=0" in done.stdout


def test_the_environment_is_that_of_the_node(monkeypatch):
    node = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "8", "LD_PRELOAD": "", "RAY_AUTH_TOKEN": "x", "HOME": "/tmp"}
    raylet = subprocess.Popen(["sleep", "100"], env=node)
    try:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        monkeypatch.setenv("HOME", "/tmp")
        monkeypatch.delenv("LD_PRELOAD", raising=False)
        wait_until(lambda: b"OMP_NUM_THREADS=8" in Path(f"/proc/{raylet.pid}/environ").read_bytes(), 5.0)
        expected = {"PATH": node["PATH"], "OMP_NUM_THREADS": "8", "HOME": "/tmp"}
        assert ray_actor.node_environment(assigned_devices=False) == expected
        assert ray_actor.node_environment(assigned_devices=True) == expected | {"CUDA_VISIBLE_DEVICES": "3"}
        out, _, _ = read_all(started("sh", "-c", "echo $OMP_NUM_THREADS$RAY_AUTH_TOKEN; pwd"))
        assert out == b"8\n/tmp\n"
    finally:
        raylet.kill()
        raylet.wait()
