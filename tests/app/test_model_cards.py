"""Defaults of families: every card is read, finds its models and no others, and gives way to file and request."""

from __future__ import annotations

import re

import msgspec
import pytest

from lucevisor.api.app_context import AppContext, ModelCard, SamplingDefaults
from lucevisor.api.parameters import sampling_params
from lucevisor.api.schemas import GenerationBody
from lucevisor.app.model_files import FamilyCard, card_files, find_card
from lucevisor.model.families import FAMILIES
from tests.api.scripted_model import metadata, tokenizer


@pytest.mark.parametrize("file", card_files(), ids=lambda file: file.stem)
def test_every_card_is_valid(file):
    card = msgspec.toml.decode(file.read_bytes(), type=FamilyCard)
    assert set(card.architectures) <= set(FAMILIES)
    re.compile(card.name)


def test_every_family_has_a_card():
    covered = {a for f in card_files() for a in msgspec.toml.decode(f.read_bytes(), type=FamilyCard).architectures}
    assert covered == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "name", "temperature", "direct"),
    [
        ("qwen3", "Qwen3 8B", 0.6, 0.7),
        ("qwen3", "Qwen3-Coder", 0.6, 0.7),
        ("qwen35", "Qwen3.5-27B", 1.0, 0.7),
        ("qwen35moe", "Qwen3.6 35B A3B", 1.0, 0.7),
        ("gemma4", "Gemma-4-31B-It", 1.0, None),
        ("laguna", "Laguna-XS.2", 1.0, None),
    ],
)
def test_a_model_finds_its_card(architecture, name, temperature, direct):
    card = find_card(architecture, {"general.name": name})
    assert card is not None
    assert card.sampling.temperature == temperature
    other = card.sampling_without_thinking
    assert (other and other.temperature) == direct


@pytest.mark.parametrize(
    ("architecture", "name"), [("qwen35", "lucevisor-demo-22m"), ("qwen3", ""), ("llama", "Qwen3")]
)
def test_other_models_have_none(architecture, name):
    assert find_card(architecture, {"general.name": name}) is None


def test_what_goes_before_what():
    card = find_card("qwen35", {"general.name": "Qwen3.5"})
    assert card is not None
    assert card.sampling_without_thinking is not None
    file = {"general.sampling.top_k": 40}
    defaults = SamplingDefaults.from_gguf(file, card.sampling)
    context = AppContext(
        model=ModelCard(name="m", created_s=0), tokenizer=tokenizer(), template=None, not_ready=list,
        defaults=defaults, direct_defaults=card.sampling_without_thinking,
    )  # fmt: skip

    def sampled(direct=False, structured=False, **asked):
        s = sampling_params(GenerationBody(**asked), context, 0, -1, direct=direct, structured=structured)
        return s.temperature, s.top_k, s.top_p, s.presence_penalty

    assert sampled() == (1.0, 40, 0.95, 1.5)
    assert sampled(direct=True) == (0.7, 20, 0.8, 1.5)
    assert sampled(seed=3, max_tokens=5, logit_bias={"1": 1.0}) == (1.0, 40, 0.95, 1.5)  # no shape of its own
    assert sampled(direct=True, temperature=0.1) == (0.1, 20, 0.8, 0.0)
    assert sampled(top_p=0.5) == (1.0, 40, 0.5, 0.0)
    assert sampled(repetition_penalty=1.1) == (1.0, 40, 0.95, 0.0)
    assert sampled(presence_penalty=0.3) == (1.0, 40, 0.95, 0.3)
    assert sampled(structured=True) == (1.0, 40, 0.95, 0.0)
    assert sampled(structured=True, presence_penalty=0.3) == (1.0, 40, 0.95, 0.3)


def test_stop_tokens_are_those_that_the_vocabulary_has():
    card = FamilyCard(architectures=["x"], name="", stop=["<|im_end|>", "<nowhere>", "the"])
    assert card.stop_ids(tokenizer()) == {tokenizer().token_id("<|im_end|>")}
    assert metadata()["general.architecture"] == "qwen35"


def test_a_card_that_is_wrong_is_refused():
    for text in (b'architectures = ["x"]', b'architectures = []\nname = ""\n[sampling]\ntemprature = 1'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.toml.decode(text, type=FamilyCard)
