"""Threads that begin within START_TIMEOUT_S, an executor of such threads, and their priority; for both sides.

``Thread.start``, and with it ``ThreadPoolExecutor.submit``, waits forever for a thread that finds no memory before it
says that it runs (https://github.com/python/cpython/issues/140746)."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

START_TIMEOUT_S: Final = 5.0
"""Until a thread has begun."""

P = ParamSpec("P")
T = TypeVar("T")


def lower_priority(nice: int = 10) -> None:
    """Let other threads run before this one.  One that is nicer stays so: raising its priority takes privileges."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


class StartedThread:
    """A thread that runs ``run()``, which handles its own errors; the process does not wait for it at its end."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        """Returns once the thread has begun.  Raises MemoryError when it does not."""
        self._name, self._run = name, run
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        try:
            _thread.start_new_thread(self._main, ())
        except RuntimeError as error:  # the system has none
            raise MemoryError(f"the thread {name!r} cannot be started: {error}") from error
        if not self._begun.acquire(timeout=START_TIMEOUT_S):
            raise MemoryError(f"the thread {name!r} did not begin in {START_TIMEOUT_S:g} s: no memory is left for it")

    def join(self) -> None:
        """Wait until it has ended."""
        with self._ended:
            pass

    def _main(self) -> None:
        threading.current_thread().name = self._name
        self._begun.release()
        try:
            self._run()
        finally:
            self._ended.release()


class ThreadExecutor(Executor):
    """``n_threads`` threads that take what is submitted in order, until ``shutdown``, or the executor is collected."""

    def __init__(self, n_threads: int, name: str) -> None:
        """Raises MemoryError when a thread does not begin; those that began before end."""
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed = False
        self._threads: list[StartedThread] = []
        self._end = weakref.finalize(self, _end, self._queue, n_threads)
        try:
            for i in range(n_threads):
                self._threads.append(StartedThread(f"{name}_{i}", partial(_serve, self._queue)))
        except MemoryError:
            self._end()
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Never waits.  Raises RuntimeError after ``shutdown``."""
        if self._closed:
            raise RuntimeError("the executor was shut down")
        future: Future[T] = Future()
        self._queue.put(_Task(future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end behind what was submitted."""
        closed, self._closed = self._closed, True
        if cancel_futures and not closed:
            with contextlib.suppress(Empty):
                while (task := self._queue.get_nowait()) is not None:
                    task.future.cancel()
        self._end()
        if wait:
            for thread in self._threads:
                thread.join()


class _Task:
    __slots__ = ("future", "work")

    def __init__(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self.future, self.work = future, work

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:  # whoever waits gets it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _serve(queue: SimpleQueue[_Task | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task  # and with it what was computed


def _end(queue: SimpleQueue[_Task | None], n_threads: int) -> None:
    for _ in range(n_threads):
        queue.put(None)
