"""Rows of plain decodes wait, and are in the drafter's context before anything reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from daemons.draft.deferred import MAX_ROWS
from daemons.draft.stage import DraftStage
from daemons.worker import _MessageLoop
from lucevisor.model.values import Space
from lucevisor.protocol.messages import Save, SlotPlace
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    OpenSequence,
    SamplingParams,
    SetPages,
    Slice,
)
from tests.drafters.test_stage import KINDS, Driver, Text, alone, assert_same, load, load_again


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest) -> DraftStage:
    return load(request.param)


def counted(stage: DraftStage) -> list[int]:
    """The rows of each extension of the context from now on."""
    seen: list[int] = []
    extend = stage.drafter.extend

    def spy(captures: torch.Tensor | None, batch: object) -> torch.Tensor:
        assert captures is not None
        seen.append(len(captures))
        return extend(captures, batch)  # type: ignore[arg-type]

    stage.drafter.extend = spy  # type: ignore[method-assign]
    return seen


def test_plain_decodes_are_added_together_and_draft_the_same(stage: DraftStage) -> None:
    """Two texts that decode 40 tokens each, the second from later on; then both draft."""
    driver = Driver(stage)
    texts = [driver.open(s, s, seed=s) for s in range(2)]
    driver.step((texts[0], 50, 0), (texts[1], 30, 0))
    rows = counted(stage)
    for i in range(70):
        driver.step(*((text, 1, 0) for text in texts[: 1 + (i >= 5)]))
    assert rows == [2 * MAX_ROWS - 5]  # 5 of the first text alone, then of each, until the first has too many
    found = driver.step((texts[0], 1, 4), (texts[1], 1, 4))
    assert rows[1:] == [12, 2]
    again = load_again(stage)
    for drafted, (seed, n) in zip(found, ((0, 121), (1, 96)), strict=True):
        assert_same(drafted, alone(again, seed, n, 4))


def test_deferred_rows_are_computed_before_a_prefix_is_taken_from_them(stage: DraftStage) -> None:
    driver = Driver(stage)
    first = driver.open(0, 0, seed=1)
    driver.step((first, 97, 0))
    for _ in range(3):
        driver.step((first, 1, 0))
    own = driver.free.pop()
    stage.apply([CopyState(0, 5), OpenSequence(1, 6, SamplingParams()), CopyState(5, 6)])
    stage.apply([CopyPage(Space.FULL, first.pages[1], own, 36), SetPages(1, Space.FULL, 0, [first.pages[0], own])])
    second = Text(1, 6, first.ids, first.captures, 100, [first.pages[0], own])
    [found] = driver.step((second, 20, 5))
    assert_same(found, alone(load_again(stage), 1, 120, 5))


def test_deferred_rows_of_a_closed_sequence_do_not_go_into_pages_of_another(stage: DraftStage) -> None:
    driver = Driver(stage)
    first, second = driver.open(0, 0, seed=1), driver.open(1, 1, seed=2)
    driver.step((first, 30, 0))
    for _ in range(5):
        driver.step((first, 1, 0))
    stage.apply([CloseSequence(0), SetPages(1, Space.FULL, 0, first.pages)])
    second.pages = first.pages
    driver.step((second, 40, 0))
    [found] = driver.step((second, 1, 5))
    assert_same(found, alone(load_again(stage), 2, 41, 5))


def decode(sequence: int, start: int, **more: object) -> Slice:
    return Slice(sequence, start, [7], True, **more)  # type: ignore[arg-type]


def test_a_daemon_adds_them_before_it_saves_a_slot() -> None:
    done: list[str] = []
    loop = _MessageLoop(None, None, None)  # type: ignore[arg-type]
    loop._runtime = SimpleNamespace(flush=lambda: done.append("flush"))  # type: ignore[assignment]
    loop._transfers = SimpleNamespace(submit=lambda order: done.append("save"))  # type: ignore[assignment]
    order = Save(1, "file", SlotPlace(64, [0], [], 0, -1), [])
    assert loop._handle(SimpleNamespace(message=order, fds=())) is None  # type: ignore[arg-type]
    assert done == ["flush", "save"]
