"""Which slices go into the next step: decodes first, by how long they waited, then chunks by age.

Pure; knows the token budget of a step, not pages.  Invariant: what is picked fits into one step, and a slice whose rows
come back has a step of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lucevisor.engine.flight import Flight
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestState
from lucevisor.engine.sequence import LiveSequence, RequestRecord


@dataclass(frozen=True, slots=True)
class Pick:
    """A slice to be: from ``live.n_planned`` to ``stop``."""

    record: RequestRecord
    live: LiveSequence
    stop: int


def choose(records: Collection[RequestRecord], flights: Collection[Flight], limits: EngineLimits) -> list[Pick]:
    """Pick the slices of a step by age, waiting time and token budget; pages are secured afterwards."""
    ready = [
        Pick(record, record.live, record.next_stop(record.live.n_planned, limits.prefill_chunk))
        for record in records
        if record.live is not None and record.live.n_planned < len(record.tokens)
    ]
    decodes = [pick for pick in ready if pick.record.state is RequestState.DECODE]
    decodes.sort(key=lambda pick: (pick.live.last_step, pick.record.arrival))
    chunks = [pick for pick in ready if pick.record.state is RequestState.PREFILL]
    chunks.sort(key=lambda pick: pick.record.arrival)
    budget = limits.max_step_tokens
    picks: list[Pick] = []
    for pick in decodes[: _n_decodes(records, flights, limits)] + chunks:
        n_tokens = pick.stop - pick.live.n_planned
        if n_tokens > budget or (pick.record.wanted is not None and picks):
            continue
        picks.append(pick)
        budget -= n_tokens
        if pick.record.wanted is not None:
            break  # its rows come back as payload: nobody else's rows among them
    return picks


def _n_decodes(records: Collection[RequestRecord], flights: Collection[Flight], limits: EngineLimits) -> int:
    """Return how many sequences make one micro-batch; 0 while every stage has one."""
    if sum(flight.decodes for flight in flights) >= limits.n_stages:
        return 0
    n_decoding = sum(record.state is RequestState.DECODE for record in records)
    return -(-n_decoding // limits.n_stages)
