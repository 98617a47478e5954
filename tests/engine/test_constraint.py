"""Constrained requests over toy daemons: masks go with their steps, a constraint that fails ends its request only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.constraint import (
    MAX_MASK_BYTES,
    MadeMasks,
    MaskJob,
    MaskMaker,
    MinTokens,
    make_masks,
    within_masks,
)
from lucevisor.engine.request import FinishedEvent, TokenEvent
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import ToyEngine, attached, events_of, limits, request, told
from tests.engine.toy_pipeline import VOCABULARY, ToyConstraint


def toy(n_stages: int = 2) -> ToyEngine:
    return attached(limits(max_sequences=8, pools=PoolSizes(40, 0, 8), max_step_tokens=200), n_stages=n_stages)


@pytest.mark.parametrize("least", [0, 1, 4, 9])
async def test_nothing_ends_an_output_before_its_least_tokens(least: int) -> None:
    """The toy model draws any token: of 20 outputs most would end sooner."""
    engine, ends = toy(), frozenset(range(0, VOCABULARY, 3))
    requests = [
        replace(
            request(f"r{i}", range(i, 70), n=30),
            stop_ids=ends,
            constraint=MinTokens(least, ends, VOCABULARY, ToyConstraint(i) if i % 2 else None),
        )
        for i in range(20)
    ]
    handles = [engine.engine.submit(one) for one in requests]
    engine.run()
    lengths = [len(told(await events_of(handle))[0]) for handle in handles]
    assert least <= min(lengths) < 30


def test_a_constraint_that_allows_the_end_alone_has_its_way() -> None:
    class Over(ToyConstraint):
        def allowed(self, output: Sequence[int]) -> list[int]:
            return [2]

    one = MinTokens(5, [2], VOCABULARY, Over(1))
    assert one.masks(0, [], [2]) == Over(1).masks(0, [], [2])


@pytest.mark.parametrize(("least", "valid"), [(0, 3), (2, 3), (3, 2), (9, 2)])
def test_drafts_that_end_too_early_are_no_drafts(least: int, valid: int) -> None:
    one = MinTokens(least, [5], VOCABULARY)
    assert one.n_valid(0, [], [1, 2, 5]) == valid
    rows = one.masks(0, [], [1, 2, 5])
    allowed = [rows[i * one.row_bytes] >> 5 & 1 for i in range(4)]
    assert allowed == [i >= least for i in range(4)]


async def test_a_constraint_that_fails_ends_its_request_with_the_reason() -> None:
    engine = toy()
    failing = engine.engine.submit(request("a", n=20, constraint=ToyConstraint(1, fails_at=5)))
    others = [request("b", n=20, constraint=ToyConstraint(2)), request("c", n=20)]
    handles = [engine.engine.submit(one) for one in others]
    engine.run()
    *tokens, finished = await events_of(failing)
    assert len([event for event in tokens if isinstance(event, TokenEvent)]) == 5
    assert isinstance(finished, FinishedEvent)
    assert finished.error is not None
    assert finished.error.code == "constraint_failed"
    assert "too much work" in finished.error.message
    for one, handle in zip(others, handles, strict=True):
        assert told(await events_of(handle))[0] == engine.alone(one)
    assert not engine.failures
    assert all(use.used == use.evictable for use in engine.engine.statistics().pages.values())


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=1, max_size=400))
def test_masks_of_a_step_are_bounded_by_shorter_drafts(slices: list[tuple[int, bool]]) -> None:
    class Wide(ToyConstraint):
        row_bytes = 31_040

    constraints = [Wide(0) if masked else None for _, masked in slices]
    widths = [width for width, _ in slices]
    cut = within_masks(widths, constraints)
    n_masked = sum(one is not None for one in constraints)
    n_rows = sum(1 + n for n, one in zip(cut, constraints, strict=True) if one is not None)
    assert 31_040 * n_rows <= MAX_MASK_BYTES or all(
        n == 0 for n, one in zip(cut, constraints, strict=True) if one is not None
    )
    assert all(a == b for a, b, one in zip(cut, widths, constraints, strict=True) if one is None)
    if 31_040 * (n_masked + sum(widths)) <= MAX_MASK_BYTES:
        assert cut == widths


class _Recorded:
    """What becomes of masks."""

    def __init__(self) -> None:
        self.made: list[MadeMasks] = []
        self.failed: list[str] = []
        self.came = asyncio.Event()

    def on_made(self, _step_id: int, made: MadeMasks) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.made.append(made)
        self.came.set()

    def on_failed(self, _step_id: int, why: str) -> None:
        self.failed.append(why)
        self.came.set()


def jobs_of(constraints: Sequence[ToyConstraint]) -> list[MaskJob]:
    return [MaskJob(f"r{i}", one, 0, [], [3] * (i % 3)) for i, one in enumerate(constraints)]


async def test_threads_make_the_same_masks_in_the_order_of_the_slices() -> None:
    recorded = _Recorded()
    maker = MaskMaker(recorded.on_made, recorded.on_failed)
    constraints = [ToyConstraint(i, fails_at=0 if i == 7 else -1) for i in range(23)]
    maker.make_masks(5, jobs_of(constraints))
    await asyncio.wait_for(recorded.came.wait(), 100)
    expected = make_masks(5, jobs_of([ToyConstraint(i, fails_at=0 if i == 7 else -1) for i in range(23)]))
    assert recorded.made == [expected]
    assert [name for name, _ in expected.failures] == ["r7"]
    assert set(expected.payload[7]) == {0xFF}
    maker.close()


@pytest.mark.parametrize("threaded", [True, False])
async def test_masks_that_cannot_be_made_are_reported_at_once(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> MadeMasks:
        raise MemoryError("no room")

    monkeypatch.setattr("lucevisor.engine.constraint.make_masks", no_room)
    recorded = _Recorded()
    maker = MaskMaker(recorded.on_made, recorded.on_failed, threaded=threaded)
    maker.make_masks(5, jobs_of([ToyConstraint(0)]))
    await asyncio.wait_for(recorded.came.wait(), 100)
    assert recorded.failed == ["the masks of step 5 cannot be made: MemoryError: no room"]
    maker.close()


@pytest.mark.usefixtures("no_thread_begins")
async def test_where_no_thread_begins_masks_are_made_on_the_event_loop() -> None:
    recorded = _Recorded()
    maker = MaskMaker(recorded.on_made, recorded.on_failed)
    maker.make_masks(5, jobs_of([ToyConstraint(0)]))
    assert recorded.made == [make_masks(5, jobs_of([ToyConstraint(0)]))]
    maker.close()
