"""Requests under memory pressure: what they have computed goes to host memory and comes back, and no token changes.

Oracle: the same requests one after the other, in float32, where all have room.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.e2e.test_speculation import CASES, Case, config_of

N_TOKENS = 120
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.5),
)
ASKED = [([(7 * i + 3 * k) % 250 + 1 for i in range(120)], SAMPLINGS[k % 2]) for k in range(4)]
PLAIN = Case(CASES["qwen35-random"].model, "off")
FEW = ["engine.pages=14", "engine.max_sequences=4", "cache.min_tokens=64"]


async def all_at_once(service: Service) -> list[list[int]]:
    return await asyncio.gather(*(generate(service, prompt, N_TOKENS, how) for prompt, how in ASKED))


async def one_by_one(service: Service) -> list[list[int]]:
    return [await generate(service, prompt, N_TOKENS, how) for prompt, how in ASKED]


@pytest.mark.parametrize(
    ("case", "n_groups"),
    [
        slow(PLAIN, 1, id="recurrent, one group"),
        slow(CASES["mtp"], 2, id="recurrent, drafter, two groups"),
        pytest.param(
            Case(CASES["gemma4_e2b-random"].model, "off"), 2, id="sliding, two groups", marks=pytest.mark.slow
        ),
    ],
)
async def test_preempted_requests_go_on_where_they_were(tmp_path: Path, case: Case, n_groups: int) -> None:
    async with running(config_of(case, tmp_path, n_groups, "tail"), tmp_path, FEW) as service:
        right = await one_by_one(service)
        assert await all_at_once(service) == right
        assert service.engine is not None
        assert service.swap is not None
        now = service.engine.statistics()
        assert now.swapped == now.preemptions > 0
        assert service.swap.n_bytes == 0, "nobody waits any more"


@pytest.mark.slow
async def test_without_room_in_host_memory_they_compute_again(tmp_path: Path) -> None:
    few = [*FEW, "engine.swap_space=1KiB"]
    async with running(config_of(PLAIN, tmp_path, 1, "tail"), tmp_path, few) as service:
        right = await one_by_one(service)
        assert await all_at_once(service) == right
        assert service.engine is not None
        now = service.engine.statistics()
        assert now.preemptions > now.swapped == 0


async def test_layers_that_move_and_a_daemon_that_dies_meanwhile_change_no_token(tmp_path: Path) -> None:
    overrides = [*FEW, "recovery.spares=1", "recovery.restart_limit=99/60s"]
    async with running(config_of(PLAIN, tmp_path, 2, "tail"), tmp_path, overrides) as service:
        right = await one_by_one(service)
        assert service.engine is not None
        assert service.swap is not None
        for how in ("moves", "dies"):
            asked, n_swapped = asyncio.create_task(all_at_once(service)), service.engine.statistics().swapped
            while service.engine.statistics().swapped == n_swapped:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if how == "moves":
                split = load(service.config.file, [*overrides, "placement.target_layer_split=3,1"])
                await AdminOperations(service).reload(split)
            else:
                os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
            assert await asked == right, how
            assert service.swap.n_bytes == 0


@pytest.mark.slow
async def test_pages_that_kv_flash_ranks_come_back_where_they_were(tmp_path: Path) -> None:
    """The second request has pages in host memory when the first one takes its pages."""
    extra = '[kvflash]\npool_tokens = 512\npolicy = "qk"\n'
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"a": 1, "b": 1}, ["0-4", "4-8"], extra)
    few = ["engine.dtype=float32", "engine.max_context=900", "engine.pages=13", "engine.max_sequences=2"]
    asked = [([(k * i + 3) % 250 + 1 for i in range(n)], 250) for k, n in ((7, 230), (11, 600))]
    async with running(config, tmp_path, [*few, "cache.min_tokens=64"]) as service:
        right = [await generate(service, *one) for one in asked]
        assert await asyncio.gather(*(generate(service, *one) for one in asked)) == right
        assert service.engine is not None
        assert service.engine.statistics().swapped == 1
