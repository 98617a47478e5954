"""Decodes that are planned before the tokens they start from are known.

A stage would idle from a step's result until the next step arrives.  So the next step of a micro-batch is sent while
one runs: its slices name the tokens that the running step samples (``PENDING``), which the daemons know first.
Pure.  Only where nobody loses by it: every running request decodes, each from its row alone, and none waits for drafts.
A drafter that is attached and not asked does not matter: it gets such steps like any other.
Invariant: a sequence has at most one token that is planned and not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lucevisor.engine.request import RequestState
from lucevisor.engine.scheduling.drafts import Drafting
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.step import ScheduledSlice, ScheduledStep


def choose_ahead(
    records: Collection[RequestRecord], in_flight: Collection[ScheduledStep], n_stages: int, drafting: Drafting
) -> list[ScheduledSlice]:
    """Choose the decodes behind the oldest step in flight that none follows; none unless all ``records`` can run ahead
    or end with what is in flight.
    """
    if any(step.n_ahead for step in in_flight):
        return []
    if not _may_run_ahead(records):
        return []
    followed = {step.follows for step in in_flight}
    for step in in_flight:
        chosen = [] if step.step_id in followed else _behind(step)
        if chosen:
            if len(chosen) > -(-len(records) // n_stages):  # others have ended: deal them into equal parts again
                return []
            return [] if drafting.would_draft(chosen) else chosen
    return []


def _behind(step: ScheduledStep) -> list[ScheduledSlice]:
    """Return the decodes that follow a step, in its order: by arrival."""
    chosen = []
    for part in step.parts.values():
        record, live = part.record, part.live
        if record.live is live and live.n_scheduled == record.n_tokens and record.n_tokens + 1 < record.most_tokens:
            chosen.append(ScheduledSlice(record, live, live.n_scheduled + 1))
    return chosen


def n_microbatches(in_flight: Collection[ScheduledStep]) -> int:
    """Return how many micro-batches of decodes are under way: a step that follows another one is of the same."""
    ids = {step.step_id for step in in_flight}
    return sum(step.decodes and step.follows not in ids for step in in_flight)


def _may_run_ahead(records: Iterable[RequestRecord]) -> bool:
    """Whether all requests decode with a step in flight, and the next ones may follow these, or nothing has to."""
    for record in records:  # one loop for all: it runs for every step
        live = record.live
        if live is None or not record.may_run_ahead or record.state is not RequestState.DECODE:
            return False
        if live.ranking or live.draft_states:  # its pages may be others then, or drafts are verified
            return False
        if not live.n_computed == live.n_scheduled >= record.n_tokens:
            return False
    return True
