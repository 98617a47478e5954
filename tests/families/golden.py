"""The golden files of every family, and their models loaded once."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lucevisor.model.families import open_spec
from tests.families.pipeline import Pipeline, load_stages
from tests.families.rounding import Bounds, Formats, assert_same_tokens, bounds, explained

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FIXTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "granite",
    "granitemoe",
    "gpt_oss",
    "mistral3",
    "glm4moe",
)
FIXTURES += ("gemma3", "gemma4_e2b", "gemma4_moe", "laguna", "laguna_mscale")
KINDS = ("llama", "qwen35", "gemma4_e2b", "laguna")
"""A fixture of each kind of layer: full, recurrent and sliding attention, shared keys and values, experts."""
each_kind = pytest.mark.parametrize(
    "golden",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in FIXTURES],
    indirect=True,
)
OPTIONS = {"laguna": {"yarn_attn_factor": "file"}}
"""The golden file ``laguna`` holds an attention factor that only transformers obeys."""


class Golden:
    """A model, what is expected of it, and its stages unsplit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec = open_spec(GOLDEN / name / "model.gguf", OPTIONS.get(name))
        with np.load(GOLDEN / name / "golden.npz") as z:
            self.ids: list[int] = z["input_ids"].tolist()
            self.logits = torch.from_numpy(z["logits"])
            self.hidden = torch.from_numpy(z["hidden"])
            self.prompt = self.ids[: int(z["prompt_len"])]
            self.greedy: list[int] = z["greedy"].tolist()
        self.whole = load_stages(self.spec)

    def pipeline(self, stages=None, **options) -> Pipeline:
        return Pipeline(self.spec, stages or self.whole, **options)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds(self.spec, self.ids)

    def explained(self, formats: Formats) -> float:
        return explained(self.spec, self.ids, self.bounds.logits.exact, formats)

    def assert_logits(self, found: Tensor) -> None:
        """Logits of the first ids are the golden ones, as near as two float32 runs must be."""
        self.bounds.assert_logits(found, self.logits, slice(len(found)))

    def assert_tokens(self, found: list[int]) -> None:
        assert_same_tokens(self.spec, self.prompt, found, self.greedy)

    def layer_splits(self) -> list[int]:
        return [b for b in range(1, self.spec.n_layers) if self.spec.legal_boundary(b)]


opened = cache(Golden)
