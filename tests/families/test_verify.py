"""Verify slices of every family: whatever is drafted, tokens and logits are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle

import pytest

from lucevisor.model.values import KvGroup
from tests.families.golden import Golden, each_kind, opened
from tests.families.pipeline import DRAFT_STATES, STATES, Pipeline, load_stages

ACCEPTED = [(4, 4), (7, 3), (1, 0), (15, 9), (2, 2), (3, 0), (1, 1)]
"""Drafts of a slice, and how many of them are right."""


def split_pipeline(golden: Golden) -> Pipeline:
    """The model over three stages, or as many as it can be split into."""
    return golden.pipeline(load_stages(golden.spec, golden.layer_splits()[:2]))


def wrong(golden: Golden, token: int) -> int:
    return (token + 1) % golden.spec.vocabulary


def check_forced(golden: Golden, c: Pipeline, sequences: list[int], n_prompt: int) -> None:
    """Verify slices over the golden text: the rows up to the last right draft are the golden ones."""
    ids, plans = golden.ids, {s: cycle(ACCEPTED[s:] + ACCEPTED[:s]) for s in sequences}
    for s in sequences:
        c.open(s)
    c.run(*((s, ids[:n_prompt]) for s in sequences))
    while any(c.texts[s].length < len(ids) for s in sequences):
        parts, plan = [], {}
        for s in sequences:
            at = c.texts[s].length
            n, right = (min(x, len(ids) - at - 1) for x in next(plans[s]))
            if n < 0:
                continue
            drafts = ids[at + 1 : at + 1 + right] + [wrong(golden, t) for t in ids[at + 1 + right : at + 1 + n]]
            parts.append((s, [ids[at], *drafts], n))
            plan[s] = (at, n, right)
        rows, first = c.verify(*parts), 0
        for s, (at, n, right) in plan.items():
            kept = slice(at, at + right + 1)
            golden.bounds.assert_logits(rows[first : first + right + 1], golden.logits, kept)
            first += n + 1
            c.accept(s, n, right)


@each_kind
def test_rows_up_to_the_last_right_draft_are_those_of_the_text(golden: Golden) -> None:
    check_forced(golden, split_pipeline(golden), [0], 30)


def drafter(golden: Golden) -> Callable[[list[int]], list[int]]:
    """Drafts that are right, wrong, or right at first, in turn."""
    turn = count()

    def draft(out: list[int]) -> list[int]:
        right = golden.greedy[len(out) : len(out) + 5]
        n_right = (5, 0, 2, 1, 4)[next(turn) % 5]
        return right[:n_right] + [wrong(golden, t) for t in right[n_right:]]

    return draft


@each_kind
def test_tokens_are_the_greedy_ones_whatever_is_drafted(golden: Golden) -> None:
    c = split_pipeline(golden)
    c.open(0)
    golden.assert_tokens(c.speculate(0, golden.prompt, 32, drafter(golden)))
    if KvGroup.RECURRENT in golden.spec.kv_groups():
        c.close(0)
        assert sorted(c.free_states) == list(range(STATES))
        assert sorted(c.free_draft_states) == list(range(STATES, STATES + DRAFT_STATES))


@pytest.mark.parametrize("name", ["qwen35"])
def test_the_states_kept_are_those_of_single_steps(name: str) -> None:
    """Continuing from each state of one verify slice gives the golden rows."""
    golden, n = opened(name), 12
    for accepted in range(n):
        c = golden.pipeline()
        c.open(0)
        c.run((0, golden.ids[:40]))
        c.verify((0, golden.ids[40 : 41 + n], n))
        c.accept(0, n, accepted)
        rows = c.run((0, golden.ids[41 + accepted :]))
        golden.bounds.assert_logits(rows, golden.logits, slice(41 + accepted, None))
