"""Logits masks (grammar bitmasks) of constrained slices, made in threads while the shards compute the step.

The event loop hands over a step's jobs and gets the masks back in a callback; neither waits for the other.  Invariant:
every step that was handed over comes back exactly once, as made or as failed, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog

from lucevisor.engine.constraint import MadeMasks, MaskJob, make_masks
from lucevisor.protocol.steps import Masks
from lucevisor.protocol.threads import ThreadExecutor

log = structlog.get_logger("masks")

_MAX_THREADS: Final = 4
_JOBS_A_THREAD: Final = 4  # fewer are not worth another thread: most masks take less than 0.1 ms


class MaskMaker:
    """``on_made`` gets the masks of a step, ``on_failed`` the reason why there are none.  ``threaded`` False: on the
    calling thread, before ``make_masks`` returns, for tests that have no event loop, and where there is no memory for
    threads.
    """

    def __init__(
        self,
        on_made: Callable[[int, MadeMasks], None],
        on_failed: Callable[[int, str], None],
        *,
        threaded: bool = True,
    ) -> None:
        self._on_made, self._on_failed = on_made, on_failed
        self._n_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads: ThreadExecutor | None = None
        if threaded:
            try:  # now, as the event loop cannot wait for a thread that may never begin
                self._threads = ThreadExecutor(self._n_threads, "masks")
            except MemoryError as error:
                log.warning("masks of constrained output are made on the event loop", reason=str(error))

    def make_masks(self, step_id: int, jobs: Sequence[MaskJob]) -> None:
        """Make the masks of a step that was sent."""
        if self._threads is None:
            self._finish(step_id, lambda: [make_masks(step_id, jobs)])
            return
        size = max(_JOBS_A_THREAD, -(-len(jobs) // self._n_threads))
        parts = [jobs[at : at + size] for at in range(0, len(jobs), size)]
        made = [asyncio.wrap_future(self._threads.submit(make_masks, step_id, part)) for part in parts]
        together = asyncio.gather(*made)
        together.add_done_callback(partial(self._on_done, step_id))

    def close(self) -> None:
        """Start nothing more, and drop what is being made."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _on_done(self, step_id: int, done: asyncio.Future[list[MadeMasks]]) -> None:
        if not done.cancelled():
            self._finish(step_id, done.result)

    def _finish(self, step_id: int, make: Callable[[], Sequence[MadeMasks]]) -> None:
        try:
            parts = make()
            message = Masks(step_id, sum(part.message.n_rows for part in parts), parts[0].message.row_bytes)
            payload = [rows for part in parts for rows in part.payload]
            made = MadeMasks(message, payload, [failure for part in parts for failure in part.failures])
        except Exception as error:  # most likely no memory
            log.exception("masks cannot be made", step=step_id)
            self._on_failed(step_id, f"the masks of step {step_id} cannot be made: {type(error).__name__}: {error}")
        else:
            self._on_made(step_id, made)
