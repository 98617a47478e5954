"""Steps without the rows of rejected drafts."""

from __future__ import annotations

import torch

from daemons.draft.jobs import without_rejected
from lucevisor.protocol.steps import Slice, Step


def verify(sequence: int, n_context: int, n_drafts: int) -> Slice:
    tokens = list(range(10 * sequence, 10 * sequence + n_context + n_drafts))
    return Slice(sequence, 4, tokens, True, n_drafts, [100 + i for i in range(n_drafts + 1)], num_draft_tokens=3)


def cut(slices: list[Slice], tokens: list[list[int]]) -> tuple[list[Slice], list[float]]:
    rows = torch.arange(sum(len(s.tokens) for s in slices), dtype=torch.float32)[:, None].expand(-1, 2)
    step, features = without_rejected(Step(1, 0, [], slices), rows, tokens)
    return step.slices, features[:, 0].tolist()


def test_rows_behind_the_accepted_drafts_are_left_out() -> None:
    [found], rows = cut([verify(0, 1, 4)], [[0, 1, 9]])  # two accepted, and a token that is in no slice yet
    assert (found.tokens, found.n_drafts, found.states, rows) == ([0, 1, 2], 2, [100, 101, 102], [0, 1, 2])
    assert (found.n_context, found.num_draft_tokens) == (1, 3)


def test_states_are_those_of_drafts_where_a_slice_begins_with_several_tokens() -> None:
    [found], rows = cut([verify(0, 3, 2)], [[9]])
    assert (found.tokens, found.n_drafts, found.states, rows) == ([0, 1, 2], 0, [100], [0, 1, 2])


def test_slices_stay_equally_long() -> None:
    found, rows = cut([verify(0, 1, 4), verify(1, 1, 4)], [[5], [10, 11, 9]])
    assert [s.tokens for s in found] == [[0, 1, 2], [10, 11, 12]]
    assert rows == [0, 1, 2, 5, 6, 7]


def test_other_steps_stay_as_they_are() -> None:
    for slices, tokens in (
        ([verify(0, 1, 4)], [[0, 1, 2, 3, 9]]),  # all accepted
        ([verify(0, 1, 4), verify(1, 1, 3)], [[1], [1]]),  # unequal
        ([Slice(0, 4, [1, 2, 3], False)], [[]]),  # a prompt
        ([Slice(0, 4, [1], True)], [[7]]),
        ([verify(0, 1, 4)], []),  # refused later
    ):
        found, rows = cut(slices, tokens)
        assert (found, len(rows)) == (slices, sum(len(s.tokens) for s in slices))
