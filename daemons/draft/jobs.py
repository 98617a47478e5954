"""The drafts to make behind a step.  Pure; knows no drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from daemons.errors import StateError
from lucevisor.protocol.steps import Slice, Step


class DraftJob(NamedTuple):
    """A draft to make: ``n`` tokens behind ``newest``, which is at ``position``.

    ``row``: that of the step which holds the token before; ``at``: index of the slice.
    """

    slice: Slice
    at: int
    newest: int
    position: int
    row: int

    @property
    def n(self) -> int:
        return self.slice.num_draft_tokens


def likely(tokens: list[int], probabilities: list[float], p_min: int) -> tuple[list[int], list[float]]:
    """Drafts up to the first that is right, with all before it, with less than ``p_min`` percent; at least one."""
    if not p_min:
        return tokens, probabilities
    n = max(1, next((i for i, p in enumerate(accumulate(probabilities, mul)) if 100 * p < p_min), len(tokens)))
    return tokens[:n], probabilities[:n]


def jobs_behind(step: Step, tokens: Sequence[Sequence[int]], max_drafts: int) -> list[DraftJob]:
    """The drafts to make, those of equal length behind each other, of at most ``max_drafts``.

    ``tokens[i]``: sampled for slice i.  Raises StateError where that or what is asked for cannot be.
    """
    if len(tokens) != len(step.slices):
        where = f"draft step {step.step_id}"
        raise StateError(where, f"sampled tokens of {len(tokens)} slices, the step has {len(step.slices)}")
    jobs, row = [], 0
    for at, (s, sampled) in enumerate(zip(step.slices, tokens, strict=True)):
        if s.num_draft_tokens and sampled:
            if s.num_draft_tokens > max_drafts or len(sampled) > s.n_drafts + 1:
                most = f"{s.n_drafts + 1} are the most, and {max_drafts} drafts ahead"
                reason = f"{len(sampled)} tokens sampled and {s.num_draft_tokens} drafts ahead: {most}"
                raise StateError(f"slice of sequence {s.sequence} at {s.start}", reason)
            n_kept = s.n_context + len(sampled) - 1  # tokens of the slice that precede the newest
            jobs.append(DraftJob(s, at, sampled[-1], s.start + n_kept, row + n_kept - 1))
        row += len(s.tokens)
    return sorted(jobs, key=lambda job: job.n)
