"""Decodes that are planned before the tokens they start from are known.

A pipeline of one stage would idle from a step's result until the next step arrives.  So the next step is sent while one
runs: its slices name the tokens that the running step samples (``PENDING``), which the daemon knows first.
Pure.  Only where nobody loses by it: every running request decodes, each from its row alone, and none waits for drafts.
A drafter that is attached and not asked does not matter: it gets such steps like any other.
Invariant: a sequence has at most one token that is planned and not known.
"""

from __future__ import annotations

from collections.abc import Collection

from lucevisor.engine.drafting import Drafting
from lucevisor.engine.request import RequestState
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.step import ScheduledSlice, ScheduledStep


def choose_ahead(
    records: Collection[RequestRecord], in_flight: Collection[ScheduledStep], n_stages: int, drafting: Drafting
) -> list[ScheduledSlice]:
    """Choose the decodes behind the only step in flight; none unless all ``records`` can run ahead or end with it."""
    if n_stages != 1 or len(in_flight) != 1 or any(step.n_ahead for step in in_flight):
        return []
    chosen = []
    for record in records:
        live = record.live
        if live is not None and live.ranking:  # its pages may be others then
            return []
        if live is None or not _follows(record) or live.n_scheduled != len(record.tokens) or live.draft_states:
            return []
        if live.n_computed != live.n_scheduled:  # drafts are verified: nobody knows how many tokens come
            return []
        if record.n_generated + 1 < record.max_tokens:
            chosen.append(ScheduledSlice(record, live, live.n_scheduled + 1))
    chosen.sort(key=lambda one: (one.live.last_step, one.record.arrival))
    return [] if drafting.would_draft(chosen) else chosen


def _follows(record: RequestRecord) -> bool:
    """Whether a request decodes, and its tokens are drawn from their rows and positions alone."""
    plain = record.request.constraint is None and record.request.sampling.stateless
    return plain and record.state is RequestState.DECODE and not record.uncached
