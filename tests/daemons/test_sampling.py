"""daemons.sampling against direct formulas in numpy, and against transformers' logits processors where it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daemons.sampling import Sampler, SamplingState, adjust, draw, uniform
from lucevisor.protocol.steps import Sampling
from tests.numerics import UNIT, bound

CPU = torch.device("cpu")


def kept_by_hand(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The distribution after temperature, top_k, top_p, min_p, in float64, the slow and plain way."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / s.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if s.top_k > 0:
        p[order[s.top_k :]] = 0
        p /= p.sum()
    total = 0.0
    for rank, i in enumerate(order):
        if rank and total >= s.top_p:
            p[i] = 0
        total += p[i]
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def border_error(logits: torch.Tensor, s: Sampling) -> float:
    """How far a border between two tokens, in running sums of probabilities, is from the exact one.

    The temperature and its division are rounded to float32, the rest is float64: exponents are off by 2 u of their
    size, those of a token and of the total; what is kept has a total as well.
    """
    return 8 * UNIT * float(logits.abs().max()) / s.temperature


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_uniform_is_a_function_of_seed_and_position_inside_the_unit_interval(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, position)


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    for values in ([uniform(7, i) for i in range(20000)], [uniform(i, 7) for i in range(20000)]):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi square, 19 degrees: p < 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=0.9, top_k=20, top_p=0.7, min_p=0.05),
    Sampling(temperature=2.0, top_p=0.999),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_filtered_distribution(sampling: Sampling) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 2
    expected = kept_by_hand(logits[0].numpy(), sampling)
    n = 20000
    u = [(i + 0.5) / n for i in range(n)]  # a stratified sample: one more or less between two boundaries
    tokens = draw(logits.repeat(n, 1), [sampling] * n, u)
    frequency = np.bincount(tokens, minlength=64) / n
    assert np.abs(frequency - expected).max() <= 1 / n + 2 * border_error(logits, sampling)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.999), Sampling(min_p=1e-5), Sampling(top_k=3000, top_p=0.99)], ids=str
)
def test_flat_distributions_wider_than_the_candidates_are_drawn_from_whole(sampling: Sampling) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.1
    expected = kept_by_hand(logits[0].numpy(), sampling)
    assert (expected > 0).sum() > 1024
    n = 300
    u = [(i + 0.5) / n for i in range(n)]
    tokens = draw(logits.repeat(n, 1), [sampling] * n, u)
    order = np.argsort(-expected, kind="stable")
    running = np.cumsum(expected[order])
    by_hand = [order[np.searchsorted(running, v, side="right")] for v in u]
    near = border_error(logits, sampling)
    sure = [np.abs(running - v).min() > near for v in u]
    assert sum(sure) >= n - 1
    for token, wanted, decided in zip(tokens, by_hand, sure, strict=True):
        assert not decided or logits[0, token] == logits[0, wanted]  # equal ones stand in any order


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(len(SETTINGS), 300, generator=torch.Generator().manual_seed(9))
    u = [0.1, 0.35, 0.6, 0.85, 0.99, 0.5]
    together = draw(logits.clone(), SETTINGS, u)
    alone = [draw(logits[i : i + 1].clone(), [s], [u[i]])[0] for i, s in enumerate(SETTINGS)]
    assert together == alone


def test_penalties_count_history_and_carried_tokens() -> None:
    s = Sampling(temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(6, CPU)
    sampler.open(4, s, history=[1, 1])
    sampler.count(4, [1, 2])
    row = sampler.rows[4]
    x = torch.tensor([1.0, 4.0, -1.0, 3.0, 0.0, 0.0])
    adjust(row, x)
    expected = [1.0, 4 / 2 - 0.5 - 3 * 0.25, -1 * 2 - 0.5 - 0.25, 3.0, 0.0, 0.0]
    assert x.tolist() == expected  # float32 holds all of them


def test_repetition_penalty_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    seen = torch.tensor([[3, 7, 7, 11]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    sampler = Sampler(50, CPU)
    sampler.open(0, Sampling(repetition_penalty=1.7), history=seen[0].tolist())
    got = logits[0].clone()
    adjust(sampler.rows[0], got)
    # each side rounds the penalty and one operation
    assert bool(((got.double() - expected[0].double()).abs() <= 4 * UNIT * expected[0].double().abs()).all())


def test_bias_decides_and_banned_ids_never_appear() -> None:
    x = torch.zeros(10)
    sampler = Sampler(10, CPU)
    sampler.open(0, Sampling(temperature=0, logit_bias={3: 5.0, 4: 6.0}, banned=(4,)), [])
    assert sampler.sample([0], [5], x[None])[0].token == 3


def test_greedy_and_drawn_rows_share_a_batch_and_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    sampler = Sampler(40, CPU)
    sampler.open(0, Sampling(temperature=0, n_top_logprobs=3), [])
    sampler.open(1, Sampling(temperature=0.5, seed=11, n_top_logprobs=0), [])
    exact, allowed = bound(lambda x: torch.log_softmax(x, dim=-1).unsqueeze(-1), logits)  # of each by itself
    greedy, drawn = sampler.sample([0, 1], [9, 9], logits.clone())
    assert greedy.token == int(logits[0].argmax())
    assert abs(greedy.logprob - float(exact[0, greedy.token])) <= float(allowed[0, greedy.token])
    assert [i for i, _ in greedy.top] == exact[0, :, 0].topk(3).indices.tolist()
    assert greedy.top[0] == (greedy.token, greedy.logprob)
    assert abs(drawn.logprob - float(exact[1, drawn.token])) <= float(allowed[1, drawn.token])
    assert drawn.top == []
    assert sampler.sample([1], [9], logits[1:].clone())[0].token == drawn.token


def test_row_without_settings_is_left_alone() -> None:
    x = torch.arange(4.0)
    adjust(SamplingState(Sampling()), x)
    assert x.tolist() == [0, 1, 2, 3]
