"""KV Flash in the engine: long requests in few pages, whatever runs beside them.

Every token is checked against the toy model with the pages masked that a plan's slices leave out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import ContextOverflow, FinishedEvent, GenerationRequest
from lucevisor.errors import ScoringError
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency, remembered, with_neighbours
from lucevisor.model.pages import HEAD_PAGES, max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import PENDING, PageIn, PageOut, SamplingParams, Slice
from tests.engine.toy_engine import HYBRID, ToyEngine, attached, events_of, limits, request, told
from tests.engine.toy_pipeline import ToyModel, draw, mix

POOL = Residency(6)
EXACT = Residency(6, "exact")
RANKED = Residency(6, "qk", tau=24)
PLAIN = frozenset({KvGroup.FULL})
SLIDING = frozenset({KvGroup.FULL, KvGroup.WINDOW})


def bounds(
    kv_groups: frozenset[KvGroup] = PLAIN,
    *,
    full_pages: int = 12,
    drafts: int = 0,
    slots: int = 0,
    host_pages: int = 0,
    residency: Residency = EXACT,
) -> EngineLimits:
    """With ``host_pages`` the policy is ``exact``, unless another is given."""
    window = 40 if KvGroup.WINDOW in kv_groups else None
    n_states = 3 * (1 + drafts) if KvGroup.RECURRENT in kv_groups else 0
    n_window = 3 * (max_window_pages(window, 64, 900) + 1) if window is not None else 0
    return limits(
        max_sequences=3,
        max_context=900,
        max_step_tokens=64 + 3 * (1 + drafts) + 30,
        kv_groups=kv_groups,
        pools=PoolSizes(full_pages, n_window, n_states, host_pages=host_pages),
        window_tokens=window,
        residency=residency if host_pages else POOL,
        speculation=SpeculationSettings(max_drafts=drafts, lookup=drafts > 0),
        prefix=PrefixSettings(
            max_slots=slots, memory_bytes=1 << 20, min_tokens=64, unit_bytes=dict.fromkeys(KvGroup, 1)
        ),
    )


@dataclass
class Masked:
    """The toy model over the slices of one sequence, with what they leave out masked."""

    model: ToyModel

    def __post_init__(self) -> None:
        n = self.model.n_stages
        self.values: list[list[int]] = [[] for _ in range(n)]  # by stage and position
        self.states: list[list[int]] = [[0] for _ in range(n)]  # after so many positions

    def rows(self, piece: Slice, entries_out: set[int] | None = None) -> list[int]:
        """The rows of a slice at the end of the last stage; ``entries_out``: of its table; None: the oldest."""
        n_pages = pages_of(piece.start + len(piece.tokens))
        if entries_out is None:
            entries_out = set(range(HEAD_PAGES, HEAD_PAGES + max(0, n_pages - POOL.pool_pages)))
        out = []
        for position, token in enumerate(piece.tokens, piece.start):
            row = mix(token, position)
            resident = [p for p in range(position + 1) if p // PAGE_TOKENS not in entries_out]
            for stage in range(self.model.n_stages):
                values, states = self.values[stage], self.states[stage]
                values[position:] = [mix(row, position, stage)]
                states[position + 1 :] = [mix(states[position], row)]
                parts = [row, sum(values[p] for p in resident)]
                if self.model.window is not None:
                    parts.append(sum(values[max(0, position - self.model.window + 1) :]))
                if KvGroup.RECURRENT in self.model.kv_groups:
                    parts.append(states[-1])
                row = mix(*parts)
            out.append(row)
        return out


def check_tokens(toy: ToyEngine, *, swapped: bool = False) -> int:
    """Every token of the steps is the one the masked model draws; drafts end with their page.  ``swapped``: pages come
    back; return how many did.
    """
    texts: dict[int, Masked] = {}
    out: dict[int, set[int]] = {}
    n_back = 0
    sampling: dict[int, SamplingParams] = {}
    drawn: dict[int, int] = {}
    for result in toy.steps:
        for operation in result.step.operations:
            if hasattr(operation, "sampling"):
                texts[operation.sequence], sampling[operation.sequence] = Masked(toy.model), operation.sampling
                out[operation.sequence] = set()
            if isinstance(operation, PageOut):
                out[operation.sequence].update(operation.entries)
            if isinstance(operation, PageIn):
                out[operation.sequence].difference_update(operation.entries)
                n_back += len(operation.entries)
        found = list(result.results[-1].sampled)
        for planned in result.step.slices:
            ahead = planned.tokens == [PENDING]
            piece = replace(planned, tokens=[drawn[planned.sequence]]) if ahead else planned
            here = out[piece.sequence] if swapped else None
            rows, stop = texts[piece.sequence].rows(piece, here), piece.start + len(piece.tokens)
            assert pages_of(stop) - len(out[piece.sequence]) <= POOL.pool_pages
            assert not out[piece.sequence] & {0, *range(piece.start // PAGE_TOKENS - 1, pages_of(stop))}
            if pages_of(stop) > POOL.pool_pages:
                assert pages_of(stop) == pages_of(piece.start + piece.n_context)
            for at in range(piece.n_context, len(piece.tokens) + 1) if piece.sample else ():
                token = draw(rows[at - 1], sampling[piece.sequence], piece.start + at, 0)
                assert found.pop(0).token == token
                drawn[piece.sequence] = token
                if at == len(piece.tokens) or piece.tokens[at] != token:
                    break
        assert not found
    return n_back


@st.composite
def requests(draw_: st.DrawFn) -> list[GenerationRequest]:
    found = []
    for i in range(draw_(st.integers(1, 4))):
        n_prompt, period = draw_(st.sampled_from([5, 63, 300, 385, 500])), draw_(st.integers(2, 40))
        prompt = [k % period for k in range(n_prompt)]
        found.append(request(f"r{i}", prompt, draw_(st.sampled_from([1, 20, 90]))))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([PLAIN, SLIDING, HYBRID]),
    st.integers(1, 2),
    st.sampled_from([6, 9, 18]),
    st.sampled_from([(POOL, 0), (EXACT, 4), (EXACT, 9), (EXACT, 30), (RANKED, 60)]),
    st.sampled_from([0, 3]),
    requests(),
    st.lists(st.tuples(st.sampled_from(["work", "cancel"]), st.integers(0, 40)), max_size=8),
)
def test_tokens_are_those_of_the_pages_that_the_policy_attends_to(
    kv_groups, n_stages, full_pages, policy, drafts, wanted, actions
) -> None:
    """The resident ones; under ``exact`` all of the context; ranked ones after they came back."""
    residency, host_pages = policy
    bound = bounds(kv_groups, full_pages=full_pages, host_pages=host_pages, drafts=drafts, residency=residency)
    toy = attached(bound, n_stages=n_stages)
    handles = {}
    for one in wanted:
        if residency is EXACT and len(one.prompt) + 1 > (6 + host_pages) * PAGE_TOKENS:
            with pytest.raises(ContextOverflow, match=r"kvflash\.host"):
                toy.engine.submit(one)
        else:
            handles[one.request_id] = toy.engine.submit(one)
    for kind, n in actions:
        if kind == "cancel" and handles:
            [*handles.values()][n % len(handles)].cancel()
        for i in range(n):
            toy.work(i)
    toy.run()
    if residency is not EXACT:
        event(f"pages came back: {check_tokens(toy, swapped=residency is RANKED) > 0}")
    for one in wanted if residency is EXACT else ():
        if (handle := handles.get(one.request_id)) is not None:
            tokens, finished = told(asyncio.run(events_of(handle)))
            assert tokens == toy.alone(one)[: len(tokens)]
            assert finished.reason != "length" or tokens == toy.alone(one)
            assert finished.error is None or finished.error.code == "host_memory_full"
            event(finished.reason)
    now = toy.engine.statistics()
    assert now.pages["full"].used == now.host_pages.used == 0


def test_a_request_whose_pages_find_no_host_memory_ends_and_others_go_on() -> None:
    toy = attached(bounds(host_pages=5))
    asked = [request(name, [ord(name) % 97] * 500, 300) for name in "ab"]
    handles = [toy.engine.submit(one) for one in asked]
    toy.run()
    (tokens, first), (others, second) = (told(asyncio.run(events_of(handle))) for handle in handles)
    assert {first.reason, second.reason} == {"length", "error"}
    failed = first if first.error is not None else second
    assert failed.error is not None
    assert failed.error.code == "host_memory_full"
    assert "kvflash.host" in failed.error.message
    assert tokens == toy.alone(asked[0])[: len(tokens)]
    assert others == toy.alone(asked[1])[: len(others)]


def test_pages_in_host_memory_are_counted() -> None:
    toy = attached(bounds(host_pages=20))
    toy.engine.submit(request("a", [1] * 600, 100))
    while toy.engine.statistics().generated_tokens < 3:
        toy.work(0)
    now = toy.engine.statistics()
    assert now.pages_out == now.host_pages.used == pages_of(603) - POOL.pool_pages
    assert now.host_pages.total == 20


async def test_slots_hold_whole_prefixes_only() -> None:
    toy = attached(bounds(slots=8, full_pages=30))
    short, long = [k * k % 97 for k in range(200)], [(k * k + 1) % 97 for k in range(700)]
    for name, prompt in (("a", short), ("b", long), ("c", short), ("d", long)):
        handle = toy.engine.submit(request(name, prompt, 3))
        toy.run()
        finished = (await events_of(handle))[-1]
        assert isinstance(finished, FinishedEvent)
        assert bool(finished.usage.cached_tokens) == (name == "c")
    assert all(slot.n_tokens <= POOL.pool_pages * PAGE_TOKENS for slot in toy.engine.prefixes.slots)


async def test_a_file_that_would_be_paged_out_is_not_restored() -> None:
    """What it predicts next was computed from all of its pages."""
    toy = attached(bounds(slots=8, full_pages=30))
    assert await toy.engine.slots.reserve(384) is None
    reservation = await toy.engine.slots.reserve(383)
    assert reservation is not None
    toy.engine.slots.cancel_reservation(reservation)


@pytest.mark.parametrize("error", [ScoringError("the scoring model is unavailable"), ValueError("a bug")], ids=repr)
async def test_a_small_model_ranks_the_pages_of_prompts(error: Exception) -> None:
    """Before the last token; a sequence waits for it, others do not, and where the model is away pages stay."""
    small = Residency(6, "drafter")
    asked = [request(name, [(k * k) % 89 for k in range(n)], 90) for name, n in (("a", 560), ("b", 100), ("c", 500))]
    toy = attached(bounds(full_pages=18, host_pages=60, residency=small))
    seen: list[int] = []
    released = asyncio.Event()

    async def score(tokens: Sequence[int]) -> list[float]:
        seen.append(len(tokens))
        await released.wait()
        if len(tokens) == 499:
            raise error
        return [float(i == 2) for i in range(len(tokens) // PAGE_TOKENS)]

    toy.engine.relevance.score = score
    handles = [toy.engine.submit(one) for one in asked]
    await toy.play()
    assert sorted(seen) == [499, 559]
    assert told(await events_of(handles[1]))[1].reason == "length"
    assert toy.engine.statistics().generated_tokens == 90
    released.set()
    for _ in range(5):
        await asyncio.sleep(0)
    await toy.play()
    for handle in (handles[0], handles[2]):
        assert told(await events_of(handle))[1].reason == "length"
    assert check_tokens(toy, swapped=True) == 1  # the other prompt's pages stayed as they were


def test_neighbours_of_a_page_that_matters_stay_with_it() -> None:
    assert with_neighbours([0.0, 0.1, 0.8, 0.0, 0.3]) == [0.05, 0.4, 0.8, 0.4, 0.3]
    assert with_neighbours([]) == []
    assert remembered([1.0, 0.1], [0.2, 0.3, 0.4]) == [0.8, 0.3, 0.4]
    assert remembered([1.0, 0.1], []) == [1.0, 0.1]
    out, back = Residency(8, "qk").swap(
        [0, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4], with_neighbours([0.1] * 2 + [0.9] + [0.1] * 7)
    )
    assert (out, back) == ([5, 6, 7], [1, 2, 3])


# ---- prefix slots with pages in host memory


KV_GROUPS = [PLAIN, SLIDING, HYBRID]


async def talk(toy: ToyEngine, name: str, prompt: Sequence[int], n: int, **more: object) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    handle = toy.engine.submit(request(name, prompt, n, **more))
    toy.run()
    tokens, finished = told(await events_of(handle))
    assert finished.reason == "length"
    return tokens, finished.usage.cached_tokens


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(KV_GROUPS),
    st.integers(1, 2),
    st.sampled_from([12, 14, 30]),
    st.sampled_from([14, 40]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(1, 70)), min_size=2, max_size=7),
)
def test_exact_goes_on_from_any_slot(kv_groups, n_stages, full_pages, host_pages, turns) -> None:
    bound = bounds(kv_groups, full_pages=full_pages, host_pages=host_pages, slots=6)
    toy = attached(bound, n_stages=n_stages)
    texts = [[(i * k) % 89 for k in range(330)] for i in range(3)]
    for turn, (who, n_more, n_answer) in enumerate(turns):
        text = texts[who]
        if len(text) + n_more + n_answer > 880:
            continue
        text += [(7 * i + who) % 97 for i in range(n_more)]
        tokens, n_cached = asyncio.run(talk(toy, str(turn), text, n_answer))
        assert tokens == toy.alone(request(str(turn), text, n_answer))
        event(f"cached beyond the pool: {n_cached > 6 * 64}")
        text += tokens
    held = toy.engine.statistics().host_pages.used
    toy.engine.prefixes.clear()
    event(f"slots in host memory: {held > 0}")
    assert toy.engine.statistics().host_pages.used == 0
