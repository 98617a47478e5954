"""Rows of a draft stage that are arranged before it is known which of a verify slice's drafts are right: those that the
slice adds to the context, and those of the drafts behind each token that it may sample last.

On a cpu each layout takes some 20 us when nothing of it is in the cache, and a daemon has that time while it waits for
the rows of the stage before.  Invariant: a layout is used with the pages that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from daemons.draft.jobs import DraftJob
from daemons.errors import StateError
from daemons.kv.batch import Layout
from daemons.kv.fewer_rows import leave_out_rows
from lucevisor.protocol.steps import DraftStep, Operation, Slice, Step, UseState


class PreparedRows:
    """Layouts for the only slice of a step."""

    def __init__(
        self, context_of: Callable[[Sequence[Slice]], Layout], drafts_of: Callable[[Sequence[DraftJob]], Layout]
    ) -> None:
        """``context_of``: what is made of it does not depend on the tokens of the slices.  ``drafts_of``: the newest
        token of a job is number 0, and nothing else depends on that.
        """
        self._context_of, self._drafts_of = context_of, drafts_of
        self._context: tuple[int, int, Layout] | None = None  # of a sequence, from a position on
        self._drafts: dict[tuple[int, int, int, int], Layout] = {}

    def prepare(self, step: Step, goes_on: Callable[[], bool]) -> None:
        """Arrange the rows of a verify slice and of what may follow it, as long as ``goes_on``; nothing if the step's
        operations may move pages.
        """
        self.clear()
        if len(step.slices) != 1 or not self.stay(step.operations):
            return
        [s] = step.slices
        if not s.sample or not s.num_draft_tokens or not s.n_drafts:
            return
        try:
            self._context = s.sequence, s.start, self._context_of([replace(s, tokens=[0] * len(s.tokens))])
            for position in range(s.start + s.n_context, s.start + len(s.tokens) + 1):
                if not goes_on():
                    return
                job = DraftJob(s, 0, 0, position, 0)
                self._drafts[self._key(job)] = self._drafts_of([job])
        except StateError:  # whoever asks for these rows will hear of it
            return

    def context(self, slices: Sequence[Slice]) -> Layout | None:
        """The layout of the first rows of a slice, once, if it is there."""
        found, self._context = self._context, None
        if found is None or len(slices) != 1 or found[:2] != (slices[0].sequence, slices[0].start):
            return None
        layout, n = found[2], len(slices[0].tokens)
        if n < layout.n_rows:
            leave_out_rows(layout, n)
        return layout if n == layout.n_rows else None

    def drafts(self, jobs: Sequence[DraftJob]) -> Layout | None:
        """The layout of a job, once, if it is there."""
        layout = self._drafts.pop(self._key(jobs[0]), None) if len(jobs) == 1 else None
        if layout is not None:
            layout.numbers[0] = jobs[0].newest
        return layout

    def stay(self, operations: Sequence[Operation]) -> bool:
        """Whether these operations move no pages; else forget what was arranged."""
        stay = all(isinstance(operation, UseState) for operation in operations)
        if not stay:
            self.clear()
        return stay

    def clear(self) -> None:
        """Forget what was arranged."""
        self._context = None
        self._drafts.clear()

    @staticmethod
    def _key(job: DraftJob) -> tuple[int, int, int, int]:
        s = job.slice
        return s.sequence, job.position, s.num_draft_tokens, s.draft_from


def preparing(
    prepare: Callable[[Step, Callable[[], bool]], None],
    asked: Callable[[], DraftStep | None],
    rung: Callable[[], bool],
    arrival: Callable[[], None],
) -> Callable[[], None]:
    """What waits for rows as ``arrival`` does, after it has prepared the drafts behind them, if they are ``asked`` for:
    until the rows are there (``rung``).
    """

    def wait() -> None:
        if not rung() and (message := asked()) is not None:
            prepare(message.step, lambda: not rung())
        arrival()

    return wait
