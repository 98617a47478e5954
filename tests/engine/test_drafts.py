"""Verify steps: drafts that are accepted or rejected, on a toy pipeline that rolls back what was rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult
from lucevisor.engine.request import FinishedEvent, GenerationRequest, RequestState, TokenEvent
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan, WrongResult
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampled, Slice, StepResult
from tests.engine.toy_engine import HYBRID, limits, request
from tests.engine.toy_pipeline import VOCABULARY, ToyLimits, ToyModel, toy_daemons

FULL = frozenset({Space.FULL})
PAGED = frozenset({Space.FULL, Space.WINDOW})


def plain(**changes: object) -> EngineLimits:
    """Limits of a model whose state can be rolled back."""
    return limits(**{"spaces": FULL, "pools": PoolSizes(16, 0, 0), **changes})


class Bench:
    """A scheduler and toy daemons; ``propose`` is asked for drafts whenever a request has a new token."""

    def __init__(self, bounds: EngineLimits, n_stages: int = 1) -> None:
        self.model = ToyModel(n_stages, bounds.spaces, bounds.window_tokens)
        told = ToyLimits(n_stages, bounds.max_sequences, bounds.max_step_tokens)
        self.daemons, links = toy_daemons(self.model, bounds.pools, told)
        self.scheduler = Scheduler(bounds, n_stages)
        self.pipeline = Pipeline(links, self._take, self._failed)
        self.requests: dict[str, GenerationRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.drafts: dict[str, list[list[int]]] = {}  # what is proposed next, by request
        self.steps: list[StepPlan] = []

    def submit(self, one: GenerationRequest, drafts: Sequence[list[int]] = ()) -> None:
        self.requests[one.request_id], self.tokens[one.request_id] = one, []
        self.drafts[one.request_id] = [*drafts]
        self.scheduler.submit(one, 0.0)

    def run(self) -> None:
        """Until nothing is left to do."""
        self.send()
        while busy := [daemon for daemon in self.daemons if daemon.inbox]:
            self.pipeline.receive(*busy[0].run_one())
            self.send()
        assert self.scheduler.idle

    def send(self) -> None:
        while (plan := self.scheduler.next_plan(0.0)) is not None:
            self.steps.append(plan)
            self.pipeline.submit(plan.step)

    def wanted(self, name: str) -> list[int]:
        one = self.requests[name]
        return self.model.alone(one.prompt, one.sampling, one.max_tokens, one.stop_ids)

    def check(self) -> None:
        """Every request got what it would have got alone, without drafts."""
        for name, one in self.requests.items():
            wanted = self.wanted(name)
            assert self.tokens[name] == wanted[: len(wanted) - (wanted[-1] in one.stop_ids)]

    def _take(self, result: PipelineResult) -> None:
        for name, event in self.scheduler.apply(result.results[-1], 0.0):
            if isinstance(event, TokenEvent):
                self.tokens[name].append(event.token)
                if self.drafts[name]:
                    self.scheduler.propose(name, self.drafts[name].pop(0))

    @staticmethod
    def _failed(failure: PipelineFailure) -> None:
        raise AssertionError(failure.message)


def drafted(bench: Bench) -> list[tuple[int, int, int]]:
    """(start, tokens, drafts) of each slice."""
    return [(s.start, len(s.tokens), s.n_drafts) for plan in bench.steps for s in plan.step.slices]


def test_a_rejected_draft_lowers_what_is_scheduled_and_not_what_is_computed() -> None:
    bench = Bench(plain())
    one = request("a", range(10), n=6)
    bench.submit(one)
    bench.send()
    bench.pipeline.receive(*bench.daemons[0].run_one())
    [record] = bench.scheduler.running
    live = record.live
    assert live is not None
    assert (live.n_computed, live.n_scheduled) == (10, 10)
    right = bench.wanted("a")
    bench.scheduler.propose("a", [right[1], right[2], (right[3] + 1) % VOCABULARY, 5])
    bench.send()
    assert bench.steps[-1].step.slices == [
        Slice(0, 10, [right[0], right[1], right[2], (right[3] + 1) % 97, 5], True, 4)
    ]
    assert (live.n_computed, live.n_scheduled) == (11, 15)
    bench.pipeline.receive(*bench.daemons[0].run_one())
    assert (live.n_computed, live.n_scheduled) == (13, 13)
    assert bench.tokens["a"] == right[:4]
    bench.run()
    bench.check()


def test_accepted_drafts_save_steps() -> None:
    bench = Bench(plain())
    one = request("a", range(10), n=9)
    right = Bench(plain()).model.alone(one.prompt, one.sampling, 9, frozenset())
    bench.submit(one, [right[1:5], [], [], [], [], right[6:20]])
    bench.run()
    bench.check()
    assert drafted(bench) == [(0, 10, 0), (10, 5, 4), (15, 3, 2)]  # of the last drafts, those that may still come


def test_drafts_end_where_a_chunk_does() -> None:
    bench = Bench(plain())
    bench.submit(request("a", range(60), n=9), [[1] * 8])
    bench.run()
    bench.check()
    assert drafted(bench)[:2] == [(0, 60, 0), (60, 4, 3)]


def test_nobody_proposes_for_a_request_whose_token_is_under_way_or_that_is_over() -> None:
    bench = Bench(plain())
    bench.submit(request("a", n=3))
    bench.scheduler.propose("a", [1])  # it waits
    bench.send()
    bench.scheduler.propose("a", [1])  # its prompt is being computed
    bench.pipeline.receive(*bench.daemons[0].run_one())
    bench.send()
    bench.scheduler.propose("a", [1])  # its second token is being computed
    bench.run()
    bench.scheduler.propose("a", [1])
    bench.check()
    assert [n_drafts for _, _, n_drafts in drafted(bench)] == [0, 0, 0]


def test_recurrent_state_cannot_be_rolled_back() -> None:
    bench = Bench(limits(spaces=HYBRID))
    bench.submit(request("a"))
    with pytest.raises(ValueError, match="cannot be rolled back"):
        bench.scheduler.propose("a", [1])


@pytest.mark.parametrize("drawn", [[9], [5, 6], [5, 9, 6, 7]], ids=["wrong", "wrong then more", "too many"])
def test_an_accepted_draft_that_was_not_proposed_is_a_wrong_result(drawn: list[int]) -> None:
    scheduler = Scheduler(plain())
    scheduler.submit(request("a", n=8), 0.0)
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step.step_id, 0, [Sampled(0, 4)]), 0.0)
    scheduler.propose("a", [5, 9])
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    result = StepResult(plan.step.step_id, 0, [Sampled(0, token) for token in (*drawn, 1)])
    with pytest.raises(WrongResult, match="accepted"):
        scheduler.apply(result, 0.0)
    assert scheduler.n_generated_tokens == 1


def test_a_request_that_ends_in_the_middle_of_its_drafts_is_remembered_up_to_there() -> None:
    """What was drafted behind the stop id is in the pages, and not in the slot."""
    bounds = plain(prefix=PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1, checkpoint_pages=0,
                                         unit_bytes={Space.FULL: 1}))  # fmt: skip
    bench = Bench(bounds)
    one = request("a", range(10), n=9)
    right = bench.model.alone(one.prompt, one.sampling, 9, frozenset())
    stop = next(t for i, t in enumerate(right) if i >= 2 and t not in right[:i])
    at = right.index(stop)
    bench.submit(request("a", range(10), n=9, stop_ids=frozenset({stop})), [[*right[1 : at + 1], 3, 4]])
    bench.run()
    bench.check()
    [slot] = [s for s in bench.scheduler.reuse.index.slots if s.n_tokens > 10]
    assert list(slot.tokens) == [*range(10), *right[: at + 1]]
    bench.submit(request("b", (*range(10), *right[: at + 1], 7, 7), n=9))
    bench.run()
    bench.check()
    assert bench.steps[-9].step.slices[0].start == 10 + at + 1  # computed from the slot's end on


def test_a_request_cancelled_while_its_drafts_are_verified_is_remembered_without_them() -> None:
    bounds = plain(prefix=PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1, checkpoint_pages=0,
                                         unit_bytes={Space.FULL: 1}))  # fmt: skip
    bench = Bench(bounds)
    bench.submit(request("a", range(10), n=9), [[1, 2, 3]])
    bench.send()
    bench.pipeline.receive(*bench.daemons[0].run_one())
    bench.send()
    [(_, event)] = bench.scheduler.cancel("a", 0.0)
    assert isinstance(event, FinishedEvent)
    [first] = bench.tokens.pop("a")
    del bench.requests["a"]
    assert max(bench.scheduler.reuse.index.slots, key=lambda s: s.n_tokens).tokens == [*range(10), first]
    bench.submit(request("b", (*range(10), first, 1, 2, 3, 4), n=5))
    bench.run()
    bench.check()


@given(data=st.data())
def test_outputs_are_those_of_the_model_alone_whatever_is_proposed(data: st.DataObject) -> None:
    """Right, wrong and half-right drafts, with little room, preemption, stop ids and windows."""
    spaces = data.draw(st.sampled_from([FULL, PAGED]))
    window = data.draw(st.integers(1, 100)) if Space.WINDOW in spaces else None
    pools = PoolSizes(data.draw(st.integers(4, 10)), 12 if window else 0, 0)
    bounds = limits(
        spaces=spaces, window_tokens=window, pools=pools, max_sequences=data.draw(st.integers(1, 4)),
        max_context=200,
    )  # fmt: skip
    bench = Bench(bounds, data.draw(st.integers(1, 3)))
    for i in range(data.draw(st.integers(1, 4))):
        one = request(f"r{i}", range(i, i + data.draw(st.integers(1, 120))), data.draw(st.integers(1, 40)))
        stops = data.draw(st.sampled_from([frozenset(), frozenset({3, 50})]))
        one = request(one.request_id, one.prompt, one.max_tokens, stop_ids=stops)
        right = bench.model.alone(one.prompt, one.sampling, one.max_tokens, stops)
        drafts = []
        for at in range(1, len(right)):  # after token ``at``; those of a verify step's inner tokens are overwritten
            guess = right[at : at + data.draw(st.integers(0, 6))]
            if guess and data.draw(st.booleans()):
                guess[data.draw(st.integers(0, len(guess) - 1))] = data.draw(st.integers(0, VOCABULARY - 1))
            drafts.append(guess)
        bench.submit(one, drafts)
    bench.run()
    bench.check()
    assert all(record.state is not RequestState.DECODE for record in bench.scheduler._records.values())
