"""Acceptance of drafts does not drop behind a restored prefix or a lost daemon: the same prompts, the same drafter."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.engine.spec_decode.statistics import DraftCounts, PrefixOrigin
from tests.e2e.service import generate_all, running
from tests.e2e.snapshot_service import snapshots_of
from tests.e2e.test_speculation import CASES, config_of, prompts_of

CASE = CASES["mtp"]
N_TOKENS = 40
AS_GOOD = 0.8
"""Of the acceptance without a fault: steps begin at other positions, so single drafts differ."""


def drafts(service: Service, origin: PrefixOrigin) -> DraftCounts:
    assert service.engine is not None
    return service.engine.statistics().drafts.by_origin[origin]


async def answers(service: Service, prompts: list[list[int]]) -> list[list[int]]:
    done = await asyncio.gather(*(generate_all(service, one, N_TOKENS, turns=[len(one) - 1]) for one in prompts))
    return [tokens for tokens, _ in done]


@pytest.mark.slow
async def test_restored_and_recovered_sequences_accept_as_many_drafts_as_fresh_ones(tmp_path: Path) -> None:
    prompts = prompts_of(CASE, 3)  # those that the drafter knows
    config = config_of(CASE, tmp_path, 2, "tail", tmp_path / "cache")
    async with running(config, tmp_path) as service:
        right = await answers(service, prompts)
        fresh = drafts(service, "fresh").acceptance_length
        assert fresh > 1.2
        await snapshots_of(service).save_all(60.0)
    async with running(config, tmp_path) as service:
        assert await answers(service, prompts) == right
        restored = drafts(service, "restored")
        assert restored.n_verify > 0
        assert restored.acceptance_length > AS_GOOD * fresh
        pid = service.groups["b"].pid  # the drafter's daemon
        asked = asyncio.create_task(answers(service, prompts))
        # One that begins after the loss goes on from a slot whose drafter context is lost.
        while service.engine is None or service.engine.statistics().running < len(prompts):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        os.kill(pid or 0, signal.SIGKILL)
        assert await asked == right
        recovered = drafts(service, "recovered")
        assert recovered.n_verify > 0
        assert recovered.acceptance_length > AS_GOOD * fresh
