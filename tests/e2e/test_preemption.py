"""Requests under memory pressure: what they have computed goes to host memory and comes back, and no token changes.

Oracle: the same requests one after the other, in float32, where all have room.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.service import generate, restore_always, running
from tests.e2e.test_speculation import CASES, Case, config_of

N_PROMPT = N_TOKENS = 120
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.5),
)
ASKED = [([(7 * i + 3 * k) % 250 + 1 for i in range(N_PROMPT)], SAMPLINGS[k % 2]) for k in range(4)]
PLAIN = Case(CASES["qwen35-random"].model, "off")
FEW = ["engine.pages=10", "engine.max_sequences=4", "cache.min_tokens=64", "cache.host=64MiB"]


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
        restore_always(service)
        right = await one_by_one(service)
        assert service.only.engine is not None
        assert service.only.snapshots is not None
        host = service.only.snapshots.host
        assert host is not None
        with patch.object(host, "touch", wraps=host.touch) as read:
            assert await all_at_once(service) == right
        assert service.only.engine.statistics().preemptions > 0
        assert any(call.args[0].n_tokens > N_PROMPT for call in read.call_args_list)


async def test_layers_that_move_and_a_daemon_that_dies_meanwhile_change_no_token(tmp_path: Path) -> None:
    overrides = [*FEW, "recovery.spares=1", "recovery.restart_limit=99/60s"]
    async with running(config_of(PLAIN, tmp_path, 2, "tail"), tmp_path, overrides) as service:
        right = await one_by_one(service)
        assert service.only.engine is not None
        for how in ("moves", "dies"):
            asked, before = asyncio.create_task(all_at_once(service)), service.only.engine.statistics().preemptions
            while service.only.engine.statistics().preemptions == before:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if how == "moves":
                split = load(service.config.file, [*overrides, "placement.target_layer_split=3,1"])
                await AdminOperations(service).reload(split)
            else:
                os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
            assert await asked == right, how
