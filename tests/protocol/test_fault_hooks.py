"""Fault hooks: off by default, and what they do when they are on, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from lucevisor.protocol import fault_hooks

ROOT = Path(__file__).parents[2]

LISTENS = """
import os, sys, time
from lucevisor.protocol import fault_hooks
real = time.time
fault_hooks.listen({"hang": fault_hooks.hold_interpreter, "clock": fault_hooks.shift_clock})
at = time.monotonic()
print("ready", flush=True)
longest = 0.0
while abs(time.time() - real()) < 1000:
    longest = max(longest, time.monotonic() - at)
    at = time.monotonic()
    time.sleep(0.001)
print(round(longest, 2), round(time.time() - real()), flush=True)
"""


def test_without_the_variable_nothing_listens(monkeypatch):
    monkeypatch.delenv(fault_hooks.VARIABLE, raising=False)
    before = threading.active_count()
    fault_hooks.listen({"hang": lambda _: None})
    assert threading.active_count() == before


def test_a_process_hangs_and_its_clock_jumps(tmp_path):
    env = os.environ | {fault_hooks.VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", LISTENS], env=env, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    fault_hooks.inject(tmp_path, process.pid, "hang", 1.0)
    fault_hooks.inject(tmp_path, process.pid, "clock", -5000.0)
    said, errors = process.communicate(timeout=20)
    longest, offset = said.split()
    assert float(longest) > 0.9, "no thread ran meanwhile"
    assert time.monotonic() - began < 15
    assert offset == "-5000"
    assert errors.splitlines() == ["fault: hang 1.0", "fault: clock -5000.0"]
