"""Two deployments at once: a later one loads while the earlier one serves, and takes over its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.deployment.deployment import Deployment, DeploymentHooks
from lucevisor.deployment.service import Service
from lucevisor.engine.request import RequestError
from lucevisor.supervision.launcher import LocalLauncher, stage_packages
from lucevisor.supervision.policy import SupervisionLimits
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.supervision.real_groups import until

MOVED = RequestError("shutting_down", "the model moves to other processes; send the request again")


def second(service: Service, directory: Path) -> Deployment:
    """An epoch of the same configuration that serves nobody yet."""

    async def drain() -> None:
        raise AssertionError("nobody restarts it")

    directory.mkdir(mode=0o700)
    hooks = DeploymentHooks(
        on_placed=lambda _: None,
        drain=drain,
        on_change=lambda: None,
        on_state=lambda *_: None,
        on_progress=lambda *_: None,
    )
    launcher = LocalLauncher(stage_packages(directory))
    return Deployment(2, service.config, service.model, service._weights, launcher, SupervisionLimits(), hooks)


@pytest.mark.usefixtures("forked_daemons")
async def test_a_later_epoch_loads_beside_the_one_that_serves_and_takes_its_engine_over(tmp_path):
    config = write_config(tmp_path, GOLDEN / "qwen3" / "model.gguf", {"left": 1, "right": 1}, ["0-2", "2-4"])
    async with running(config, tmp_path) as service:
        assert service.engine is not None
        prompt = [1, 2, 3, 4, 5]
        wanted = await generate(service, prompt, 8)
        earlier, later = service.deployment, second(service, tmp_path / "later")
        try:
            await later.start()
            await until(lambda: later.loaded)
            assert await generate(service, prompt, 8) == wanted  # the earlier one still serves
            assert earlier.complete
            assert not later.complete
            assert len({group.pid for group in (*earlier.groups.values(), *later.groups.values())}) == 4

            assert await service.engine.freezer.quiesce(10.0)
            earlier.detach(MOVED)
            service.deployment = later
            later.attach(service.engine)
            await until(lambda: later.complete)
            await earlier.stop(4.0)
            assert all(group.pid is None for group in earlier.groups.values())
            assert service.state == "ready"
            assert await generate(service, prompt, 8) == wanted
        finally:
            await later.stop(4.0)
            later.close()
            await earlier.stop(4.0)
            earlier.close()
