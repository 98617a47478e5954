"""CUDA graphs, also on HIP: launches that are captured once, and then replayed with one call.

Knows neither steps nor kernels.  graphs.py has those of whole steps.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from daemons.device import empty_cache
from daemons.ops.compile_only import compile_only

CAPTURE_FREE_BYTES = 512 << 20
"""With less free, torch's cache is given back before a capture."""
Output = TypeVar("Output")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold Python's garbage collector back: a cycle freed while a stream captures may unlock host memory or drop
    another graph, which the driver refuses then: the capture is lost, and the memory stays locked at an address that
    others get next.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are captured.

    torch's allocator reuses a freed block on the stream that it was allocated for, so graphs captured on streams of
    their own would each keep their own memory, also in a pool that they share.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def captured(device: torch.device, work: Callable[[], Output], pool: Any) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Capture the launches of ``work`` without running them; its result lies in ``pool``'s memory, None: its own.

    Raises RuntimeError when ``work`` synchronises with the device or memory runs out.
    """
    if torch.cuda.mem_get_info(device)[0] < CAPTURE_FREE_BYTES:
        empty_cache(device)  # nothing can be given back while a stream captures
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), _no_collection():
        # thread_local: other threads of the daemon may copy snapshots meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            out = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, out


def not_captured(what: str, error: RuntimeError) -> str:
    """The warning that a capture failed; ``what`` runs without a graph, and where."""
    advice = "if its memory was full, lower engine.pages, else report this"
    return f"{what} without a graph, which is slower: capture failed: {error}; {advice}"


class RepeatedLaunches:
    """Launches that come again with the same arguments: those of the second time are captured, and replayed from then
    on.  A capture takes about as long as the launches do.  ``what`` they do is said when one fails; none is tried then.

    Invariant: what they read and write lies where it is as long as they are kept; ``work`` holds it.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self._device, self._captures, self._what = device, device.type != "cpu", what
        self.warn: Callable[[str], None] = lambda _: None
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph | None, Callable[[], None]]] = OrderedDict()

    def replay(self, key: Hashable) -> bool:
        """Replay what was captured under ``key``; False if nothing was."""
        graph, _ = self._kept.get(key, (None, None))
        if graph is None:
            return False
        self._kept.move_to_end(key)
        graph.replay()
        return True

    def launch(self, key: Hashable, work: Callable[[], None]) -> None:
        """Launch ``work``, which always does the same under this ``key`` and allocates nothing."""
        if compile_only():
            work()
            return
        if key not in self._kept or not self._captures:
            work()
            self._keep(key, None, work)
            return
        _, work = self._kept[key]
        try:
            graph, _ = captured(self._device, work, None)  # with a pool that is shared torch refuses, once it is empty
        except RuntimeError as error:  # any kind, out of memory too: the same launches, one by one
            self._captures = False
            self.warn(not_captured(f"{self._what} on {self._device}", error))
            work()
            return
        self._keep(key, graph, work)
        graph.replay()

    def _keep(self, key: Hashable, graph: torch.cuda.CUDAGraph | None, work: Callable[[], None]) -> None:
        if not self._captures:
            return
        self._kept[key] = graph, work
        self._kept.move_to_end(key)
        if len(self._kept) > 128:  # the least recently used, or known to have come once, are dropped
            self._kept.popitem(last=False)
