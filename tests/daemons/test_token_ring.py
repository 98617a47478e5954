"""Tokens on their way from the output stage to the first one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from daemons.errors import StateError
from daemons.token_ring import FollowingStep, TokenRing, without_tokens
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.doorbell import Doorbells
from lucevisor.protocol.loading import ArenaPlan, token_region_bytes
from lucevisor.protocol.steps import PENDING, Sampled, Slice, Step

N_REGIONS = 4


@pytest.fixture
def ends() -> Iterator[tuple[TokenRing, TokenRing]]:
    plan = ArenaPlan(1, token_region_bytes(3), N_REGIONS, tokens=True)
    last = Arena.create(plan)
    first = Arena.attach(os.dup(last.fd), plan, os.dup(last.bells.wake_fd))
    yield TokenRing(last), TokenRing(first)
    first.close()
    last.close()


def rung(bells: Doorbells, region: int, step_id: int) -> float:
    assert bells.rung(region, step_id)
    return 0.25


def decode(step_id: int, *sequences: int) -> Step:
    return Step(step_id, step_id % N_REGIONS, [], [Slice(s, 40, [7], sample=True) for s in sequences])


def following(step_id: int, follows: int, *sequences: int) -> Step:
    slices = [Slice(s, 41, [PENDING], sample=True) for s in sequences]
    return Step(step_id, step_id % N_REGIONS, [], slices, follows=follows)


def test_a_step_starts_from_the_tokens_of_the_step_it_follows(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    last.tell(decode(5, 9, 2, 4), [Sampled(9, 100), Sampled(2, 101), Sampled(4, 102)])
    last.tell(decode(6, 1), [Sampled(1, 55)])
    one = FollowingStep(first, following(8, 5, 4, 9), rung)
    metadata = torch.full((6,), -7)
    one(metadata)
    one(metadata)  # a graph is captured, then replayed
    assert metadata.tolist() == [102, 100, -7, -7, -7, -7]
    assert one.tokens == [Sampled(4, 102), Sampled(9, 100)]
    assert one.arrival.hop_s == 0.25
    all_of_them = FollowingStep(first, following(8, 5, 9, 2, 4), rung)
    all_of_them(metadata)
    assert metadata.tolist() == [100, 101, 102, -7, -7, -7]
    assert all_of_them.tokens == [Sampled(9, 100), Sampled(2, 101), Sampled(4, 102)]


def test_the_newest_of_several_tokens_of_a_sequence_counts(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    last.tell(decode(5, 9), [Sampled(9, 100), Sampled(9, 101)])
    assert first.read(5) == ([9], [101])


def test_what_nobody_sampled_is_refused(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    last.tell(decode(5, 9), [Sampled(9, 100)])
    with pytest.raises(StateError, match="sampled no token of the sequences"):
        FollowingStep(first, following(6, 5, 9, 2), rung)(torch.zeros(2))
    with pytest.raises(StateError, match="was not posted"):
        FollowingStep(first, following(6, 5, 9), None)


def test_other_stages_need_no_tokens() -> None:
    assert [s.tokens for s in without_tokens(following(6, 5, 9, 2)).slices] == [[0], [0]]
