"""Makes the masks of constrained slices in threads, while the shards compute the step.

The event loop hands over a step's jobs and gets the masks back in a callback; neither waits for the other.  Knows no
scheduler.  Invariants: every step that was handed over comes back exactly once, on the event loop's thread; a daemon
never waits for masks that do not come: where they cannot be made or sent, the pipeline fails, whose requests are held.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import structlog

from lucevisor.engine.constraint import MadeMasks, MaskJob, make_masks, unmasked
from lucevisor.engine.pipeline import Pipeline
from lucevisor.engine.request import RequestError
from lucevisor.engine.step import StepPlan
from lucevisor.protocol.steps import Masks
from lucevisor.protocol.threads import ThreadExecutor

log = structlog.get_logger("masks")

_MAX_THREADS: Final = 4
_RETRY_S: Final = 0.01
_JOBS_A_THREAD: Final = 4  # fewer are not worth another thread: most masks take less than 0.1 ms


class MaskMaker:
    """``fail(request_id, error)`` ends a request whose constraint cannot go on.  ``threaded`` False: on the calling
    thread, before ``make_masks`` returns, for tests that have no event loop, and where there is no memory for threads.
    """

    def __init__(self, fail: Callable[[str, RequestError], None], *, threaded: bool = True) -> None:
        self._fail = fail
        self._n_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads: ThreadExecutor | None = None
        if threaded:
            try:  # now, as the event loop cannot wait for a thread that may never begin
                self._threads = ThreadExecutor(self._n_threads, "masks")
            except MemoryError as error:
                log.warning("masks of constrained output are made on the event loop", reason=str(error))

    def make_masks(self, plan: StepPlan, pipeline: Pipeline) -> None:
        """Make the masks of a step that was submitted, and send them after it."""
        jobs, step_id = plan.mask_jobs, plan.step.step_id
        if not jobs:
            return
        if self._threads is None:
            self._send(pipeline, step_id, lambda: make_masks(step_id, jobs))
            return
        size = max(_JOBS_A_THREAD, -(-len(jobs) // self._n_threads))
        parts = [jobs[at : at + size] for at in range(0, len(jobs), size)]
        work = _StepWork(step_id, parts, partial(self._send, pipeline, step_id))
        for index, part in enumerate(parts):
            self._threads.submit(make_masks, step_id, part).add_done_callback(work.part_done(index))

    def close(self) -> None:
        """Start nothing more, and drop what is being made."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _send(self, pipeline: Pipeline, step_id: int, make: Callable[[], MadeMasks]) -> None:
        try:
            made = make()
            pipeline.send_masks(made)
        except Exception as error:  # most likely no memory; the output stage would wait for them
            log.exception("masks cannot be made", step=step_id)
            text = f"the masks of step {step_id} cannot be made: {type(error).__name__}: {error}"
            pipeline.fail(pipeline.n_stages - 1, "protocol_error", text)
            return
        for request_id, why in made.failures:
            text = f"the output cannot be constrained further: {why}; use a simpler schema or grammar"
            self._fail(request_id, RequestError("constraint_failed", text))


class _StepWork:
    """The masks of one step, made in parts of its jobs; ``done`` gets a function that returns them all."""

    def __init__(
        self, step_id: int, parts: Sequence[Sequence[MaskJob]], done: Callable[[Callable[[], MadeMasks]], None]
    ) -> None:
        self._step_id, self._parts, self._done = step_id, parts, done
        self._loop = asyncio.get_running_loop()
        self._made: dict[int, Future[MadeMasks]] = {}

    def part_done(self, index: int) -> Callable[[Future[MadeMasks]], None]:
        """Return the callback of a part, for the thread that made it."""

        def callback(made: Future[MadeMasks]) -> None:
            while True:
                try:
                    self._loop.call_soon_threadsafe(self._take, index, made)
                except MemoryError:
                    time.sleep(_RETRY_S)
                except RuntimeError:  # the loop was closed meanwhile
                    return
                else:
                    return

        return callback

    def _take(self, index: int, made: Future[MadeMasks]) -> None:
        self._made[index] = made
        if len(self._made) == len(self._parts):
            self._done(self._joined)

    def _joined(self) -> MadeMasks:
        made = [self._part(jobs, self._made[index]) for index, jobs in enumerate(self._parts)]
        message = Masks(self._step_id, sum(part.message.n_rows for part in made), made[0].message.row_bytes)
        payload = [rows for part in made for rows in part.payload]
        return MadeMasks(message, payload, [failure for part in made for failure in part.failures])

    def _part(self, jobs: Sequence[MaskJob], made: Future[MadeMasks]) -> MadeMasks:
        """The masks of a part; where it failed as a whole, rows that allow everything, and the failure of each job."""
        error = made.exception()
        return made.result() if error is None else unmasked(self._step_id, jobs, error)
