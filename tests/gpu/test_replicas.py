"""Two replicas on GPUs, one of which is killed: on a GPU each where there are two, else both on the first.

Oracle: a service of one cpu group, in float32; tokens may part where rounding may swap their rivals.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from lucevisor.model.families import open_spec
from tests.e2e.service import DEMO
from tests.e2e.test_replicas import SAMPLINGS, all_at_once, replica_of, replicated
from tests.families.rounding import assert_same_tokens
from tests.gpu.test_service import BACKEND, HELD_OUT, plain
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


async def test_a_killed_replica_gives_its_streams_to_the_other(tmp_path: Path) -> None:
    wanted = await plain(DEMO, tmp_path, HELD_OUT)
    (tmp_path / "gpu").mkdir()
    text = f'[model]\npath = "{DEMO}"\n[engine]\ndtype = "float32"\nmax_sequences = 8\npages = 400\n'
    text += '[draft]\nkind = "off"\n'
    for i, name in enumerate("ab"):
        device = min(i, torch.cuda.device_count() - 1)
        text += f'[groups.{name}]\nbackend = "{BACKEND}"\nvisible_devices = ["{device}"]\n'
        text += f'[replicas.{name}]\ngroups = ["{name}"]\n'
    asked = [(prompt, SAMPLINGS[0]) for prompt in HELD_OUT]
    async with replicated(tmp_path / "gpu", text) as service:
        assert service.replicated is not None
        for killed in ("", "a", "b"):
            streams = asyncio.create_task(all_at_once(service, asked))
            if killed:
                engine, [group] = service.replicated.replicas[killed], replica_of(service, killed).groups.values()
                n_before = engine.statistics().generated_tokens
                await until(lambda: engine.statistics().generated_tokens > n_before + 8)  # noqa: B023
                assert group.pid is not None
                os.kill(group.pid, signal.SIGKILL)
            for prompt, found, expected in zip(HELD_OUT, await streams, wanted, strict=True):
                n = min(len(found), len(expected))
                assert_same_tokens(open_spec(DEMO), prompt, found[:n], expected[:n])
            await until(lambda: all(model.state == "ready" for model in service.models.values()))
        assert all(n > 0 for n in service.replicated.router.n_moved.values())
