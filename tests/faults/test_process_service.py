"""The whole service over processes that misbehave: tiny daemons in the place of those with torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import load
from lucevisor.deployment import service as service_module
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest
from lucevisor.errors import LucevisorError
from lucevisor.protocol.steps import SamplingParams
from lucevisor.supervision.events import State
from tests.e2e.process import ROOT
from tests.supervision.real_groups import brisk, stage_tiny


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "stage_packages", stage_tiny)


def config_of(tmp_path: Path, limit: int = 5, **how: str) -> Path:
    """Two groups that each serve half of the demo model; ``how`` a group's daemon behaves, once."""
    text = f'[model]\npath = "{ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"}"\n'
    for name in ("left", "right"):
        text += f'[groups.{name}]\nbackend = "cpu"\nthreads = 1\n'
        text += f'env = {{ TINY = "{how.get(name, "")}", TINY_ONCE = "{tmp_path / name if limit > 1 else ""}" }}\n'
    text += '[placement]\ntarget_devices = ["left:0", "right:0"]\ntarget_layer_split = [0.5, 0.5]\n'
    text += f'[recovery]\nrestart_limit = "{limit}/60s"\nhold_s = 0\n'
    (tmp_path / "config.toml").write_text(text)
    return tmp_path / "config.toml"


@asynccontextmanager
async def serving(config_file: Path, directory: Path, **limits: float) -> AsyncIterator[Service]:
    config = load(config_file, [])
    service = Service(config, [open_model(config)], directory, Observer(), limits=brisk(**limits))
    try:
        await service.start()
        yield service
    finally:
        await service.stop(0.0, 0.5)


async def ask(service: Service) -> FinishedEvent:
    assert service.only.engine is not None
    request = GenerationRequest(request_id="r", prompt=(1, 2), max_tokens=4, sampling=SamplingParams(temperature=0.0))
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, FinishedEvent):
                return event
    raise AssertionError("the stream ended without a FinishedEvent")


async def test_a_daemon_that_hangs_in_a_reset_is_found(tmp_path):
    config = config_of(tmp_path, right="sleep at reset")
    async with serving(config, tmp_path, step_s=3.0) as service:
        right = service.groups["right"]
        await right.wait(State.READY, timeout_s=100)
        await right.wait(State.STOPPING, timeout_s=100)
        assert right.reason.startswith("a reset gave no result in ")
        assert await service.wait_ready(60.0), service.reason()
        assert service.groups["left"].restarts == 0


async def test_a_daemon_that_breaks_the_order_of_steps_counts_as_failed(tmp_path):
    """The tiny daemon answers every step as stage 0: the right one is wrong each time."""
    async with serving(config_of(tmp_path, limit=1), tmp_path) as service:
        assert await service.wait_ready(60.0), service.reason()
        right = service.groups["right"]
        end = await ask(service)
        assert end.error is not None
        assert "group right" in end.error.message
        await right.wait(State.BACKOFF, timeout_s=100)
        assert await service.wait_ready(60.0), service.reason()
        assert service.restart_reasons["right"] == {"failure": 1}
        await ask(service)
        await right.wait(State.FAILED, timeout_s=100)
        assert "StepResult is of stage 0, which it does not run" in service.reason()
        assert "restart limit 1/60s reached" in service.reason()
        assert service.groups["left"].restarts == 0


async def test_a_restart_that_waits_for_another_starts_nothing_during_a_stop(tmp_path):
    async with serving(config_of(tmp_path, left="sleep at reset"), tmp_path) as service:
        left, right = service.groups.values()
        await left.wait(State.READY, timeout_s=100)
        await right.wait(State.READY, timeout_s=100)
        orders = AdminOperations(service)
        first = asyncio.create_task(orders.restart_all(["right"], now=True))
        second = asyncio.create_task(orders.restart_all(["right"], now=True))
        await right.wait(State.STARTING, timeout_s=100)
        await service.stop(0.0, 0.5)
        for asked in (first, second):
            with pytest.raises(LucevisorError, match="stopping"):
                await asked
        assert [group.state for group in service.groups.values()] == [State.STOPPED] * 2
        assert right.pid is None


async def test_groups_that_failed_try_again_by_themselves_and_serve(tmp_path):
    config = config_of(tmp_path, left="poor", right="poor")
    async with serving(config, tmp_path, failed_first_s=0.5) as service:
        await service.changes.wait_for(lambda: all(group.state is State.FAILED for group in service.groups.values()))
        assert 0.0 <= service.retry_in_s() <= 0.5
        await service.changes.wait_for(lambda: service.state == "ready")
        assert [group.restarts for group in service.groups.values()] == [1, 1]


async def test_a_plan_that_did_not_fit_is_made_again_at_a_restart(tmp_path):
    """What filled a device may be gone by then."""
    async with serving(config_of(tmp_path, left="poor", right="poor"), tmp_path) as service:
        assert not await service.wait_ready(60.0)
        for group in service.groups.values():
            await group.wait(State.FAILED, timeout_s=100)
            assert "short" in group.reason
        await AdminOperations(service).restart_all(["left"], now=True)
        assert service.groups["left"].state is State.LOADING  # it waits for the other one
        await AdminOperations(service).restart_all(["right"], now=True)
        assert service.state == "ready"
        assert service.groups["left"].restarts == 1
