"""Model cards on golden models of their families: a request for temperature 0 gets the model's most likely tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from lucevisor.api.contexts import ModelCard, ModelContext
from lucevisor.api.parameters import sampling_params
from lucevisor.api.schemas import GenerationBody
from lucevisor.app.model_files import FamilyCard, card_files
from lucevisor.model.families import open_spec
from tests.api.scripted_model import tokenizer
from tests.combinations import slow
from tests.e2e.service import GOLDEN, generate, running, write_config

N = 4
MODELS: dict[str, list[str]] = {
    "encoders": [],  # generate nothing
    "gemma3": ["gemma3"],
    "gemma4": ["gemma4_e2b"],
    "glm": ["glm4moe"],
    "gpt_oss": ["gpt_oss"],
    "granite": ["granite", "granitemoe"],
    "laguna": ["laguna_mscale"],
    "llama3": ["llama"],
    "ministral3_reasoning": ["mistral3"],
    "mistral_nemo": ["llama"],
    "mistral_small": ["llama", "mistral3"],
    "qwen25": ["qwen2"],
    "qwen3": ["qwen3"],
    "qwen3_coder_next": ["qwen3next"],
    "qwen3_instruct": ["qwen3moe"],
    "smollm2": ["llama"],
    "qwen35": ["qwen35", "qwen35moe"],
}
CASES = [
    (card, model) if model == "qwen35" else slow(card, model)  # its card has a penalty
    for card in (file.stem for file in card_files())
    for model in MODELS[card]
]


@pytest.mark.parametrize(("name", "model"), CASES)
async def test_temperature_0_gives_the_likeliest_tokens(name: str, model: str, tmp_path: Path) -> None:
    [file] = [file for file in card_files() if file.stem == name]
    card = msgspec.toml.decode(file.read_bytes(), type=FamilyCard)
    path = GOLDEN / model / "model.gguf"
    spec = open_spec(path)
    assert spec.architecture in card.architectures
    direct = card.sampling_without_thinking
    context = ModelContext(
        model=ModelCard(name="m", created_s=0),
        tokenizer=tokenizer(),
        template=None,
        defaults=card.sampling,
        direct_defaults=direct,
    )
    ids = np.load(GOLDEN / model / "golden.npz")["input_ids"].tolist()
    config = write_config(tmp_path, path, {"a": 1}, [f"0-{spec.n_layers}"], '[engine]\ndtype = "float32"\n')
    async with running(config, tmp_path) as service:
        assert service.only.engine is not None
        for is_direct in (False, True):
            greedy = sampling_params(GenerationBody(temperature=0.0), context, 1, -1, direct=is_direct)
            answer = await generate(service, ids, N, greedy)
            rows = await service.only.engine.run_ids([*ids, *answer], want_hidden=False, rows_per_step=32)
            assert answer == rows.logits[len(ids) - 1 : -1].argmax(axis=1).tolist()
        # A penalty that was asked for counts what is generated: a token of the prompt loses nothing.
        asked = sampling_params(
            GenerationBody(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), context, 1, -1
        )
        best = (
            (await service.only.engine.run_ids(ids, want_hidden=False, rows_per_step=32)).logits.argmax(axis=1).tolist()
        )
        n = max(n for n in range(1, len(ids) + 1) if best[n - 1] in ids[:n])
        assert await generate(service, ids[:n], 1, asked) == [best[n - 1]]
