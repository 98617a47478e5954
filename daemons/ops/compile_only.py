"""Runs of steps in which kernels compile, in threads, and none is launched: a compiler that runs at a kernel's first
launch would have one core busy.

Results are zeros or what torch makes of them.  Invariant: launches of other threads are not affected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lucevisor.protocol.threads import ThreadExecutor

MAX_THREADS = 16
CACHED_S = 0.2
"""In which kernels are read from the cache, and not compiled."""
_COMPILE_ONLY: ContextVar[bool] = ContextVar("compile_only", default=False)
_PATCHING = Lock()
_ATEN = torch.ops.aten
_EMPTY = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


def compile_only() -> bool:
    """Return whether this thread's kernels are not to be launched, nor launches captured."""
    return _COMPILE_ONLY.get()


class Compilation:
    """The Triton kernels of a run."""

    def __init__(self) -> None:
        self.mode: Any = None  # Triton's; None: its release has none
        self.seconds: list[float] = []
        """Of each kernel."""
        self._locks: dict[Any, Lock] = {}

    def are_cached(self) -> bool:
        """Wait a moment; return whether that was enough for all kernels."""
        return not wait(self.mode.raw_futures, CACHED_S).not_done

    def wait(self, report: Callable[[], None]) -> None:
        """Wait for what compiles, with a report after each kernel."""
        for _ in as_completed(self.mode.raw_futures if self.mode is not None else []):
            report()

    def submit(self, submit: Callable[..., Any], key: Any, compile_: Callable[[], Any], finalize: Any) -> Any:
        """Take the place of the mode's ``submit``: loaded kernels are a device's own."""
        lock = self._locks.setdefault(key, Lock())
        return submit((torch.cuda.current_device(), key), partial(self._compile, compile_, lock), finalize)

    def _compile(self, compile_: Callable[[], Any], lock: Lock) -> Any:
        from triton.runtime import driver

        with lock:  # for another device of this kind it is read from the cache
            began = time.monotonic()
            kernel = compile_()
            with suppress(Exception):  # it fails again, and says why, at the first launch
                driver.active.launcher_cls(kernel.src, kernel.metadata)  # compiles C in some releases
            self.seconds.append(time.monotonic() - began)
        return kernel


@contextmanager
def compiling() -> Iterator[Compilation]:
    """Within, this thread's kernels compile and are not launched; waits for them at the end.

    A kernel that does not compile raises at its first launch.  Raises MemoryError where a thread does not begin.
    """
    import triton

    found = Compilation()
    if not hasattr(triton, "AsyncCompileMode"):
        yield found
        return

    n_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with _PATCHING, ThreadExecutor(n_threads, "triton") as threads:
        launch = triton.KernelInterface.__getitem__

        def compile_(kernel: Any, grid: Any) -> Callable[..., Any]:
            return partial(kernel.run, grid=grid, warmup=True) if compile_only() else launch(kernel, grid)

        found.mode = triton.AsyncCompileMode(threads, ignore_errors=True)
        found.mode.submit = partial(found.submit, found.mode.submit)
        token = _COMPILE_ONLY.set(True)
        triton.KernelInterface.__getitem__ = compile_
        try:
            with found.mode, _Zeros():  # type: ignore[no-untyped-call]
                yield found
        finally:
            triton.KernelInterface.__getitem__ = launch
            _COMPILE_ONLY.reset(token)


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory for results of kernels is zeros: torch may take them for indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in _EMPTY and isinstance(out, Tensor) else out
