"""Rankings of pages by a small model (KV Flash, policy ``drafter``), once for each prompt, before its last token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from lucevisor.engine.events import PagesRanked
from lucevisor.engine.step import ScheduledStep, WrongResult
from lucevisor.errors import ScoringError
from lucevisor.protocol.steps import StepResult


def note_rankings(scheduled: ScheduledStep, asked: Collection[int], results: Sequence[StepResult]) -> None:
    """Sum the scores of all stages for each sequence ``asked`` about, and resume those that waited. Raises WrongResult
    if a stage scored other pages than the others did."""
    waiting = {sequence: part for sequence, part in scheduled.parts.items() if part.live.ranking == scheduled.step_id}
    wanted = {sequence: waiting[sequence] for sequence in asked if sequence in waiting}
    sums: dict[int, list[float]] = {}
    for result in results:
        for answer in result.page_scores:
            before = sums.setdefault(answer.sequence, [0.0] * len(answer.scores))
            if answer.sequence not in wanted or len(before) != len(answer.scores):
                n = f"{len(answer.scores)} pages of sequence {answer.sequence}"
                raise WrongResult(f"step {result.step_id}: stage {result.stage} ranked {n}, which fits no other answer")
            sums[answer.sequence] = [a + b for a, b in zip(before, answer.scores, strict=True)]
    for sequence, part in wanted.items():
        part.live.ranking = 0
        part.live.table.rank(sums.get(sequence, []))


PageScorer = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""The relevance of each whole page of a text to its end; raises ScoringError."""

log = structlog.get_logger("lucevisor.engine")


class PageRelevance:
    """Ranks the pages of sequences by ``score``; ``on_ranked`` is called with each ranking."""

    def __init__(self, on_ranked: Callable[[PagesRanked], None]) -> None:
        self.score: PageScorer | None = None
        self._on_ranked = on_ranked
        self._tasks: set[asyncio.Task[None]] = set()

    def rank(self, step_id: int, sequence: int, tokens: Sequence[int]) -> None:
        """Rank the pages of a sequence that waits for it since a step, and which no stage ranks."""
        if self.score is None:
            self._on_ranked(PagesRanked(step_id, sequence, ()))
            return
        task = asyncio.create_task(self._ask(self.score, step_id, sequence, tokens), name="rank pages")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel what is being asked."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, score: PageScorer, step_id: int, sequence: int, tokens: Sequence[int]) -> None:
        scores: Sequence[float] = ()
        try:
            scores = await score(tokens)
        except ScoringError as error:
            log.warning("pages not ranked", n_tokens=len(tokens), reason=str(error))
        except Exception:  # the owner's code: without an answer the sequence would wait for ever
            log.exception("pages not ranked", n_tokens=len(tokens))
        self._on_ranked(PagesRanked(step_id, sequence, scores))
