"""Rows of a draft stage that are prepared before it is known which drafts are right: the same drafts, with less to do
once that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from daemons.draft.prepared import PreparedRows, preparing
from daemons.draft.stage import DraftStage
from daemons.errors import StateError
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Space
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import (
    PENDING,
    CopyPage,
    Drafted,
    DraftStep,
    OpenSequence,
    Sampling,
    SetPages,
    Slice,
    Step,
    UseState,
)
from tests.drafters.drafted import load_draft
from tests.model.drafter_files import DFLASH2, MTP, TARGET, UPSTREAM

START, N_DRAFTS, N_AHEAD = 60, 3, 5  # the drafts lie on two pages
RIGHT = [11, 12, 13]
STATES = [0, 9, 8, 7]


@cache
def target() -> ModelSpec:
    return open_spec(TARGET)


def verifying(tokens: list[int], **more: Any) -> Step:
    """A step that verifies drafts behind token 10."""
    piece = Slice(
        0, START, [10, *tokens], sample=True, n_drafts=N_DRAFTS, states=STATES, num_draft_tokens=N_AHEAD, **more
    )
    return Step(2, 0, [UseState(0, 0)], [piece])


ASKED = verifying([PENDING] * N_DRAFTS)
"""As it is known before its drafts are."""


class Driven:
    """A stage with a sequence of 60 tokens, and the layouts that it makes."""

    def __init__(self, path: Any = DFLASH2) -> None:
        self.stage = load_draft(target(), path)
        self.n_made = 0
        for name in ("_context_of", "_drafts_of"):
            setattr(self.stage._prepared, name, self._counted(getattr(self.stage._prepared, name)))
        self.stage.apply([OpenSequence(0, 0, Sampling()), SetPages(0, Space.FULL, 0, [5, 3])])
        self.width = sum(len(source.layers) for source in self.stage.plan.sources) * 64
        first = Slice(0, 0, list(range(START)), sample=True, num_draft_tokens=N_DRAFTS)
        self.stage.run(Step(1, 0, [], [first]), [self.rows(START, 1)], [[10]])

    def _counted(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            self.n_made += 1
            return made(*arguments)

        return work

    def rows(self, n: int, seed: int) -> torch.Tensor:
        return torch.randn(n, self.width, generator=torch.Generator().manual_seed(seed))

    def verify(self, n_right: int, **more: Any) -> Drafted:
        """Verify drafts of which so many are right."""
        step = verifying(RIGHT, **more)
        self.stage.apply(step.operations)
        [drafted] = self.stage.run(step, [self.rows(1 + N_DRAFTS, 2)], [[*RIGHT[:n_right], 77]])
        return drafted

    def next(self, n_right: int) -> list[Drafted]:
        """Decode a token behind those, and draft two."""
        self.stage.apply([UseState(0, STATES[n_right])])
        piece = Slice(0, START + 1 + n_right, [77], sample=True, num_draft_tokens=2)
        return self.stage.run(Step(3, 0, [], [piece]), [self.rows(1, 3)], [[4]])


@pytest.fixture
def no_layouts(monkeypatch: pytest.MonkeyPatch) -> Callable[[DraftStage], None]:
    """Makes a stage fail when it arranges rows itself."""

    def forbid(stage: DraftStage) -> None:
        for name in ("_layout", "draft_layout"):
            monkeypatch.setattr(stage, name, lambda *_: pytest.fail("it was not prepared"))

    return forbid


@pytest.mark.parametrize("n_right", range(N_DRAFTS + 1))
@pytest.mark.parametrize("path", [UPSTREAM, DFLASH2], ids=["dflash", "dflash2"])
def test_drafts_are_the_same(path: Any, n_right: int, no_layouts: Callable[[DraftStage], None]) -> None:
    wanted, driven = Driven(path), Driven(path)
    driven.stage.prepare(ASKED, lambda: True)
    no_layouts(driven.stage)
    assert driven.verify(n_right) == wanted.verify(n_right)


def test_it_ends_when_the_rows_come() -> None:
    wanted, driven = Driven(), Driven()
    left = iter([True, True, False])
    driven.stage.prepare(ASKED, lambda: next(left))
    assert driven.n_made == 3  # the context, and behind no draft or one that is right
    assert driven.verify(3) == wanted.verify(3)  # behind three it is arranged now


def test_moved_pages_are_forgotten() -> None:
    """The sequence goes on with other pages, which have the same bytes."""
    wanted, driven = Driven(), Driven()
    driven.stage.prepare(ASKED, lambda: True)
    copies = [CopyPage(Space.FULL, 5, 6, 64), CopyPage(Space.FULL, 3, 4, 64)]
    driven.stage.apply([*copies, SetPages(0, Space.FULL, 0, [6, 4])])
    assert driven.verify(2) == wanted.verify(2)
    assert driven.next(2) == wanted.next(2)


@pytest.mark.parametrize(
    "step",
    [
        Step(2, 0, [SetPages(0, Space.FULL, 2, [1])], ASKED.slices),
        Step(2, 0, [], [*ASKED.slices, Slice(1, 0, [3], sample=True, num_draft_tokens=2)]),
        Step(2, 0, [], []),
        Step(2, 0, [], [Slice(0, START, [10], sample=True, num_draft_tokens=2)]),
        Step(2, 0, [], [Slice(0, START, [10, PENDING], True, 1, STATES[:2])]),
    ],
    ids=["pages", "two sequences", "nothing", "no drafts to verify", "none asked for"],
)
def test_only_lone_verify_slices_with_their_pages_are_prepared(step: Step) -> None:
    driven = Driven()
    driven.stage.prepare(step, lambda: True)
    assert driven.n_made == 0


def test_other_rows_than_those_that_follow_are_not_used() -> None:
    """Of another step, behind another position, and with other bounds."""
    wanted, driven = Driven(), Driven()
    driven.stage.prepare(verifying([PENDING] * N_DRAFTS, draft_from=5), lambda: True)
    assert driven.verify(1) == wanted.verify(1)
    elsewhere = Slice(0, 70, [1, PENDING], True, 1, STATES[:2], num_draft_tokens=N_AHEAD)
    driven.stage.prepare(Step(3, 0, [], [elsewhere]), lambda: True)
    assert driven.next(1) == wanted.next(1)


def test_a_head_with_states_of_its_own_prepares_nothing() -> None:
    stage = load_draft(open_spec(MTP), MTP, DraftKind.MTP)
    stage.apply([OpenSequence(0, 0, Sampling()), SetPages(0, Space.FULL, 0, [5, 3])])
    stage.prepare(ASKED, lambda: pytest.fail("it was asked"))


def test_missing_pages_are_left_to_who_asks() -> None:
    def refuse(_: object) -> Any:
        raise StateError("slice", "it has no page")

    rows = PreparedRows(refuse, refuse)
    rows.prepare(ASKED, lambda: True)
    assert rows.context(ASKED.slices) is None


def test_rows_are_prepared_before_they_are_waited_for() -> None:
    done: list[str] = []
    message = DraftStep(ASKED)

    def prepare(step: Step, goes_on: Callable[[], bool]) -> None:
        assert step is ASKED
        done.append(f"prepared, {goes_on()}")

    def wait(*, rung: bool, asked: DraftStep | None) -> list[str]:
        done.clear()
        preparing(prepare, lambda: asked, lambda: rung, lambda: done.append("waited"))()
        return [*done]

    assert wait(rung=False, asked=message) == ["prepared, True", "waited"]
    assert wait(rung=True, asked=message) == ["waited"]
    assert wait(rung=False, asked=None) == ["waited"]
