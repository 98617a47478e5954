"""A daemon's run_worker() that computes nothing and misbehaves on request: the variable TINY names how.

It stands in for daemons/worker.py in the tests of supervision; everything around it (main, heartbeat, link) is real.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path

import daemons
import lucevisor
from lucevisor.model.values import Backend
from lucevisor.protocol.frames import encode
from lucevisor.protocol.handshake import source_hash
from lucevisor.protocol.loading import DeviceInfo, DeviceUse, Hello, Load, Loaded
from lucevisor.protocol.messages import PROTOCOL_VERSION, Failed, LogLine, Progress, Shutdown
from lucevisor.protocol.steps import Reset, ResetDone, Step, StepResult

LIBC = ctypes.CDLL(None)
LIBC_WITH_GIL = ctypes.PyDLL(None)  # calls keep the interpreter lock


def run_worker(link, files, reporter, options, key, lock, model):
    how = os.environ.get("TINY", "")
    once = os.environ.get("TINY_ONCE", "")
    if once and Path(once).exists():
        how = ""  # misbehave in the first process only
    elif once:
        Path(once).touch()
    return Tiny(link, reporter, options, how).run()


class Tiny:
    def __init__(self, link, reporter, options, how):
        self.link, self.reporter, self.options, self.how = link, reporter, options, how

    def run(self):
        self.at("start")
        if "deaf" in self.how:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "no deathsig" in self.how:
            LIBC.prctl(1, 0, 0, 0, 0)
        if "flood" in self.how:
            line = "x" * 1023 + "\n"
            for _ in range(1024):
                sys.stdout.write(line)
        self.link.send(self.hello())
        self.at("hello")
        self.reporter.phase("idle")
        while (frame := self.link.receive()) is not None:
            match frame.message:
                case Load() as load:
                    self.load(load)
                case Step() as step:
                    self.step(step)
                case Reset(token):
                    self.at("reset")
                    self.link.send(ResetDone(token))
                case Shutdown() if "deaf" not in self.how:
                    return 0
                case _:
                    pass
            self.reporter.phase("idle")
        while "deaf" in self.how:
            time.sleep(60)
        return 0

    def hello(self):
        own = source_hash(Path(lucevisor.__file__).parent, Path(daemons.__file__).parent)
        return Hello(
            protocol=PROTOCOL_VERSION,
            source_hash="0123456789abcdef" if "other code" in self.how else own,
            pid=os.getpid(),
            python=platform.python_version(),
            executable=sys.executable,
            torch="2.13.0",
            backend=Backend.CPU,
            devices=[DeviceInfo(0, "tiny", 2**30, 1 if "poor" in self.how else 2**30, "x86_64", [])],
            host_total_bytes=2**30,
            packages={"numpy": "2.0", "gguf": "0.17", "msgspec": "0.19"},
        )

    def load(self, load):
        self.reporter.phase("load")
        self.at("load")
        shards = [shard for plan in load.stages for shard in plan.shards]
        stage = load.stages[0].stage
        for i in range(3):
            self.reporter.progress(
                Progress(stage=stage, device=shards[0].device, done_bytes=i, total_bytes=3, phase="read")
            )
            self.at("progress")
        if "hold gil" in self.how:
            LIBC_WITH_GIL.usleep(2_000_000)
        if "close heartbeat" in self.how:
            socket.socket(fileno=os.dup(int(self.options.heartbeat.removeprefix("fd:")))).shutdown(socket.SHUT_RDWR)
            time.sleep(0.1)
        if "failed load" in self.how:
            self.link.send(Failed("load", "blk.0", "tensor is missing", "get the whole file", "config" in self.how))
            sys.exit(1)
        same = {"identities": load.identities} if hasattr(load, "identities") else {}
        self.link.send(Loaded([DeviceUse(one.device, one.layers, 1, 1, 1) for one in shards], {}, 0.0, **same))
        self.reporter.log("info", "tiny is ready", event_of="test", group="mine")
        if "odd log" in self.how:
            # Not by reporter.log(), whose own parameters would be in the way: any daemon may send such a record.
            self.reporter._put(LogLine("info", "odd", json.loads(os.environ["TINY_FIELDS"])))
        self.at("ready")
        if "close link" in self.how:
            self.link.close()
            doze()

    def step(self, step):
        self.reporter.phase("step", step.step_id)
        self.at("step")
        self.link.send(StepResult(step.step_id, 0))
        self.reporter.step_done(1)

    def at(self, place):
        """Do what TINY wants at this place: `exit at PLACE`, `sleep at PLACE`, `hang at PLACE` and so on."""
        if f"exit at {place}" in self.how:
            print(f"tiny ends at {place}", file=sys.stderr)
            sys.stdout.flush()
            os._exit(int(os.environ.get("TINY_CODE", "3")))
        if f"last words at {place}" in self.how:
            for n in range(200):
                self.reporter.log("error", "last words", n=n)
            self.reporter.close()
            os._exit(1)
        if f"raise at {place}" in self.how:
            raise RuntimeError(f"tiny raises at {place}")
        if f"abort at {place}" in self.how:
            os.abort()
        if f"segfault at {place}" in self.how:
            ctypes.string_at(0)
        if f"double free at {place}" in self.how:
            LIBC.free.argtypes = [ctypes.c_void_p]
            LIBC.malloc.restype = ctypes.c_void_p
            block, _keeps_it_in_the_middle = LIBC.malloc(2000), LIBC.malloc(1)
            LIBC.free(block)
            LIBC.free(block)
        if f"pause at {place}" in self.how:
            time.sleep(2)
        if f"sleep at {place}" in self.how:
            doze()
        if f"hang at {place}" in self.how:
            hang_with_gil()
        if f"cut at {place}" in self.how:
            frame = encode(StepResult(7, 0))
            os.write(int(self.options.links[0].removeprefix("fd:")), frame[: int(os.environ["TINY_BYTES"])])
            os.kill(os.getpid(), signal.SIGKILL)


def doze():
    """Sleep for ten minutes.  A signal that comes right before the system call is handled behind it: they are short."""
    for _ in range(12_000):
        time.sleep(0.05)


def hang_with_gil():
    LIBC_WITH_GIL.sleep(600)
