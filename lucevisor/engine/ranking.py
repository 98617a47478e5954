"""Rankings of pages by their stages (KV Flash, policy ``qk``): what the stages of a step say of them, put together.

Pure.  Invariant: a ranking is noted for the sequence whose slice asked for it, or for none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lucevisor.engine.step import ScheduledStep, WrongResult
from lucevisor.protocol.steps import StepResult


def note_rankings(scheduled: ScheduledStep, asked: Collection[int], results: Sequence[StepResult]) -> None:
    """Sum the scores of all stages for each sequence ``asked`` about, and resume those that waited for them.  Raises
    WrongResult if a stage scored other pages than the others did.
    """
    waiting = {sequence: part for sequence, part in scheduled.parts.items() if part.live.ranking == scheduled.step_id}
    wanted = {sequence: waiting[sequence] for sequence in asked if sequence in waiting}
    sums: dict[int, list[float]] = {}
    for result in results:
        for one in result.page_scores:
            before = sums.setdefault(one.sequence, [0.0] * len(one.scores))
            if one.sequence not in wanted or len(before) != len(one.scores):
                n = f"{len(one.scores)} pages of sequence {one.sequence}"
                raise WrongResult(f"step {result.step_id}: stage {result.stage} ranked {n}, which fits no other answer")
            sums[one.sequence] = [a + b for a, b in zip(before, one.scores, strict=True)]
    for sequence, part in wanted.items():
        part.live.ranking = 0
        part.live.table.rank(sums.get(sequence, []))
