"""Configurations of models that only pool: what is planned for them, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import load
from lucevisor.errors import ConfigError
from lucevisor.placement.planner import plan

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def placed(tmp_path, name, *overrides):
    path = tmp_path / "box.toml"
    path.write_text(
        f'[model]\npath = "{GOLDEN / name / "model.gguf"}"\n[groups.a]\nbackend = "cpu"\n'
        '[placement]\ntarget_devices = ["a:0"]\n'
    )
    config = load(path, overrides)
    return plan(open_model(config).spec, config)


@pytest.mark.parametrize(("name", "context"), [("bert", 160), ("gemma_embedding", 160), ("qwen3_embedding", 512)])
def test_a_plan(name, context, tmp_path):
    placement = placed(tmp_path, name)
    assert (placement.max_context, placement.max_sequences, placement.prefix_slots) == (context, 32, 0)
    assert not placement.drafting.max_drafts
    assert placement.prefill_chunk == min(context, 512)
    assert placement.max_step_tokens >= context + 32


def test_a_shorter_context(tmp_path):
    placement = placed(tmp_path, "bert", "engine.max_context=100", "engine.max_sequences=4")
    assert (placement.max_context, placement.prefill_chunk, placement.max_sequences) == (100, 100, 4)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("engine.max_context", 161, "is more than the 160 positions that"),
        ("engine.deterministic", "true", "has no kernels for the whole texts of"),
        ("kvflash.pool_tokens", 4096, "drops keys of a text"),
        ("draft.path", str(GOLDEN / "qwen3" / "model.gguf"), "generates nothing, so there is nothing to draft"),
    ],
)
def test_settings_that_make_no_sense(key, value, why, tmp_path):
    with pytest.raises(ConfigError, match=why) as caught:
        placed(tmp_path, "bert", f"{key}={value}", "engine.dtype=bfloat16")
    assert caught.value.key == key
