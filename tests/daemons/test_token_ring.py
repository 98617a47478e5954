"""Tokens on their way from the output stage to the first one."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator

import pytest
import torch

from daemons.errors import StateError
from daemons.token_ring import RunAheadStep, TokenRing
from lucevisor.protocol.arena import Arena, SharedBuffer
from lucevisor.protocol.loading import ArenaPlan, token_region_bytes
from lucevisor.protocol.steps import (
    PENDING,
    Drafted,
    Sampled,
    Slice,
    Step,
    StepResult,
)

N_REGIONS = 4
VOCABULARY = 200


@pytest.fixture
def arena() -> Iterator[Arena]:
    last = Arena.create(ArenaPlan(1, token_region_bytes(3, 4), N_REGIONS, tokens=True))
    yield last
    last.close()


@pytest.fixture
def ends(arena: Arena) -> Iterator[tuple[TokenRing, TokenRing]]:
    first = Arena.attach(os.dup(arena.fd), arena.plan, os.dup(arena.wake_fd))
    yield TokenRing(arena, VOCABULARY), TokenRing(first, VOCABULARY)
    first.close()


def rung(tokens: SharedBuffer, region: int, step_id: int, posted: bool) -> float:
    assert tokens.rung(region, step_id)
    return 0.25


def decode(step_id: int, *sequences: int) -> Step:
    return Step(step_id, step_id % N_REGIONS, [], [Slice(s, 40, [7], sample=True) for s in sequences])


def publish(end: TokenRing, step: Step, *sampled: Sampled) -> None:
    end.publish(step, StepResult(step.step_id, 1, [*sampled]))


def following(step_id: int, depends_on_step: int, *sequences: int) -> Step:
    slices = [Slice(s, 41, [PENDING], sample=True) for s in sequences]
    return Step(step_id, step_id % N_REGIONS, [], slices, depends_on_step=depends_on_step)


def test_a_step_starts_from_the_tokens_of_the_step_it_follows(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    publish(last, decode(5, 9, 2, 4), Sampled(9, 100), Sampled(2, 101), Sampled(4, 102))
    publish(last, decode(6, 1), Sampled(1, 55))
    one = RunAheadStep(first, following(8, 5, 4, 9), rung)
    metadata = torch.full((6,), -7)
    one(metadata)
    one(metadata)  # a graph is captured, then replayed
    assert metadata.tolist() == [102, 100, -7, -7, -7, -7]
    assert one.tokens == [Sampled(4, 102), Sampled(9, 100)]
    assert one.arrival.hop_s == 0.25
    all_of_them = RunAheadStep(first, following(8, 5, 9, 2, 4), rung)
    all_of_them(metadata)
    assert metadata.tolist() == [100, 101, 102, -7, -7, -7]
    assert all_of_them.tokens == [Sampled(9, 100), Sampled(2, 101), Sampled(4, 102)]


def test_what_nobody_sampled_is_refused(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    publish(last, decode(5, 9), Sampled(9, 100))
    with pytest.raises(StateError, match="has no token for the sequences"):
        RunAheadStep(first, following(6, 5, 9, 2), rung)(torch.zeros(2))
    with pytest.raises(StateError, match="was not posted"):
        RunAheadStep(first, following(6, 5, 9), None)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
@pytest.mark.parametrize("fill", [RunAheadStep.put, RunAheadStep.queue])
def test_an_id_outside_the_vocabulary_is_not_embedded(
    fill: Callable[[RunAheadStep, torch.Tensor], None], token: int, ends: tuple[TokenRing, TokenRing]
) -> None:
    last, first = ends
    publish(last, decode(5, 9, 2), Sampled(9, 100), Sampled(2, token))
    with pytest.raises(StateError, match=rf"step 5: token: id {token} is not one of 200"):
        fill(RunAheadStep(first, following(6, 5, 9), rung), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("head", [(-1, 1), (0, 0), (1, 2**40), (2**40, 1)])
def test_a_count_beyond_the_region_is_refused(
    head: tuple[int, int], arena: Arena, ends: tuple[TokenRing, TokenRing]
) -> None:
    last, first = ends
    publish(last, decode(5, 9), Sampled(9, 100))
    arena.region(5 % N_REGIONS).cast("q")[:2] = memoryview(array("q", head))
    with pytest.raises(StateError, match="have no room in it"):
        first.read(5)


def verifying(step_id: int, drafts_of: int, *pieces: tuple[int, int]) -> Step:
    """Slices (sequence, drafts) behind one token each; drafts pend."""
    slices = [Slice(s, 41, [7, *[PENDING] * n], sample=True, n_drafts=n) for s, n in pieces]
    return Step(step_id, step_id % N_REGIONS, [], slices, drafts_of=drafts_of)


def test_a_step_starts_with_the_drafts_behind_the_step_before(ends: tuple[TokenRing, TokenRing]) -> None:
    last, first = ends
    asked = Step(5, 1, [], [Slice(s, 40, [7], sample=True, num_draft_tokens=3) for s in (9, 2, 4)])
    publish(last, asked, Sampled(9, 100), Sampled(2, 101), Sampled(4, 102))
    one = RunAheadStep(first, verifying(6, 5, (4, 4), (9, 2)), rung)
    with pytest.raises(AssertionError):  # drafts are made behind these tokens: they are no reason to start
        one(torch.zeros(8))
    drafts = [Drafted(9, [11, 12, 13], [0.5] * 3), Drafted(2, [21, 22, 23]), Drafted(4, [31])]
    last.publish(None, StepResult(5, 2, [], drafts=drafts))
    metadata = torch.full((9,), -7)
    one(metadata)
    one(metadata)
    assert metadata.tolist() == [-7, 31, 31, 31, 31, -7, 11, 12, -7]  # what lacks is filled up as everywhere
    assert one.tokens == [*[Sampled(4, 31)] * 4, Sampled(9, 11), Sampled(9, 12)]
    assert [s.tokens for s in one.step.slices] == [[7, 0, 0, 0, 0], [7, 0, 0]]


@pytest.mark.parametrize("fill", [RunAheadStep.put, RunAheadStep.queue])
def test_drafts_in_the_metadata_of_a_cpu_and_of_a_device(
    fill: Callable[[RunAheadStep, torch.Tensor], None], ends: tuple[TokenRing, TokenRing]
) -> None:
    last, first = ends
    last.publish(None, StepResult(5, 2, [], drafts=[Drafted(9, [11, 12, 13]), Drafted(2, [21, 22, 23])]))
    metadata = torch.full((9,), -7)
    fill(RunAheadStep(first, verifying(6, 5, (9, 3), (2, 3)), rung), metadata)
    assert metadata.tolist() == [-7, 11, 12, 13, -7, 21, 22, 23, -7], "told as expected"
    metadata.fill_(-7)
    fill(RunAheadStep(first, verifying(6, 5, (2, 4), (9, 2)), rung), metadata)
    assert metadata.tolist() == [-7, 21, 22, 23, 23, -7, 11, 12, -7], "in another order, and filled up"
