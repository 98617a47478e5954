"""Verify steps: drafts that are accepted or rejected, with a drafter whose drafts are written down beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import FinishedEvent, GenerationRequest
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import LiveSequence
from lucevisor.engine.spec_decode.ngram import (
    INDEX_TOKENS,
    MAX_CANDIDATES,
    MAX_MATCH,
    MIN_MATCH,
    NgramLookup,
    NgramMatch,
)
from lucevisor.engine.step import WrongResult
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import Drafted, Sampled, Slice, StepResult
from tests.costs import lines_of
from tests.engine.toy_drafter import ToyDrafter
from tests.engine.toy_engine import HYBRID, ToyEngine, limits, request

FULL = frozenset({Space.FULL})
ON = SpeculationSettings(max_drafts=8, drafter=True, fixed=True)
CACHED = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1, checkpoint_pages=0)


def speculating(**changes: object) -> EngineLimits:
    """Limits of a model with full attention only, and a drafter."""
    return limits(
        **{"spaces": FULL, "pools": PoolSizes(16, 0, 0), "speculation": ON, "max_step_tokens": 128, **changes}
    )


class ScriptedDrafter(ToyDrafter):
    """Drafts what is written down, by seed."""

    script: dict[int, list[list[int]]]

    def _draft(self, piece: Slice, new: list[int]) -> list[int]:
        super()._draft(piece, new)
        drafts = self.script[self.sequences[piece.sequence].sampling.seed]
        return drafts.pop(0)[: piece.num_draft_tokens] if drafts else []


class Bench(ToyEngine):
    """``submit`` says what is drafted behind the first token, behind the token that verifies that, and so on."""

    def __init__(self, bounds: EngineLimits) -> None:
        super().__init__(bounds)
        self.attach()
        self.attach_drafter(with_output=False)
        assert self.drafter is not None
        drafter = ScriptedDrafter(self.model, bounds.pools, self.drafter._captures, self.drafter._oracle, wrong=0)
        drafter.script = self.script = {}
        self.daemons[-1].drafter = drafter
        self.submitted: list[GenerationRequest] = []
        self.got: dict[str, list[int]] = {}

    def submit(self, one: GenerationRequest, drafts: Sequence[list[int]] = ()) -> None:
        self.texts[one.sampling.seed] = [*one.prompt, *self.right(one)]
        self.script[one.sampling.seed] = [*drafts]
        self.submitted.append(one)
        self.engine.submit(one)

    def right(self, one: GenerationRequest) -> list[int]:
        return self.model.alone(one.prompt, one.sampling, one.max_tokens, frozenset())

    def target(self) -> None:
        """Let the target execute its oldest step."""
        assert self.pipeline is not None
        self.pipeline.receive(*self.daemons[0].run_one())

    def draft(self) -> None:
        """Let the drafter execute its oldest step."""
        assert self.pipeline is not None
        self.pipeline.receive(*self.daemons[1].run_one())

    @property
    def live(self) -> LiveSequence:
        [record] = self.engine.scheduler.running
        assert record.live is not None
        return record.live

    @property
    def slices(self) -> list[tuple[int, int, int]]:
        """(start, tokens, drafts) of each slice that was answered."""
        return [(s.start, len(s.tokens), s.n_drafts) for result in self.steps for s in result.step.slices]


def test_accepted_drafts_save_steps_and_none_is_asked_or_verified_behind_the_last_token() -> None:
    bench = Bench(speculating())
    one = request("a", range(10), n=9)
    right = bench.right(one)
    bench.submit(one, [right[1:5], [], [], right[7:20]])
    asked = {}
    while any(daemon.inbox for daemon in bench.daemons):
        asked |= {message.step_id: s.num_draft_tokens for _, message in bench.daemons[0].inbox for s in message.slices}
        bench.work(0)
    assert bench.slices == [(0, 10, 0), (10, 5, 4), (15, 1, 0), (16, 1, 0), (17, 1, 0)]
    assert [*asked.values()] == [7, 6, 1, 0, 0]


@pytest.mark.parametrize("drawn", [[9], [5, 6], [5, 9, 6, 7]], ids=["wrong", "wrong then more", "too many"])
def test_an_accepted_draft_that_was_not_proposed_is_a_wrong_result(drawn: list[int]) -> None:
    scheduler = Scheduler(speculating())
    scheduler.attach_drafter(with_output=True)
    scheduler.submit(request("a", n=8), 0.0)
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step.step_id, 0, [Sampled(0, 4)]), 0.0)
    scheduler.drafting.on_drafts(StepResult(plan.step.step_id, 1, drafts=[Drafted(0, [5, 9])]))
    plan = scheduler.next_plan(0.0)
    assert plan is not None
    result = StepResult(plan.step.step_id, 0, [Sampled(0, token) for token in (*drawn, 1)])
    with pytest.raises(WrongResult, match="accepted"):
        scheduler.apply(result, 0.0)
    assert scheduler.n_generated_tokens == 1


@pytest.mark.parametrize("spaces", [FULL, HYBRID], ids=["full", "recurrent"])
def test_a_request_that_ends_in_the_middle_of_its_drafts_is_remembered_up_to_there(spaces: frozenset[Space]) -> None:
    """What was drafted behind the stop id is in the pages and states, and not in the slot."""
    bench = Bench(speculating(spaces=spaces, prefix=CACHED, pools=PoolSizes(16, 0, 8, draft_states=12)))
    one = request("a", range(10), n=9)
    right = bench.right(one)
    stop = next(t for i, t in enumerate(right) if i >= 2 and t not in right[:i])
    at = right.index(stop)
    bench.submit(request("a", range(10), n=9, stop_ids=frozenset({stop})), [[*right[1 : at + 1], 3, 4]])
    bench.run()
    [slot] = [s for s in bench.engine.prefixes.slots if s.n_tokens > 10]
    assert list(slot.tokens) == [*range(10), *right[: at + 1]]
    two = request("b", (*range(10), *right[: at + 1], 7, 7), n=3)
    bench.submit(two)
    handle = bench.engine._handles["b"]
    bench.run()
    assert (10 + at + 1, 2, 0) in bench.slices  # computed from the slot's end on
    tokens = [event.token for event in handle._events if not isinstance(event, FinishedEvent)]
    assert tokens == bench.right(two)


# ---- n-grams


ALPHABET = 4
"""Ids of the naive comparison: their n-grams all have buckets of their own (asserted below)."""


def naive(tokens: Sequence[int]) -> NgramMatch | None:
    """The longest of the matches at the newest occurrences of the last tokens, by trying every position."""
    tokens, best = list(tokens), None
    n = len(tokens)
    occurrences = [s for s in range(n - 1, MIN_MATCH - 1, -1) if tokens[s - MIN_MATCH : s] == tokens[n - MIN_MATCH :]]
    for start in occurrences[:MAX_CANDIDATES]:
        length = max(m for m in range(1, min(start, MAX_MATCH) + 1) if tokens[start - m : start] == tokens[n - m :])
        if best is None or length > best.length:
            best = NgramMatch(start, length)
    return best


def indexed(tokens: Sequence[int]) -> NgramLookup:
    lookup = NgramLookup(TokenBuffer(tokens))
    while lookup.index():
        pass
    return lookup


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=120))
def test_matches_are_those_of_a_naive_search_and_drafts_repeat_what_followed(tokens: list[int]) -> None:
    lookup, match = indexed(tokens), naive(tokens)
    assert lookup.match() == match
    if match is not None:
        text = [*tokens]
        for at in range(match.start, match.start + 4):
            text.append(text[at])  # a repetition goes on behind the end
        assert lookup.continuation(match, 4) == text[len(tokens) :]


@given(st.lists(st.integers(0, ALPHABET - 1), max_size=60), st.lists(st.integers(0, ALPHABET - 1), max_size=60))
def test_a_growing_sequence_is_indexed_as_a_whole_one(prompt: list[int], answer: list[int]) -> None:
    tokens = TokenBuffer(prompt)
    lookup = NgramLookup(tokens)
    for token in answer:
        lookup.index(7)
        tokens.append(token)
    while lookup.index(5):
        pass
    assert lookup.match() == naive(tokens)
    assert lookup._older == indexed(tokens)._older


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 50), max_size=200))
def test_a_match_is_one_whatever_the_ids(tokens: list[int]) -> None:
    """Buckets may be shared: candidates of other n-grams are no matches."""
    tokens = tokens * 2
    match = indexed(tokens).match()
    if match is None:
        assert len(tokens) <= MIN_MATCH + 1
    else:
        assert MIN_MATCH <= match.length <= MAX_MATCH
        assert tokens[match.start - match.length : match.start] == tokens[len(tokens) - match.length :]


def test_a_long_prompt_is_indexed_in_slices() -> None:
    n = 262_144
    tokens = TokenBuffer([(i * i + i // 7) % 150_000 for i in range(n)])
    lookup = NgramLookup(tokens)
    n_calls = 0
    while lookup.n_waiting:
        n_waiting = lookup.n_waiting
        assert lines_of(lookup.index) < 8 * INDEX_TOKENS  # it holds up the event loop
        assert 0 < n_waiting - lookup.n_waiting <= INDEX_TOKENS
        n_calls += 1
    assert n_calls == -(-(n - MIN_MATCH) // INDEX_TOKENS)
    assert len(lookup._older) * lookup._older.itemsize < 2 << 20


def test_a_text_of_one_token_costs_few_candidates() -> None:
    tokens = TokenBuffer([1] * 20_000 + [2, 1, 1, 1])
    lookup = indexed(tokens)
    assert lines_of(lookup.match) < 2_000  # a walk of the chain would take 20,000 comparisons
