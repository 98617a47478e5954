"""Debug check of the engine's accounts: ids, sequences, queue and steps in flight (LUCEVISOR_VALIDATE=1).

True between any two calls of the scheduler; checked whenever it is idle. An AccountingError is a defect of this
program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lucevisor.engine.request import RequestState
from lucevisor.kv.prefix_tree import NO_STATE
from lucevisor.kv.validation import (
    AccountingError,
    Owner,
    allocator_problems,
    index_owners,
    index_problems,
    pool_problems,
)
from lucevisor.model.values import KvGroup

if TYPE_CHECKING:
    from lucevisor.engine.scheduler import Scheduler

VARIABLE = "LUCEVISOR_VALIDATE"


def enabled(environment: Mapping[str, str]) -> bool:
    """Return whether the environment enables checks: any value but the empty one and 0."""
    return environment.get(VARIABLE, "") not in ("", "0")


def check(scheduler: Scheduler) -> None:
    """Raise AccountingError naming every id, sequence or request that is counted wrongly."""
    index = scheduler.reuse.index
    owners = [*_sequence_owners(scheduler), *index_owners(index)]
    problems = [*pool_problems(scheduler.pools, owners), *index_problems(index), *_sequence_problems(scheduler)]
    if problems:
        raise AccountingError(problems)


def _sequence_owners(scheduler: Scheduler) -> Iterator[Owner]:
    for record in scheduler.running:
        live, name = record.live, f"request {record.request.request_id}"
        if live is None:
            continue
        yield Owner(name, scheduler.pools.host_pages, live.table.hosts)
        yield Owner(name, scheduler.pools.draft_states, live.draft_states)
        for kv_group in scheduler.pools.kv_groups:
            if kv_group is not KvGroup.RECURRENT:
                yield Owner(name, scheduler.pools[kv_group], live.table.held(kv_group))
            elif live.state != NO_STATE:
                yield Owner(name, scheduler.pools[kv_group], [live.state])


def _sequence_problems(scheduler: Scheduler) -> Iterator[str]:
    running, queued = list(scheduler.running), list(scheduler.queue)
    owners = [
        Owner(f"request {r.request.request_id}", scheduler.running.sequence_ids, [r.live.sequence])
        for r in running
        if r.live
    ]
    yield from allocator_problems(scheduler.running.sequence_ids, owners)
    in_flight = Counter(part.record.request.request_id for step in scheduler.in_flight for part in step.parts.values())
    for record in running + queued:
        name, live = f"request {record.request.request_id}", record.live
        if (record.state is RequestState.QUEUED) != (live is None):
            yield f"{name} is {record.state.value} and {'has no' if live is None else 'has a'} sequence"
        if record.n_in_flight != (n := in_flight[record.request.request_id]):
            yield f"{name} counts {record.n_in_flight} steps in flight, {n} carry a slice of it"
        n_planned = len(record.tokens) + (record.n_in_flight > 1)  # one token may run ahead
        if live is not None and not live.n_computed <= min(live.n_scheduled, n_planned):
            n_tokens = f"{live.n_computed} computed, {live.n_scheduled} scheduled"
            yield f"{name} has {len(record.tokens)} tokens, {n_tokens}"
    names = [record.request.request_id for record in running + queued]
    if sorted(names) != sorted(scheduler.unfinished):
        yield f"requests {sorted(names)} run or wait, {sorted(scheduler.unfinished)} are unfinished"
