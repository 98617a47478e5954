"""Masks in a daemon: waiting for them on the link, and rows that lose what they forbid."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daemons.errors import StateError
from daemons.inbox import Inbox
from daemons.masks import apply_masks
from daemons.sampling import Sampler
from lucevisor.protocol.messages import Message, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Masks, Reset, SamplingParams, Slice, Step
from lucevisor.protocol.transport import BlockingLink

CPU = torch.device("cpu")
MASKED = [Slice(0, 9, [1], True, masked=True), Slice(1, 4, [1, 2, 3], True, n_drafts=2, masked=True)]


def packed(allowed: np.ndarray) -> torch.Tensor:
    """[n, V] of 0 and 1 as masks."""
    return torch.from_numpy(np.packbits(allowed.astype(np.uint8), axis=1, bitorder="little"))


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_rows_keep_what_is_allowed_and_lose_the_rest(vocabulary: int, n: int, n_padding: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = sorted(rng.choice(n, rng.integers(1, n + 1), replace=False).tolist())
    allowed = rng.integers(0, 2, (len(rows), vocabulary))
    x = torch.from_numpy(rng.normal(size=(n, vocabulary + n_padding)).astype(np.float32))
    expected = x.clone()
    for row, keeps in zip(rows, allowed, strict=True):
        expected[row, :vocabulary][torch.from_numpy(keeps == 0)] = -torch.inf
        expected[row, vocabulary:] = -torch.inf  # rows of the matrix without a token
    apply_masks(x, packed(allowed), rows)
    assert torch.equal(x, expected)


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, seed=4),
    SamplingParams(temperature=1.0, seed=5, top_k=3, min_p=0.1, top_p=0.9),
    SamplingParams(
        temperature=0.7, seed=6, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={3: 50.0, 7: -50.0}
    ),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_every_draw_is_allowed_and_plain_slices_are_as_without_masks(sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(2)
    rng = np.random.default_rng(8)
    for trial in range(40):
        logits = torch.randn(5, 40, generator=generator) * 3
        allowed = rng.random((4, 40)) < 0.2
        allowed[:, trial] = True  # something always is
        slices = [MASKED[0], Slice(2, 5 + trial, [0], True), MASKED[1]]
        sampler, plain = Sampler(40, CPU), Sampler(40, CPU)
        for one in slices:
            sampler.open(one.sequence, sampling, [4, 5])
        plain.open(2, sampling, [4, 5])
        drawn = sampler.sample(slices, logits.clone(), packed(allowed))
        by_sequence = {s: [x.token for x in drawn if x.sequence == s] for s in (0, 1, 2)}
        assert allowed[0][by_sequence[0][0]]
        assert all(allowed[1 + i][token] for i, token in enumerate(by_sequence[1]))
        assert by_sequence[2] == [x.token for x in plain.sample([slices[1]], logits[1:2].clone())]


def test_a_mask_of_one_token_draws_it_whatever_the_filters() -> None:
    sampler = Sampler(3000, CPU)
    sampler.open(0, SamplingParams(temperature=1.0, top_p=0.5, min_p=0.3, top_k=2), [])
    allowed = np.zeros((1, 3000))
    allowed[0, 2999] = 1
    assert [s.token for s in sampler.sample([MASKED[0]], torch.randn(1, 3000), packed(allowed))] == [2999]


def test_reported_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(4, CPU)
    sampler.open(0, SamplingParams(temperature=0.0, n_top_logprobs=1), [])
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    [told] = sampler.sample([MASKED[0]], logits.clone(), packed(np.array([[0, 0, 1, 1]])))
    assert told.token == 2
    assert told.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 2].item())
    assert told.top[0][0] == 0


class Ends:
    """Both ends of a link."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = BlockingLink(ours, role=Role.SUPERVISOR)
        self.daemon = BlockingLink(theirs)
        for link in (self.supervisor, self.daemon):
            link._connection.state = LinkState.READY
        self.inbox = Inbox(self.daemon)

    def send(self, message: Message, rows: bytes = b"") -> None:
        self.supervisor.send(message, payload=[rows])


@pytest.fixture
def ends() -> Iterator[Ends]:
    one = Ends()
    yield one
    one.supervisor.close()
    one.daemon.close()


def test_masks_come_before_or_after_their_step_and_other_frames_keep_their_order(ends: Ends) -> None:
    ends.send(Masks(2, 1, 2), b"ab")
    ends.send(Step(1, 0))
    ends.send(Step(2, 1))
    ends.send(Step(3, 0))
    ends.send(Masks(1, 4, 1), b"wxyz")
    first = ends.inbox.receive()
    assert first is not None
    assert first.message == Step(1, 0)
    found = ends.inbox.wait_for_masks(1, MASKED)
    assert found is not None
    assert found.tolist() == [[ord(c)] for c in "wxyz"]
    assert [frame.message.step_id for _ in range(2) if (frame := ends.inbox.receive())] == [2, 3]  # type: ignore[union-attr]
    assert ends.inbox.wait_for_masks(2, MASKED[:1]).tolist() == [[ord("a"), ord("b")]]  # type: ignore[union-attr]


def test_a_step_waits_for_masks_that_are_being_made(ends: Ends) -> None:
    timer = threading.Timer(0.05, lambda: ends.send(Masks(1, 1, 1), b"a"))
    timer.start()
    assert ends.inbox.wait_for_masks(1, MASKED[:1]) is not None
    timer.join()


@pytest.mark.parametrize("message", [Reset(4), Shutdown()], ids=lambda m: type(m).__name__)
def test_a_reset_or_shutdown_ends_the_wait_and_is_read_next(ends: Ends, message: Message) -> None:
    ends.send(message)
    assert ends.inbox.wait_for_masks(1, MASKED) is None
    frame = ends.inbox.receive()
    assert frame is not None
    assert frame.message == message


def test_the_end_of_the_link_ends_the_wait(ends: Ends) -> None:
    ends.supervisor.close()
    assert ends.inbox.wait_for_masks(1, MASKED) is None
    assert ends.inbox.receive() is None


@pytest.mark.parametrize(("message", "rows"), [(Masks(1, 3, 1), b"abc"), (Masks(1, 4, 2), b"abcd")], ids=str)
def test_masks_for_other_rows_are_a_broken_contract(ends: Ends, message: Masks, rows: bytes) -> None:
    ends.send(message, rows)
    with pytest.raises(StateError, match="for 4 rows"):
        ends.inbox.wait_for_masks(1, MASKED)
