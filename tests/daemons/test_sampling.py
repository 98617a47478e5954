"""daemons.sampling against direct formulas in numpy, and against transformers' logits processors where it is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daemons.random_sampling import draw, draw_key
from daemons.sampling import (
    Sampler,
    adjust,
    apply_masks,
    breakers_by_head,
    filtered,
    mirostat_keeps,
    next_mu,
    penalise_repetition,
)
from lucevisor.protocol.steps import Dry, Mirostat, PromptLogprobs, SamplingParams, Slice

CPU = torch.device("cpu")


def plain(sequence: int, position: int) -> Slice:
    """A decode whose sampled token is at ``position``."""
    return Slice(sequence, position - 1, [0], True)


def kept_by_hand(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
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


def assert_drawn_from(tokens: list[int], expected: np.ndarray) -> None:
    """Check draws against probabilities: none of 0, and Pearson's chi square of at most 40 bins, p > 1e-5."""
    assert (expected[tokens] > 0).all()
    order = np.argsort(-expected, kind="stable")
    bins = np.empty(len(expected), dtype=int)
    bins[order] = np.minimum((np.cumsum(expected[order]) * 40).astype(int), 39)
    counts = np.bincount(bins[tokens], minlength=40)
    wanted = np.bincount(bins, weights=expected, minlength=40) * len(tokens)
    used = wanted > 0
    assert (((counts - wanted)[used] ** 2) / wanted[used]).sum() < 92  # 39 degrees of freedom


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=2.0, top_p=0.999),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_filtered_distribution(sampling: SamplingParams) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 2
    expected = kept_by_hand(logits[0].numpy(), sampling)
    keys = [draw_key(11, position) for position in range(8000)]
    assert_drawn_from(draw(logits.repeat(len(keys), 1), [sampling] * len(keys), keys), expected)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_p=0.999), SamplingParams(min_p=1e-5), SamplingParams(top_k=3000, top_p=0.99)],
    ids=str,
)
def test_flat_distributions_wider_than_the_candidates_are_drawn_from_whole(sampling: SamplingParams) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.1
    expected = kept_by_hand(logits[0].numpy(), sampling)
    assert (expected > 0).sum() > 1024
    keys = [draw_key(seed, 3) for seed in range(500)]
    assert_drawn_from(draw(logits.repeat(len(keys), 1), [sampling] * len(keys), keys), expected)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(len(SETTINGS), 300, generator=torch.Generator().manual_seed(9))
    keys = [draw_key(i, 40) for i in range(len(SETTINGS))]
    together = draw(logits.clone(), SETTINGS, keys)
    alone = [draw(logits[i : i + 1].clone(), [s], [keys[i]])[0] for i, s in enumerate(SETTINGS)]
    assert together == alone


@given(st.integers(0, 6), st.lists(st.integers(1, 3), max_size=6))
def test_penalties_know_prompt_and_output_however_they_arrive(n_history: int, sizes: list[int]) -> None:
    """A preemption or a restart opens a sequence with part of its context, and steps carry the rest."""
    s = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    prompt, output = [1, 1, 5], [1, 2, 2]
    context, sampler = prompt + output, Sampler(6, CPU)
    sampler.open(4, s, history=context[:n_history], n_prompt=len(prompt))
    at = n_history
    for size in [*sizes, len(context)]:
        sampler.count(4, context[at : at + size])
        at += size
    x = torch.tensor([[1.0, 4.0, -1.0, 3.0, 0.0, 2.0]])
    adjust(sampler.states[4], x)
    expected = [1.0, 4 / 2 - 0.5 - 0.25, -1 * 2 - 0.5 - 2 * 0.25, 3.0, 0.0, 2 / 2]
    assert x[0].tolist() == expected  # float32 holds all of them


def test_bias_decides_and_banned_ids_never_appear() -> None:
    x = torch.zeros(10)
    sampler = Sampler(10, CPU)
    sampler.open(0, SamplingParams(temperature=0, logit_bias={3: 5.0, 4: 6.0}, banned=(4,)), [])
    assert sampler.sample([plain(0, 5)], x[None])[0].token == 3


# ---- drafts


