"""Parameters become the record the tail samples by; defaults come from the file, then from OpenAI."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.api.app_context import AppContext, ModelCard, SamplingDefaults
from lucevisor.api.errors import ApiError
from lucevisor.api.parameters import n_top_logprobs, sampling_params, seed_of_choice
from lucevisor.api.schemas import GenerationBody
from lucevisor.protocol.steps import Mirostat, SamplingParams
from lucevisor.text.tokenizer import breaker_tokens
from tests.api.scripted_model import tokenizer

CONTEXT = AppContext(
    model=ModelCard(name="m", created_s=0), tokenizer=tokenizer(), template=None, not_ready=list, banned=(8190, 8191)
)


def test_defaults_are_openais():
    expected = SamplingParams(seed=7, banned=(8190, 8191))
    assert sampling_params(GenerationBody(), CONTEXT, 7, -1) == expected


def test_defaults_of_the_file_and_what_a_request_says():
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.min_p": 0.1}
    context = replace(CONTEXT, defaults=SamplingDefaults.from_gguf(metadata))
    sampling = sampling_params(GenerationBody(top_k=5, min_p=0.0), context, 0, -1)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 5, 0.0)


@pytest.mark.parametrize("value", ["0.5", True, None, -1.0, 3.0, float("nan"), [0.5]])
def test_a_broken_default_of_the_file_is_left_out(value):
    assert SamplingDefaults.from_gguf({"general.sampling.temp": value}) == SamplingDefaults()


def test_every_parameter_arrives():
    body = GenerationBody(
        temperature=0.1,
        top_p=0.2,
        top_k=3,
        min_p=0.4,
        seed=-5,
        presence_penalty=0.6,
        frequency_penalty=0.7,
        repetition_penalty=1.8,
        logit_bias={"9": 1.5, "0": -100},
        ignore_eos=True,
    )
    assert sampling_params(body, CONTEXT, 1, 4) == SamplingParams(
        temperature=0.1,
        top_p=0.2,
        top_k=3,
        min_p=0.4,
        seed=-5,
        presence_penalty=0.6,
        frequency_penalty=0.7,
        repetition_penalty=1.8,
        logit_bias={9: 1.5, 0: -100.0},
        n_top_logprobs=4,
        banned=tuple(sorted({8190, 8191, *tokenizer().eos_ids})),
    )


@pytest.mark.parametrize(("asked", "given"), [(0.0, 0.0), (4e-113, 0.0), (9e-5, 0.0), (1e-4, 1e-4), (2.0, 2.0)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(asked, given):
    assert sampling_params(GenerationBody(temperature=asked), CONTEXT, 0, -1).temperature == given


def test_minus_one_switches_top_k_off():
    assert sampling_params(GenerationBody(top_k=-1), CONTEXT, 0, -1).top_k == 0


def test_samplers_of_llama_cpp_arrive():
    body = GenerationBody(
        typical_p=0.5,
        top_n_sigma=1.5,
        xtc_probability=0.25,
        dry_multiplier=0.8,
        dry_allowed_length=3,
        dry_sequence_breakers=["\n"],
        mirostat=2,
        mirostat_tau=4.0,
    )
    sampling = sampling_params(body, CONTEXT, 0, -1)
    assert (sampling.typical_p, sampling.top_n_sigma) == (0.5, 1.5)
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.25, 0.1)
    assert sampling.mirostat == Mirostat(2, 4.0, 0.1)
    assert sampling.dry is not None
    assert (sampling.dry.multiplier, sampling.dry.base, sampling.dry.allowed_length) == (0.8, 1.75, 3)
    heads = {tokenizer().token_bytes(head) for head, *tail in sampling.dry.breakers if not tail}
    assert b"\n" in heads
    assert all(b"\n" in word for word in heads)


@pytest.mark.parametrize(
    "off",
    [{"mirostat": 0}, {"dry_multiplier": 0.0, "dry_base": 2.0}, {"dry_multiplier": 1.0, "dry_penalty_last_n": 0},
     {"typical_p": 1.0}, {"xtc_probability": 0.0}, {"top_n_sigma": -1.0}],
)  # fmt: skip
def test_values_that_switch_a_sampler_off(off):
    assert sampling_params(GenerationBody(**off), CONTEXT, 7, -1) == sampling_params(GenerationBody(), CONTEXT, 7, -1)


def test_a_breaker_over_several_tokens_has_a_head_and_a_tail():
    found = breaker_tokens(tokenizer(), ("ab:",))
    words = [[tokenizer().token_bytes(token) for token in one] for one in found]
    assert [b"a", b"b", b":"] in words
    assert all(b"".join(one).endswith(b"ab:") or b"ab:" in one[0] for one in words)


def test_breakers_that_are_everywhere_are_refused(monkeypatch):
    monkeypatch.setattr("lucevisor.text.tokenizer.MAX_BREAKER_SEQUENCES", 100)
    with pytest.raises(ApiError, match="dry_sequence_breakers: the breakers are in"):
        sampling_params(GenerationBody(dry_multiplier=1.0, dry_sequence_breakers=["e"]), CONTEXT, 0, -1)


@pytest.mark.parametrize(
    ("n_probs", "wanted", "result"), [(None, None, -1), (0, None, -1), (0, 4, 4), (3, None, 3), (3, 3, 3)]
)
def test_n_probs_is_another_name_of_logprobs(n_probs, wanted, result):
    assert n_top_logprobs(GenerationBody(n_probs=n_probs), wanted, "logprobs") == result


def test_n_probs_that_contradict_logprobs():
    with pytest.raises(ApiError, match="n_probs: 3 contradicts top_logprobs = 5"):
        n_top_logprobs(GenerationBody(n_probs=3), 5, "top_logprobs")


@pytest.mark.parametrize("key", ["", "x", "-1", "+1", " 1", "1.0", "8192", "1_0", "٣", "9" * 5000])
def test_a_bias_that_names_no_token(key):
    with pytest.raises(ApiError) as caught:
        sampling_params(GenerationBody(logit_bias={key: 1.0}), CONTEXT, 0, -1)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("logit_bias")
    assert len(caught.value.message) < 300


@given(st.integers(-(2**63), 2**63 - 1))
def test_seeds_of_choices_are_distinct_and_fit_64_bits(seed):
    seeds = [seed_of_choice(seed, i) for i in range(5)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 5
    assert all(-(2**63) <= s < 2**63 for s in seeds)
