"""Another scheduling policy: what a scheduler does not decide itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import pytest

from lucevisor.engine.policy import FairShare, StepShare
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.sequence import RequestRecord
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import ToyEngine, limits, request


class FirstCome(FairShare):
    """Requests start in the order in which they came, keep what they have, and compute their prompts in that order."""

    order_is_stable = True

    def waiting_order(
        self, waiting: Collection[RequestRecord], running: Iterable[RequestRecord]
    ) -> list[RequestRecord]:
        return sorted(waiting, key=lambda record: (not record.has_priority, record.arrival))

    def accepts(self, request: GenerationRequest, n_waiting: int, n_clients: int, max_queue: int) -> bool:
        return n_waiting < max_queue

    def share_step(
        self, prompts: Sequence[RequestRecord], running: Iterable[RequestRecord], last_step: int, now: float, *,
        busy: bool,
    ) -> StepShare:  # fmt: skip
        return StepShare(sorted(prompts, key=lambda record: record.arrival), 1 << 20)

    def victims(self, running: Iterable[RequestRecord]) -> FirstCome:
        return self

    def victim(self, record: RequestRecord) -> None:
        return None


ONE_SEQUENCE = limits(max_sequences=1, pools=PoolSizes(16, 0, 1))


@pytest.mark.parametrize(("policy", "order"), [(FirstCome, "abc"), (FairShare, "acb")])
async def test_the_policy_says_who_starts_next(policy: type[FairShare], order: str) -> None:
    toy = ToyEngine(ONE_SEQUENCE, policy=policy)
    toy.attach()
    asked = [request("a", range(100)), request("b", range(200)), request("c", range(10))]
    handles = [toy.engine.submit(one) for one in asked]
    ended: list[str] = []
    while toy.work(0):
        ended += [h.request_id for h in handles if h.finished is not None and h.request_id not in ended]
    assert ended == [*order]


async def test_the_client_that_was_served_least_starts_next() -> None:
    """Its prompt is longer than those of the other client, which came before it."""
    toy = ToyEngine(ONE_SEQUENCE)
    toy.attach()
    asked = [request(name, range(100), client_id="a") for name in ("a0", "a1", "a2")]
    asked.append(request("b", range(150), client_id="b"))
    handles = [toy.engine.submit(one) for one in asked]
    ended: list[str] = []
    while toy.work(0):
        ended += [h.request_id for h in handles if h.finished is not None and h.request_id not in ended]
    assert ended == ["a0", "b", "a1", "a2"]