class TokenTree:
    """A made-up model: the logits after a text depend on all of it, so a wrong draft makes other rows."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def rows(self, text: list[int], n: int) -> torch.Tensor:
        """Logits after the last n tokens of ``text``."""
        made = []
        for end in range(len(text) - n + 1, len(text) + 1):
            g = torch.Generator().manual_seed(hash(tuple(text[:end])) & 0xFFFFFFFF)
            made.append(torch.randn(self.vocabulary, generator=g) * 2)
        return torch.stack(made)


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3, 9]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**63),
    repetition_penalty=st.sampled_from([1.0, 1.9]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 2.5, -1.0]),
    logit_bias=st.sampled_from([{}, {2: 3.0, 5: -4.0}]),
    n_top_logprobs=st.sampled_from([-1, 0, 2]),
    banned=st.sampled_from([(), (1, 7)]),
    typical_p=st.sampled_from([1.0, 1.0, 0.6]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 1.5]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5]),
    dry=st.sampled_from([None, None, Dry(1.5, 1.75, 1), Dry(0.8, 2.0, 2, 8, ((3,), (5, 6)))]),
    mirostat=st.sampled_from([None, None, Mirostat(1, 2.0, 0.4), Mirostat(2, 2.0, 0.4)]),
)


@given(
    st.lists(samplings, min_size=1, max_size=3),
    st.lists(st.integers(0, 11), min_size=1, max_size=5),
    st.data(),
)
def test_any_drafts_give_the_tokens_of_plain_sampling(settings: list[SamplingParams], prompt: list[int], data) -> None:
    """Tokens, log-probabilities and penalties' counts; sequences with and without drafts share the steps."""
    model, n_tokens = TokenTree(12), 10
    sampler, texts, found = Sampler(12, CPU), {}, {}
    for s, sampling in enumerate(settings):
        plainly, texts[s], found[s] = Sampler(12, CPU), list(prompt), []
        plainly.open(s, sampling, prompt[:-1], n_prompt=len(prompt))
        sampler.open(s, sampling, prompt[:-1], n_prompt=len(prompt))
        while len(texts[s]) < len(prompt) + n_tokens:
            plainly.count(s, texts[s][-1:])
            found[s] += plainly.sample([plain(s, len(texts[s]))], model.rows(texts[s], 1))
            texts[s].append(found[s][-1].token)
    wanted, texts, found = found, {s: list(prompt) for s in texts}, {s: [] for s in found}
    while live := [s for s in texts if len(found[s]) < n_tokens]:
        slices, rows = [], []
        for s in live:
            right = [x.token for x in wanted[s][len(found[s]) :]]
            n = data.draw(st.integers(0, min(4, len(right) - 1)))
            drafts = [t if data.draw(st.integers(0, 3)) else (t + 1) % 12 for t in right[:n]]
            slices.append(Slice(s, len(texts[s]) - 1, [texts[s][-1], *drafts], True, n))
            sampler.count(s, texts[s][-1:])
            rows.append(model.rows(texts[s] + drafts, 1 + n))
        sampled = sampler.sample(slices, torch.cat(rows))
        assert [x.sequence for x in sampled] == sorted(x.sequence for x in sampled)
        for x in sampled:
            texts[x.sequence].append(x.token)
            found[x.sequence].append(x)
    for s, sampling in enumerate(settings):
        assert [(x.token, x.logprob, x.top) for x in found[s]] == [(x.token, x.logprob, x.top) for x in wanted[s]]
        if sampling.penalised:
            assert sampler.states[s].counts is not None
            assert sampler.states[s].counts.tolist() == np.bincount(texts[s][len(prompt) : -1], minlength=12).tolist()


@given(samplings, st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 9))
def test_a_sequence_opened_again_goes_on_as_before(sampling: SamplingParams, prompt: list[int], n_before: int) -> None:
    """After a preemption or a lost daemon: the supervisor knows its tokens and where mirostat stands."""
    model = TokenTree(12)
    texts = []
    for opened_again in (False, True):
        sampler, text, mu = Sampler(12, CPU), list(prompt), None
        sampler.open(0, sampling, prompt[:-1], n_prompt=len(prompt))
        for i in range(10):
            if opened_again and i == n_before:
                sampler = Sampler(12, CPU)
                sampler.open(0, sampling, text[:-1] if sampling.needs_history else [], mu, len(prompt))
            sampler.count(0, text[-1:])
            [sampled] = sampler.sample([plain(0, len(text))], model.rows(text, 1))
            text.append(sampled.token)
            mu = sampled.mu
        assert (mu is None) == (not sampling.uses_mirostat)
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_surprise(version: int) -> None:
    s = SamplingParams(seed=5, mirostat=Mirostat(version, 3.0, 0.1))
    sampler = Sampler(200, CPU)
    sampler.open(0, s, [])
    logits, surprises = torch.randn(200, generator=torch.Generator().manual_seed(4)) * 2, []
    logprobs = torch.log_softmax(logits, dim=0)
    for position in range(400):
        [sampled] = sampler.sample([plain(0, position)], logits[None].clone())
        surprises.append(-float(logprobs[sampled.token]) / math.log(2))
    # the estimates of both versions are coarse: of the model's own 4.8 bits they leave about 3
    assert 2.0 < sum(surprises[100:]) / 300 < 4.0


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(seed=3),
    "filtered": SamplingParams(top_k=5, top_p=0.9, min_p=0.01, seed=4),
    "sorted": SamplingParams(typical_p=0.9, seed=5),
    "mirostat": SamplingParams(mirostat=Mirostat(2), seed=6),
    "penalised": SamplingParams(repetition_penalty=1.2, seed=7),
    "reported": SamplingParams(temperature=0.0, n_top_logprobs=3),
    "banned": SamplingParams(temperature=0.0, banned=(1, 2, 3), logit_bias={4: 1.0}),
}


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_not_numbers_are_named_and_the_others_drawn_as_ever(name: str, number: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    found = []
    for invalid in (None, number):
        sampler = Sampler(50, CPU)
        for sequence in range(3):
            sampler.open(sequence, KINDS[name], [1, 2, 3])
        rows = logits.clone()
        if invalid is not None:
            rows[1, 17] = invalid
        found.append(sampler.sample([plain(sequence, 9) for sequence in range(3)], rows))
        assert sampler.take_invalid() == ([] if invalid is None else [1])
        assert sampler.take_invalid() == []
    good, bad = found
    assert [one for one in bad if one.sequence != 1] == [one for one in good if one.sequence != 1]
    [void] = [one for one in bad if one.sequence == 1]
    assert 0 <= void.token < 50
    assert (void.logprob, void.top, void.mu) == (None, [], None)


def test_a_row_without_any_number_is_invalid_and_a_masked_one_is_not() -> None:
    sampler = Sampler(8, CPU)
    sampler.open(0, SamplingParams(temperature=0.0), [])
    sampler.sample([plain(0, 3)], torch.full((1, 8), -math.inf))
    assert sampler.take_invalid() == [0]
    masks = torch.tensor([[0b00000100]], dtype=torch.uint8)
    [only] = sampler.sample([Slice(0, 2, [0], True, masked=True)], torch.zeros(1, 8), masks)
    assert (only.token, sampler.take_invalid()) == (2, [])


def test_one_invalid_row_of_a_verified_draft_makes_its_sequence_void() -> None:
    sampler = Sampler(8, CPU)
    for sequence in range(2):
        sampler.open(sequence, SamplingParams(temperature=0.0), [])
    rows = torch.zeros(4, 8)
    rows[0, 5] = rows[2, 5] = 1.0
    rows[3, 0] = math.nan
    sampler.sample([Slice(sequence, 2, [0, 5], True, n_drafts=1) for sequence in range(2)], rows)
    assert sampler.take_invalid() == [1]


def test_scores_that_are_not_numbers_are_void() -> None:
    sampler = Sampler(8, CPU)
    good = PromptLogprobs(0, 1, [-1.0, -2.0], [[(1, -1.0)], [(2, -2.0)]])
    bad = PromptLogprobs(1, 1, [-1.0, math.nan], [[(1, -1.0)], [(2, math.nan)]])
    assert sampler.checked([good, bad]) == [good, PromptLogprobs(1, 1, [0.0, 0.0], [[], []])]
    assert sampler.take_invalid() == [1]


# ---- filters, mirostat and DRY against llama.cpp (tests/oracles/llama_samplers.py)


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "golden" / "llama-samplers.json").read_text())


