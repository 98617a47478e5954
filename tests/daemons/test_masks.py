"""Masks in a daemon: waiting for them on the link, and rows that lose what they forbid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daemons.masks import apply_masks
from daemons.sampling import Sampler
from lucevisor.protocol.steps import SamplingParams, Slice

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
