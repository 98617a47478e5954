"""Which slices go into the next step: decodes first, by how long they waited, then prompts, the shortest first.

Pure; knows the token budget of a step, not pages.  ``StepBudget`` says what prompts may take: while others wait or
decode, a long prompt gets small chunks, and short prompts go in front of it.  A prompt that ``MOST_SKIPPED`` steps left
out goes first, so none starves.
Invariant: what is picked fits into one step; a slice whose rows come back has a step of its own; a slice never crosses
a multiple of ``prefill_chunk`` nor a border of its prompt, and one that is cut short ends at a page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestState
from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.engine.step import ScheduledStep
from lucevisor.model.values import PAGE_TOKENS

MOST_SKIPPED: Final = 4
"""Steps in a row that may leave a prompt out in favour of shorter ones; twice as many while the head is never free."""

RECENT_S: Final = 5.0
"""Long prompts leave room for so long after the last short one started: its client is likely to ask again."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What prompts may take of the next step.

    ``shared``: others wait or decode beside a long prompt, so a step carries at most ``chunk`` prompt tokens, and a
    long prompt waits until the head is free, so that a short one that comes has at most one step before it there.
    ``level``: how far ahead of the others a key is, in coarse units.
    """

    step_id: int
    chunk: int
    shared: bool
    head_free: bool
    level: Callable[[str], int]

    def lets_wait(self, record: RequestRecord) -> bool:
        """Whether a prompt waits for the head to be free."""
        return not self.head_free and self.is_long(record) and self.n_skipped(record) < 2 * MOST_SKIPPED

    def n_skipped(self, record: RequestRecord) -> int:
        """Return how many steps left a prompt out since the last one that did not."""
        return self.step_id - record.live.last_step - 1 if record.live is not None else 0

    def is_long(self, record: RequestRecord) -> bool:
        """Whether a prompt is one that leaves room for others."""
        return self.shared and record.live is not None and record.live.n_prefill > self.chunk and record.wanted is None


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """A slice to be: from ``live.n_scheduled`` to ``stop``."""

    record: RequestRecord
    live: LiveSequence
    stop: int


def has_others(live: Iterable[RequestRecord], chunk: int) -> bool:
    """Return whether something but long prompts runs: a decode, or a prompt that fits into a chunk."""
    return any(
        record.state is RequestState.DECODE or (record.live is not None and record.live.n_prefill <= chunk)
        for record in live
    )


def choose(
    records: Collection[RequestRecord], flights: Collection[ScheduledStep], limits: EngineLimits, room: StepBudget
) -> list[ScheduledSlice]:
    """Choose the slices of a step by waiting time, size and token budget; pages are secured afterwards."""
    decodes, prompts = [], []
    for record in records:
        if record.live is not None and record.live.n_scheduled < len(record.tokens):
            if record.state is RequestState.PREFILL:
                prompts.append(record)
            else:
                stop = record.next_stop(record.live.n_scheduled, limits.prefill_chunk)
                decodes.append(ScheduledSlice(record, record.live, stop))
    waiting = [record for record in prompts if room.lets_wait(record)]
    if waiting:
        prompts = [record for record in prompts if record not in waiting]
        decodes.clear()  # they ride with its next chunk: a step of their own would cost it time
    decodes.sort(key=lambda pick: (pick.live.last_step, pick.record.arrival))
    picks: list[ScheduledSlice] = []
    budget = limits.max_step_tokens
    for pick in decodes[: _n_decodes(records, flights, limits)]:
        n_tokens = pick.stop - pick.live.n_scheduled
        if n_tokens <= budget:
            picks.append(pick)
            budget -= n_tokens
    budget = min(budget, room.chunk) if room.shared else budget
    for record in sorted(prompts, key=lambda record: _turn(record, room)):
        found = _chunk(record, limits, room, budget)
        if found is None or (record.wanted is not None and picks):
            continue
        picks.append(found)
        budget -= found.stop - found.live.n_scheduled
        if record.wanted is not None:
            break  # its rows come back as payload: nobody else's rows among them
    return picks


def _chunk(record: RequestRecord, limits: EngineLimits, room: StepBudget, budget: int) -> ScheduledSlice | None:
    """Return the next slice of a prompt that has at most ``budget`` tokens, cut at a page if need be."""
    assert record.live is not None
    long, start = room.is_long(record), record.live.n_scheduled
    stop, most = record.next_stop(start, limits.prefill_chunk), min(budget, room.chunk) if long else budget
    if stop - start > most and record.wanted is None:  # its rows are limited otherwise
        stop = (start + most) // PAGE_TOKENS * PAGE_TOKENS
    return ScheduledSlice(record, record.live, stop) if stop > start else None


def _turn(record: RequestRecord, room: StepBudget) -> tuple[bool, int, int, int, int]:
    live = record.live
    assert live is not None
    overdue = room.n_skipped(record) >= MOST_SKIPPED
    n_left = len(record.tokens) - live.n_scheduled
    return not overdue, live.last_step if overdue else 0, room.level(record.request.key_id), n_left, record.arrival


def _n_decodes(records: Collection[RequestRecord], flights: Collection[ScheduledStep], limits: EngineLimits) -> int:
    """Return how many sequences make one micro-batch; 0 while every stage has one."""
    if sum(flight.decodes for flight in flights) >= limits.n_stages:
        return 0
    n_decoding = sum(record.state is RequestState.DECODE for record in records)
    return -(-n_decoding // limits.n_stages)
