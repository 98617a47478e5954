"""Drafts that are verified before the supervisor knows them: ``PENDING`` in the slice, filled in when they are told.

Pure.  ADR 16 says where.  Invariant: of a slice with pending drafts the draft stage has yet to answer the step that
asked for them, or is detached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lucevisor.engine.sequence import LiveSequence
from lucevisor.engine.step import ScheduledSlice, ScheduledStep
from lucevisor.protocol.steps import PENDING, Drafted


def unseen_drafts(outstanding: Iterable[ScheduledStep], live: LiveSequence) -> Drafted:
    """Return the drafts that are being made for a sequence, as far as they are known; ``outstanding``: the steps that
    the draft stage has yet to answer.
    """
    asked = next((step for step in outstanding if step.step_id == live.awaiting), None)
    n = asked.parts[live.sequence].slice.n_ahead if asked is not None else 0
    return Drafted(live.sequence, [PENDING] * n)


def told_together(decodes: Sequence[ScheduledSlice]) -> list[ScheduledSlice]:
    """Return those decodes whose drafts, as far as they are being made, the first step of these asked for: the first of
    several stages waits for one step's.
    """
    asked = next((one.live.awaiting for one in decodes if one.live.awaiting), 0)
    return [one for one in decodes if one.live.awaiting in (0, asked)]


def fill_in(outstanding: Iterable[ScheduledStep], asked: ScheduledStep, drafts: Mapping[int, Drafted]) -> bool:
    """Put the ``drafts`` that a step asked for into the slices behind it that verify them; return whether any do."""
    found = False
    for step in outstanding:
        for sequence, part in step.parts.items():
            before = asked.parts.get(sequence) if part.slice.drafts_pend else None
            if before is None or before.live is not part.live or not before.slice.n_ahead:
                continue
            drafted = drafts.get(sequence, Drafted(sequence, []))
            n_proposed, piece = min(part.n_proposed, len(drafted.tokens)), part.slice.with_drafts(drafted.tokens)
            step.parts[sequence] = replace(part, slice=piece, n_proposed=n_proposed)
            found = True
    return found
