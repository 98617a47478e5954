"""Whole services whose groups are on a GPU: placed, loaded, drafting, cut in three, and with a daemon that is killed.

Oracle: a service of one cpu group without drafts, in float32; tokens may part where rounding may swap their rivals.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.supervision.events import State
from tests.e2e.service import DATA, DEMO, GOLDEN, generate_all, running, write_config
from tests.families.rounding import assert_same_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]

BACKEND = "cuda" if torch.version.hip is None else "hip"
FLOAT32 = "engine.dtype=float32"
N = 48
HELD_OUT = [one["tokens"] for one in json.loads((DATA / "demo-prompts.json").read_text())][:8]
RANDOM = [[(i * 37 + n * 11 + 3) % 256 for i in range(20 + n)] for n in range(8)]


def on_gpu(*groups: str) -> list[str]:
    return [FLOAT32, *(f"groups.{name}.backend={BACKEND}" for name in groups)]


async def answers(service: Service, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy answers to all prompts at a time; an end of turn ends one."""
    found = await asyncio.gather(*(generate_all(service, prompt, N) for prompt in prompts))
    return [tokens for tokens, _ in found]


async def plain(model: Path, tmp_path: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    (tmp_path / "plain").mkdir()
    config = write_config(tmp_path, model, {"a": 1}, [f"0-{open_spec(model).n_layers}"])
    async with running(config, tmp_path / "plain", [FLOAT32, "draft.kind=off"]) as service:
        return await answers(service, prompts)


async def drafting(service: Service) -> None:
    assert service.only.engine is not None
    while not service.only.engine.core.scheduler.drafting.attached:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.05)


def n_verified(service: Service) -> int:
    """Verify steps so far."""
    assert service.only.engine is not None
    return service.only.engine.statistics().drafts.n_verify


async def test_the_demo_with_its_drafter(tmp_path: Path) -> None:
    """Two daemons on one device; the output stage's is killed while it drafts."""
    wanted = await plain(DEMO, tmp_path, HELD_OUT)
    (tmp_path / "gpu").mkdir()
    config = DEMO.parents[1] / "demo.toml"
    async with running(config, tmp_path / "gpu", [*on_gpu("left", "right"), "draft.width=3"]) as service:
        assert service.only.engine is not None
        await drafting(service)
        for killed in (False, True):
            n_before = n_verified(service)
            asked = asyncio.create_task(answers(service, HELD_OUT))
            while killed and n_verified(service) < n_before + 5:
                assert not asked.done()
                await asyncio.sleep(0.001)
            if killed:
                os.kill(service.groups["right"].pid or 0, signal.SIGKILL)
            for prompt, found, expected in zip(HELD_OUT, await asked, wanted, strict=True):
                assert_same_tokens(open_spec(DEMO), prompt, found, expected)
            assert n_verified(service) > n_before
        assert service.groups["right"].state is State.READY


@pytest.mark.parametrize("name", ["qwen35", "gemma4_e2b", "laguna_mscale"])
async def test_three_groups(name: str, tmp_path: Path) -> None:
    """Steps run ahead of their tokens, which only the first stage is told."""
    model = GOLDEN / name / "model.gguf"
    wanted = await plain(model, tmp_path, RANDOM)
    (tmp_path / "gpu").mkdir()
    ranges = ["0-1", "1-2", f"2-{open_spec(model).n_layers}"]
    config = write_config(tmp_path, model, {"a": 1, "b": 1, "c": 1}, ranges)
    async with running(config, tmp_path / "gpu", [*on_gpu("a", "b", "c"), "draft.kind=lookup"]) as service:
        for prompt, found, expected in zip(RANDOM, await answers(service, RANDOM), wanted, strict=True):
            assert_same_tokens(open_spec(model), prompt, found, expected)
