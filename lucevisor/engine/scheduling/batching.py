"""Chooses the slices of the next step: decodes first, longest waiting first, then prompts, shortest first.

Pure; knows the token budget of a step, not pages.  While others wait or decode, a long prompt gets small chunks, and
short prompts go before it in steps of their own (``StepBudget``).  A prompt that ``MAX_SKIPPED_STEPS`` steps left out
goes first, so none starves.
Invariant: the slices fit one step; a slice whose rows are returned has a step of its own; a slice never crosses a
multiple of ``prefill_chunk`` or a checkpoint of its prompt, and one that is cut short ends at a page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestState
from lucevisor.engine.scheduling.backlog import Backlog
from lucevisor.engine.scheduling.chunking import SharedChunks
from lucevisor.engine.scheduling.drafts import Drafting
from lucevisor.engine.scheduling.run_ahead import choose_ahead, n_microbatches
from lucevisor.engine.scheduling.shares import ClientShares
from lucevisor.engine.scheduling.unseen import told_together
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.step import ScheduledSlice, ScheduledStep
from lucevisor.model.values import PAGE_TOKENS

MAX_SKIPPED_STEPS: Final = 4
"""Steps in a row that may skip a prompt for shorter ones; twice as many while the first stage is never free."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What prompts may take of the next step.

    ``shared``: others wait or decode beside long prompts or are expected, so ``chunks`` limits what a step carries of
    one, by ``others``: whether they are there now.  ``may_follow`` says whether its chunk from a position may be sent
    now.  ``level``: how far ahead of the other clients one is, in coarse units.  ``runs_ahead``: whether decodes may be
    planned before their tokens are known.
    """

    step_id: int
    n_stages: int
    chunks: SharedChunks
    shared: bool
    others: bool
    may_follow: Callable[[int], bool]
    level: Callable[[str], int]
    runs_ahead: bool = True

    def should_wait(self, record: RequestRecord) -> bool:
        """Whether a long prompt lets others go first now."""
        live = record.live
        if live is None or not self.is_long(record) or self.n_skipped(record) >= 2 * MAX_SKIPPED_STEPS:
            return False
        return not self.may_follow(live.n_scheduled)

    def n_skipped(self, record: RequestRecord) -> int:
        """Return how many steps skipped a prompt since its last slice."""
        return self.step_id - record.live.last_step - 1 if record.live is not None else 0

    def is_long(self, record: RequestRecord) -> bool:
        """Whether a prompt is long, so that it leaves room for others."""
        if not self.shared or record.live is None or record.wanted is not None:
            return False
        return record.live.n_prefill > self.chunks.max_short_tokens


def step_budget(
    step_id: int,
    n_stages: int,
    chunks: SharedChunks,
    backlog: Backlog,
    shares: ClientShares,
    now: float,
    running: Collection[RequestRecord],
    *,
    runs_ahead: bool,
) -> StepBudget:
    """Return the budget of a step from what runs, is under way and was measured."""
    any_prompts = any(record.state is RequestState.PREFILL for record in running)  # without, nothing is to be shared
    others = any_prompts and (chunks.came_beside_long(now) or has_others(running, chunks.max_short_tokens))
    shared = others or (any_prompts and chunks.expects_short(now))
    follow = partial(chunks.may_follow, backlog, now, others=others)

    def level(client: str) -> int:
        # Clients closer together than a chunk count as equal: the shortest prompt goes first.
        return shares.lead(client) // chunks.full

    return StepBudget(step_id, n_stages, chunks, shared, others, follow, level, runs_ahead)


def has_others(live: Iterable[RequestRecord], chunk: int) -> bool:
    """Return whether a decode runs, or a prompt that fits into a chunk."""
    return any(
        record.state is RequestState.DECODE or (record.live is not None and record.live.n_prefill <= chunk)
        for record in live
    )


def has_long(live: Iterable[RequestRecord], chunks: SharedChunks) -> bool:
    """Return whether a long prompt is computed."""
    return any(
        record.state is RequestState.PREFILL
        and record.live is not None
        and record.live.n_prefill > chunks.max_short_tokens
        for record in live
    )


def choose_slices(
    records: Collection[RequestRecord],
    in_flight: Collection[ScheduledStep],
    limits: EngineLimits,
    budget: StepBudget,
    drafting: Drafting,
) -> list[ScheduledSlice]:
    """Choose the slices of a step by waiting time, size and token budget; pages are allocated afterwards."""
    if any(step.n_ahead for step in in_flight) and not any(_has_rows(record) for record in records):
        return []  # all wait for results, and drafts are never run ahead of
    if len(in_flight) > budget.n_stages:
        return choose_ahead(records, in_flight, budget.n_stages, drafting) if budget.runs_ahead else []
    decodes, prompts, unseen = [], [], drafting.verifies_unseen
    for record in records:
        if record.live is not None and _has_rows(record) and not record.live.ranking:
            if record.state is RequestState.PREFILL:
                prompts.append(record)
            elif unseen or not record.live.awaiting:
                decodes.append(ScheduledSlice(record, record.live, record.n_tokens))
    waiting = [record for record in prompts if budget.should_wait(record)]
    if waiting:
        prompts = [record for record in prompts if record not in waiting]
        decodes.clear()  # they go with its next chunk: a step of their own would delay it
    decodes.sort(key=lambda one: (one.live.last_step, one.record.arrival))
    if budget.n_stages > 1:
        decodes = told_together(decodes)
    chosen = drafting.with_drafts(decodes[: _n_decodes(records, in_flight, budget.n_stages, drafting)])
    n_left = limits.max_step_tokens - sum(one.n_tokens for one in chosen)
    chosen += _choose_prompts(prompts, limits, budget, n_left, alone=not chosen)
    if chosen or not budget.runs_ahead:
        return chosen
    return choose_ahead(records, in_flight, budget.n_stages, drafting)


def _has_rows(record: RequestRecord) -> bool:
    """Whether a request has tokens that no step computes yet."""
    return record.live is not None and record.live.n_scheduled < record.n_tokens


def _choose_prompts(
    prompts: Iterable[RequestRecord], limits: EngineLimits, budget: StepBudget, n_left: int, *, alone: bool
) -> list[ScheduledSlice]:
    """Choose slices of prompts, ``n_left`` tokens at most; ``alone``: the step has no decode."""
    chosen: list[ScheduledSlice] = []
    n_short = n_long = 0  # tokens
    max_short = budget.chunks.max_short_tokens if budget.shared else n_left
    for record in sorted(prompts, key=lambda record: _turn(record, budget)):
        live, long = record.live, budget.is_long(record)
        if live is None or (record.wanted is not None and (chosen or not alone)):
            continue
        most = max_short - n_short
        if long:
            chunk = budget.chunks.chunk(live.n_scheduled, others=budget.others)
            most = (budget.chunks.beside_short - n_short if n_short else chunk) - n_long
        found = _chunk(record, limits, min(most, n_left))
        if found is None:
            continue
        chosen.append(found)
        n_tokens = found.stop - live.n_scheduled
        n_left -= n_tokens
        n_short, n_long = (n_short, n_long + n_tokens) if long else (n_short + n_tokens, n_long)
        if record.wanted is not None:
            break  # its rows are the step's payload, so no other request may be in it
    return chosen


def _chunk(record: RequestRecord, limits: EngineLimits, n_left: int) -> ScheduledSlice | None:
    """Return the next slice of a prompt, cut at a page if it has more than ``n_left`` tokens."""
    assert record.live is not None
    start = record.live.n_scheduled
    stop = record.next_stop(start, limits.prefill_chunk)
    if limits.ranks_prompt(len(record.tokens)) and start < len(record.tokens) - 1:
        stop = min(stop, len(record.tokens) - 1)  # the last token sees what those before it chose
    if stop - start > n_left and record.wanted is None:  # its slices are limited by rows
        stop = (start + n_left) // PAGE_TOKENS * PAGE_TOKENS
    return ScheduledSlice(record, record.live, stop) if stop > start else None


def _turn(record: RequestRecord, budget: StepBudget) -> tuple[bool, int, int, int, int]:
    live = record.live
    assert live is not None
    overdue = budget.n_skipped(record) >= MAX_SKIPPED_STEPS
    n_left = len(record.tokens) - live.n_scheduled
    return not overdue, live.last_step if overdue else 0, budget.level(record.request.client_id), n_left, record.arrival


def _n_decodes(
    records: Collection[RequestRecord], in_flight: Collection[ScheduledStep], n_stages: int, drafting: Drafting
) -> int:
    """Return the size of a micro-batch of decodes; 0 while all of them are under way.

    A micro-batch whose drafts are being made counts: its verification would wait behind that of another one.
    """
    n_groups = drafting.n_groups(n_stages)
    if n_microbatches(in_flight) + drafting.n_drafting >= n_groups:
        return 0
    n_decoding = [record.state for record in records].count(RequestState.DECODE)
    return -(-n_decoding // n_groups)
