"""Golden logits, hidden states and greedy tokens beside those of a running service."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import torch

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from tests.e2e.service import GOLDEN, generate
from tests.families.rounding import Bounds, assert_same_tokens, bounds

FACTOR = {"laguna": ["model.yarn_attn_factor=file"]}
ENGINE = '[engine]\ndtype = "float32"\nprefill_chunk = {}\n'


@cache
def model_of(name: str) -> tuple[ModelSpec, Bounds]:
    """A golden model, and how far two float32 runs of its golden tokens may be from each other."""
    options = dict(item.removeprefix("model.").split("=") for item in FACTOR.get(name, []))
    spec = open_spec(GOLDEN / name / "model.gguf", options)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        return spec, bounds(spec, golden["input_ids"].tolist())


async def assert_golden_numbers(service: Service, name: str) -> None:
    """Compare logits, hidden states and tokens, also of eight prompts together, with the golden ones."""
    spec, bound = model_of(name)
    golden = np.load(GOLDEN / name / "golden.npz")
    ids = golden["input_ids"].tolist()
    prompt = ids[: int(golden["prompt_len"])]
    assert service.only.engine is not None
    rows = await service.only.engine.run_ids(ids, want_hidden=True, rows_per_step=32)
    assert rows.hidden is not None
    bound.assert_layers(torch.from_numpy(rows.hidden), torch.from_numpy(golden["hidden"]))
    bound.assert_logits(torch.from_numpy(rows.logits), torch.from_numpy(golden["logits"]))
    assert_same_tokens(spec, prompt, await generate(service, prompt, 32), golden["greedy"].tolist())
    prompts = [ids[i : i + 7 * (i + 1)] for i in range(8)]
    alone = [await generate(service, p, 24) for p in prompts]
    together = await asyncio.gather(*(generate(service, p, 24) for p in prompts))
    for p, found, wanted in zip(prompts, together, alone, strict=True):
        assert_same_tokens(spec, p, found, wanted)
    pages = service.only.engine.statistics().pages
    assert {space: use.used for space, use in pages.items()} == dict.fromkeys(pages, 0)
