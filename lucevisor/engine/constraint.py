"""Constrained output (structured output, guided decoding): a request's constraint and its token masks.

Masks are made in threads while the shards compute the step. Invariants: one caller at a time uses a constraint; every
step that was handed over comes back exactly once, as made or as failed, on the event loop's thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from lucevisor.protocol.steps import Masks
from lucevisor.protocol.threads import ThreadExecutor


class Constraint(Protocol):
    """Constraint on the output of one request: a grammar, a thinking budget or a minimum length."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one mask, 8 tokens each."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the output taken so far."""

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Take tokens as ``masks`` does; return how many ``drafts`` may follow them. Called on the event loop, so it
        takes microseconds, or returns 0 from then on. Never raises."""

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        """Take the output's ``tokens`` from ``start`` on, which may overlap those taken before; return a mask of
        ``row_bytes`` of what may follow them, and one after each draft.

        Masks after a forbidden draft may hold anything. Called from any thread. Raises an error that says why it cannot
        go on."""


class MinTokens:
    """An output that ``ends`` may not end before ``least`` tokens; ``inner`` has its way where nothing else
    may follow."""

    def __init__(self, least: int, ends: Collection[int], n_vocab: int, inner: Constraint | None = None) -> None:
        self._least, self._inner, self._ends = least, inner, ends
        self.row_bytes = -(-n_vocab // 8)
        self._n_taken = 0

    @property
    def n_tokens(self) -> int:
        return self._n_taken if self._inner is None else min(self._n_taken, self._inner.n_tokens)

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        n_before = self._consume(start, tokens)
        n_drafts = len(drafts) if self._inner is None else self._inner.n_valid(start, tokens, drafts)
        early = drafts[: min(n_drafts, max(0, self._least - n_before))]
        return next((i for i, draft in enumerate(early) if draft in self._ends), n_drafts)

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        n_before = self._consume(start, tokens)
        if self._inner is None:
            rows = bytearray(b"\xff") * (self.row_bytes * (1 + len(drafts)))
        else:
            rows = self._inner.masks(start, tokens, drafts)
        for index in range(min(1 + len(drafts), self._least - n_before)):
            place = slice(index * self.row_bytes, (1 + index) * self.row_bytes)
            row = rows[place]
            for token in self._ends:
                row[token // 8] &= ~(1 << token % 8)
            if any(row):
                rows[place] = row
        return rows

    def _consume(self, start: int, tokens: Sequence[int]) -> int:
        """Return how many tokens there are."""
        self._n_taken = max(self._n_taken, start + len(tokens))
        return start + len(tokens)


MAX_MASK_BYTES: Final = 8 * 1024 * 1024
"""Masks of one step, where drafts would make them more: a link may queue twice as much."""


def within_masks(widths: Sequence[int], constraints: Sequence[Constraint | None]) -> list[int]:
    """Cut the longest slices with a constraint until the masks of a step, ``1 + width`` each, are small enough."""
    rows = [constraint.row_bytes if constraint is not None else 0 for constraint in constraints]
    most = max(widths, default=0)
    while most and sum(n * (1 + min(width, most)) for n, width in zip(rows, widths, strict=True)) > MAX_MASK_BYTES:
        most -= 1
    return [min(width, most) if n else width for n, width in zip(rows, widths, strict=True)]


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks to make for one slice: of what follows ``tokens``, the output's from ``start`` on, and each draft."""

    request_id: str
    constraint: Constraint
    start: int
    tokens: Sequence[int]
    drafts: Sequence[int]


@dataclass(frozen=True, slots=True)
class MadeMasks:
    """The masks of a step, rows in the order of its slices; ``failures``: (request id, why), whose rows allow
    everything."""

    message: Masks
    payload: list[bytearray]
    failures: list[tuple[str, str]]


def make_masks(step_id: int, jobs: Sequence[MaskJob]) -> MadeMasks:
    payload, failures = [], []
    row_bytes = jobs[0].constraint.row_bytes
    n_rows = sum(1 + len(job.drafts) for job in jobs)
    for job in jobs:
        try:
            payload.append(job.constraint.masks(job.start, job.tokens, job.drafts))
        except BaseException as error:  # a panic of compiled code, too: the output stage waits for masks
            failures.append((job.request_id, str(error)))
            payload.append(bytearray(b"\xff") * (row_bytes * (1 + len(job.drafts))))
    return MadeMasks(Masks(step_id, n_rows, row_bytes), payload, failures)


log = structlog.get_logger("lucevisor.engine")


class MaskMaker:
    """``on_made`` gets the masks of a step, ``on_failed`` the reason why there are none. ``threaded`` False: on the
    calling thread, for tests that have no event loop, and where there is no memory for threads."""

    def __init__(
        self,
        on_made: Callable[[int, MadeMasks], None],
        on_failed: Callable[[int, str], None],
        *,
        threaded: bool = True,
    ) -> None:
        self._on_made, self._on_failed = on_made, on_failed
        self._n_threads = min(4, os.cpu_count() or 1)
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
        size = max(4, -(-len(jobs) // self._n_threads))  # most masks take less than 0.1 ms
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
