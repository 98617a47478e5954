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
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.service import generate, running
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
        assert service.only.engine is not None
        now = service.only.engine.statistics()
        assert now.swapped == now.preemptions > 0
        assert service.only.host_memory.used(HostOwner.SWAP) == 0, "nobody waits any more"


async def test_layers_that_move_and_a_daemon_that_dies_meanwhile_change_no_token(tmp_path: Path) -> None:
    overrides = [*FEW, "recovery.spares=1", "recovery.restart_limit=99/60s"]
    async with running(config_of(PLAIN, tmp_path, 2, "tail"), tmp_path, overrides) as service:
        right = await one_by_one(service)
        assert service.only.engine is not None
        for how in ("moves", "dies"):
            asked, n_swapped = asyncio.create_task(all_at_once(service)), service.only.engine.statistics().swapped
            while service.only.engine.statistics().swapped == n_swapped:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if how == "moves":
                split = load(service.config.file, [*overrides, "placement.target_layer_split=3,1"])
                await AdminOperations(service).reload(split)
            else:
                os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
            assert await asked == right, how
            assert service.only.host_memory.used(HostOwner.SWAP) == 0
