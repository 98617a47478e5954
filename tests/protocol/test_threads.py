"""Threads that begin or are given up: nobody waits for one that found no memory."""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from lucevisor.protocol.threads import StartedThread, ThreadExecutor


def alive(name: str) -> int:
    """How many threads of an executor run."""
    running = sys._current_frames()  # enumerate() names some that ended, too
    return sum(one.name.startswith(f"{name}_") and one.ident in running for one in threading.enumerate())


def gone(name: str) -> bool:
    deadline = time.monotonic() + 10
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
    with pytest.raises(MemoryError, match="'pulse' cannot be started: can't start new thread"):
        StartedThread("pulse", lambda: None)


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
        begun.wait(10)
        go_on.wait(10)
        return "done"

    running = [executor.submit(work) for _ in range(2)]
    begun.wait(10)
    waiting = executor.submit(work)
    threading.Timer(0.05, go_on.set).start()
    executor.shutdown(cancel_futures=True)
    assert [one.done() and one.result() for one in running] == ["done"] * 2
    with pytest.raises(CancelledError):
        waiting.result(0)
    executor.shutdown(cancel_futures=True)
    assert gone("two")


def test_threads_end_with_an_executor_that_nobody_has_any_more() -> None:
    executor = ThreadExecutor(3, "forgotten")
    assert executor.submit(lambda: 1).result(10) == 1
    assert alive("forgotten") == 3
    del executor
    gc.collect()
    assert gone("forgotten")
