"""Makes the masks of constrained slices in threads, while the shards compute the step.

The event loop hands over a step's jobs and gets the masks back in a callback; neither waits for the other.  Knows no
scheduler.  Invariant: every step that was handed over comes back exactly once, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from lucevisor.engine.constraint import MadeMasks, make_masks
from lucevisor.engine.pipeline.pipeline import Pipeline
from lucevisor.engine.request import RequestError
from lucevisor.engine.step import StepPlan
from lucevisor.protocol.steps import Masks

_MOST_THREADS: Final = 4
_JOBS_A_THREAD: Final = 4  # fewer are not worth another thread: most masks take less than 0.1 ms


class MaskMaker:
    """``fail(request_id, error)`` ends a request whose constraint cannot go on.  ``threaded`` False: on the calling
    thread, before ``planned`` returns, for tests that have no event loop."""

    def __init__(self, fail: Callable[[str, RequestError], None], *, threaded: bool = True) -> None:
        self._fail = fail
        self._threaded = threaded
        self._pool: ThreadPoolExecutor | None = None  # most servers never need one
        self._n_threads = min(_MOST_THREADS, os.cpu_count() or 1)

    def planned(self, plan: StepPlan, pipeline: Pipeline) -> None:
        """Make the masks of a step that was submitted, and send them after it."""
        jobs, step_id = plan.mask_jobs, plan.step.step_id
        if not jobs:
            return
        if not self._threaded:
            self._made(pipeline, make_masks(step_id, jobs))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="masks")
        size = max(_JOBS_A_THREAD, -(-len(jobs) // self._n_threads))
        work = _StepWork(step_id, -(-len(jobs) // size), partial(self._made, pipeline))
        for index in range(work.n_parts):
            future = self._pool.submit(make_masks, step_id, jobs[index * size : (index + 1) * size])
            future.add_done_callback(work.part_done(index))

    def close(self) -> None:
        """Start nothing more, and drop what is being made."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _made(self, pipeline: Pipeline, made: MadeMasks) -> None:
        pipeline.send_masks(made)
        for request_id, why in made.failures:
            text = f"the output cannot be constrained further: {why}; use a simpler schema or grammar"
            self._fail(request_id, RequestError("constraint_failed", text))


class _StepWork:
    """The masks of one step, made in parts."""

    def __init__(self, step_id: int, n_parts: int, done: Callable[[MadeMasks], None]) -> None:
        self.n_parts = n_parts
        self._step_id = step_id
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, MadeMasks] = {}

    def part_done(self, index: int) -> Callable[[Future[MadeMasks]], None]:
        """Return the callback of a part, for the thread that made it."""

        def callback(future: Future[MadeMasks]) -> None:
            made = future.result()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._take, index, made)

        return callback

    def _take(self, index: int, made: MadeMasks) -> None:
        self._parts[index] = made
        if len(self._parts) < self.n_parts:
            return
        parts = [self._parts[i] for i in range(self.n_parts)]
        message = Masks(self._step_id, sum(part.message.n_rows for part in parts), parts[0].message.row_bytes)
        payload = [rows for part in parts for rows in part.payload]
        self._done(MadeMasks(message, payload, [failure for part in parts for failure in part.failures]))
