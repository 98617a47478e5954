"""Processes of both ends: they end with their parents, begin threads and take fault hooks."""

import _thread
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext
from pathlib import Path

import pytest

from lucevisor.protocol import fault_hooks
from lucevisor.protocol.threads import StartedThread, ThreadExecutor, lower_priority
from tests.another_user import as_nobody
from tests.waiting import wait_until

# ---- a process that ends with its parent


CHILD = """
import os, sys, time
from lucevisor.protocol.process import end_with_parent
print(end_with_parent(int(sys.argv[1])), flush=True)
time.sleep(60)
"""

PARENT = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
"""


def test_a_process_is_killed_when_its_parent_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"True\n"
        parent.kill()
        assert parent.stdout.read() == b""  # end of file: the child, which has it open too, is gone


# ---- threads


def alive(name: str) -> int:
    """How many threads of an executor run."""
    running = sys._current_frames()  # enumerate() names some that ended, too
    return sum(one.name.startswith(f"{name}_") and one.ident in running for one in threading.enumerate())


def gone(name: str) -> bool:
    deadline = time.monotonic() + 60
    while alive(name) and time.monotonic() < deadline:
        time.sleep(0.002)
    return not alive(name)


def test_a_thread_that_never_begins_is_given_up(no_thread_begins: None) -> None:
    with pytest.raises(MemoryError, match="'reader_0' did not begin"):
        ThreadExecutor(2, "reader")


def test_a_thread_that_the_system_refuses_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    with pytest.raises(MemoryError, match="'heartbeat' cannot be started: can't start new thread"):
        StartedThread("heartbeat", lambda: None)


def test_work_is_done_in_threads_in_order_and_its_errors_are_its_own() -> None:
    done: list[int] = []
    with ThreadExecutor(1, "one") as executor:
        first = executor.submit(lambda: threading.current_thread().name)
        failed = executor.submit(lambda: 1 // 0)
        rest = list(executor.map(lambda n: done.append(n) or n, range(20)))  # type: ignore[func-returns-value]
    assert first.result() == "one_0"
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert done == rest == list(range(20))
    assert gone("one")
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(print)


def test_a_shutdown_waits_for_work_that_runs_and_cancels_what_waits() -> None:
    executor, begun, go_on = ThreadExecutor(2, "two"), threading.Barrier(3), threading.Event()

    def work() -> str:
        begun.wait(60)
        go_on.wait(60)
        return "done"

    running = [executor.submit(work) for _ in range(2)]
    begun.wait(60)
    waiting = executor.submit(work)
    threading.Thread(target=lambda: [wait_until(waiting.cancelled), go_on.set()]).start()
    executor.shutdown(cancel_futures=True)
    assert [one.done() and one.result() for one in running] == ["done"] * 2
    with pytest.raises(CancelledError):
        waiting.result(0)
    executor.shutdown(cancel_futures=True)
    assert gone("two")


def test_a_thread_of_a_nice_process_gets_no_nicer_than_it_is() -> None:
    """Only root may raise a priority."""
    found: list[int] = []

    def work(nice: int) -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, thread))

    here = os.nice(0)
    with as_nobody() if os.geteuid() == 0 else nullcontext():
        for nice in (here, max(here, 15)):
            thread = threading.Thread(target=work, args=(nice,))
            thread.start()
            thread.join()
    assert found == [max(here, 10), max(here, 15)]


# ---- fault hooks


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


def test_a_process_hangs_and_its_clock_jumps(tmp_path):
    env = os.environ | {fault_hooks.VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", LISTENS], env=env, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    fault_hooks.inject(tmp_path, process.pid, "hang", 1.0)
    fault_hooks.inject(tmp_path, process.pid, "clock", -5000.0)
    said, errors = process.communicate(timeout=100)
    longest, offset = said.split()
    assert float(longest) > 0.9, "no thread ran meanwhile"
    assert time.monotonic() - began < 60
    assert offset == "-5000"
    assert errors.splitlines() == ["fault: hang 1.0", "fault: clock -5000.0"]