@pytest.mark.parametrize("case", RECORDED["filters"], ids=lambda case: str(case["settings"]))
def test_filters_keep_what_llama_cpp_keeps(case: dict[str, Any]) -> None:
    settings = dict(case["settings"])
    if "xtc" in settings:
        settings |= {"xtc_threshold": settings.pop("xtc"), "xtc_probability": 1.0}
    p, ids = filtered(torch.tensor(case["logits"]), SamplingParams(**settings), 0.0)
    found = sorted(zip(ids.tolist(), p.tolist(), strict=True))
    assert [i for i, _ in found] == [i for i, _ in case["kept"]]
    assert [p for _, p in found] == pytest.approx([p for _, p in case["kept"]], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", RECORDED["mirostat"], ids=lambda c: f"{c['version']}-{c['tau']}-{c['eta']}")
def test_mirostat_moves_as_in_llama_cpp(case: dict[str, Any]) -> None:
    settings = Mirostat(case["version"], case["tau"], case["eta"])
    mu = 2 * settings.tau
    for step in case["steps"]:
        p, ids = mirostat_keeps(torch.tensor(step["logits"]), settings, mu)
        assert len(p) == step["n_kept"]
        chosen = float(p[ids.tolist().index(step["token"])])  # llama.cpp's own draw
        assert chosen == pytest.approx(step["p"], rel=1e-3)
        mu = next_mu(chosen, settings, mu)


@pytest.mark.parametrize("case", RECORDED["dry"], ids=range(len(RECORDED["dry"])))
def test_dry_penalises_as_llama_cpp(case: dict[str, Any]) -> None:
    breakers = tuple(tuple(one) for one in case["breakers"])
    dry = Dry(case["multiplier"], case["base"], case["allowed_length"], case["last_n"], breakers)
    row = torch.zeros(len(case["logits"]))
    penalise_repetition(row, np.array(case["context"]), dry, breakers_by_head(dry))
    assert row.tolist() == pytest.approx(case["logits"], rel=1e-5)


# ---- masks


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


MASKED_SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, seed=4),
    SamplingParams(temperature=1.0, seed=5, top_k=3, min_p=0.1, top_p=0.9),
    SamplingParams(
        temperature=0.7, seed=6, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={3: 50.0, 7: -50.0}
    ),
]


@pytest.mark.parametrize("sampling", MASKED_SETTINGS, ids=str)
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


def test_reported_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(4, CPU)
    sampler.open(0, SamplingParams(temperature=0.0, n_top_logprobs=1), [])
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    [told] = sampler.sample([MASKED[0]], logits.clone(), packed(np.array([[0, 0, 1, 1]])))
    assert told.token == 2
    assert told.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 2].item())
    assert told.top[0][0] == 0
