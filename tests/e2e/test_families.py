"""Golden numbers of every family through real daemons: one model over two processes, cut where it may be.

Oracle: transformers in float32 (tests/data/golden/README.md).  All cuts in one process are in tests/families.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.families.rounding import Bounds, assert_same_tokens, bounds

CUTS = {"qwen3": 3, "qwen35moe": 1, "gemma4_e2b": 3, "gemma4_moe": 2, "laguna": 2, "laguna_mscale": 4}
QUICK = ("qwen35moe", "gemma4_e2b", "laguna_mscale")
FACTOR = {"laguna": ["model.yarn_attn_factor=file"]}


@cache
def model_of(name: str) -> tuple[ModelSpec, Bounds]:
    """A golden model, and how far two float32 runs of its golden tokens may be from each other."""
    options = dict(item.removeprefix("model.").split("=") for item in FACTOR.get(name, []))
    spec = open_spec(GOLDEN / name / "model.gguf", options)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        return spec, bounds(spec, golden["input_ids"].tolist())


async def assert_golden(service: Service, name: str, golden: np.lib.npyio.NpzFile, ids: list[int]) -> None:
    """Hidden states behind every layer, logits, 32 greedy tokens."""
    assert service.engine is not None
    rows = await service.engine.run_ids(ids, want_hidden=True, rows_per_step=32)
    assert rows.hidden is not None
    spec, bound = model_of(name)
    bound.assert_layers(torch.from_numpy(rows.hidden), torch.from_numpy(golden["hidden"]))
    bound.assert_logits(torch.from_numpy(rows.logits), torch.from_numpy(golden["logits"]))
    prompt = ids[: int(golden["prompt_len"])]
    assert_same_tokens(spec, prompt, await generate(service, prompt, 32), golden["greedy"].tolist())


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CUTS])
async def test_two_processes_give_the_golden_numbers(name: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    n_layers = golden["hidden"].shape[0] - 1
    config = write_config(
        tmp_path,
        GOLDEN / name / "model.gguf",
        {"a": 1, "b": 1},
        [f"0-{CUTS[name]}", f"{CUTS[name]}-{n_layers}"],
        '[engine]\ndtype = "float32"\nprefill_chunk = 32\n',
    )
    ids = golden["input_ids"].tolist()
    async with running(config, tmp_path, FACTOR.get(name, [])) as service:
        assert service.engine is not None
        await assert_golden(service, name, golden, ids)
        prompts = [ids[i : i + 11 * (i + 1)] for i in range(6)]
        alone = [await generate(service, p, 24) for p in prompts]
        together = await asyncio.gather(*(generate(service, p, 24) for p in prompts))
        for p, found, wanted in zip(prompts, together, alone, strict=True):
            assert_same_tokens(model_of(name)[0], p, found, wanted)
        pages = service.engine.statistics().pages
        assert {space: use.used for space, use in pages.items()} == dict.fromkeys(pages, 0)
