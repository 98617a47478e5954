"""The lock of a daemon's compute threads."""

from __future__ import annotations

import threading

from daemons.compute_lock import ComputeLock


def test_another_thread_runs_while_one_waits_and_not_before():
    lock, order, asks, ran = ComputeLock(), list[str](), threading.Event(), threading.Event()

    def other() -> None:
        order.append("asks")
        asks.set()
        with lock:
            order.append("runs")
            ran.set()
            order.append("ends")

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        assert asks.wait(60)
        assert not ran.wait(0.2)
        order.append("waits")
        with lock.released:
            assert ran.wait(60)
        order.append("goes on")
    thread.join(60)
    assert order == ["asks", "waits", "runs", "ends", "goes on"]
    with lock:
        pass
