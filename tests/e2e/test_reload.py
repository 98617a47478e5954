"""Layers move between groups at run time beside eight streams: no request fails, no token differs.

Oracle: the same service before the first move, in float32, as in test_recovery.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lucevisor.config import Config, RestartLimit, load
from lucevisor.deployment import deployment as deployment_module
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.service import Service
from lucevisor.errors import ConfigErrors, LucevisorError
from lucevisor.kv_transfer.transfers import ExportedState
from lucevisor.placement.result import Infeasible, Placement
from tests.combinations import slow
from tests.e2e.service import TRANSPORTS
from tests.e2e.test_recovery import PLAIN, Streams, serving
from tests.e2e.test_speculation import CASES, Case, prompts_of

GEMMA = Case(CASES["gemma4_e2b-random"].model, "off")
GROUP = '[groups.{}]\nbackend = "cpu"\nthreads = 1\ntransport = "{}"\n'


def changed(service: Service, devices: Sequence[str], split: Sequence[float]) -> Config:
    """The running configuration with the layers, and the groups, on other devices."""
    file = service.config.file
    text = re.sub(r"\[groups\.[a-z]\]\n([a-z]+ = .*\n)*", "", file.read_text())
    transport = next(iter(service.config.groups.values())).transport
    groups = "".join(GROUP.format(name, transport) for name in dict.fromkeys(d.partition(":")[0] for d in devices))
    file.write_text(f"{text}\n{groups}")
    shares = ",".join(map(str, split))
    overrides = ["recovery.restart_limit=9999/60s", f"recovery.spares={service.config.recovery.spares}"]
    overrides += [f"placement.target_devices={','.join(devices)}", f"placement.target_layer_split={shares}"]
    return load(file, overrides)


def layers_of(service: Service) -> list[tuple[str, int, int]]:
    assert service.only.placement is not None
    return [(str(one.device), one.layers.start, one.layers.stop) for one in service.only.placement.devices]


SPLITS = (
    (["a:0", "b:0", "z:0"], [1.0, 1.0, 1.0]),  # another group
    (["a:0", "b:0"], [3.0, 1.0]),  # another split
    (["b:0"], [1.0]),  # all in one
    (["z:0", "a:0", "z:1"], [1.0, 1.0, 1.0]),  # two stages in one daemon
    (["a:0", "b:0"], [1.0, 1.0]),
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", [pytest.param(CASES["mtp"], id="mtp"), slow(GEMMA, id="sliding")])
async def test_moves_change_no_token(tmp_path: Path, case: Case, transport: str) -> None:
    async with serving(case, tmp_path, 2, transport=transport) as service:
        streams = Streams(service, prompts_of(case, 9))
        await streams.learn()
        async with streams.running():
            for devices, split in SPLITS[:2]:
                await asyncio.sleep(0.1)
                await AdminOperations(service).reload(changed(service, devices, split))
                assert [name for name, _, _ in layers_of(service)] == devices
        assert streams.wrong == []
        assert service.only.engine is not None
        now = service.only.engine.statistics().recovery
        assert (now.pauses["reload"].n, now.pauses["loss"].n) == (2, 0)
        assert now.n_kept > 0
        assert (now.n_rebuilt, now.n_recomputed) == (0, 0)
        assert service.only.engine.statistics().cache.n_slots > 0
        assert now.held == 0


async def test_what_cannot_be_reloaded_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(PLAIN, tmp_path, 2) as service:
        streams = Streams(service, prompts_of(PLAIN, 9))
        await streams.learn()
        before, pids = layers_of(service), [group.pid for group in service.groups.values()]
        wrong = load(service.config.file, ["engine.max_sequences=3", "model.name=other"])
        with pytest.raises(ConfigErrors) as caught:
            await AdminOperations(service).reload(wrong)
        assert [error.key for error in caught.value.errors] == ["model.name", "engine.max_sequences"]
        async with streams.running():
            config = changed(service, ["a:0", "b:0", "z:0"], [1.0, 1.0, 1.0])
            monkeypatch.setattr(Deployment, "_check_loaded", lambda _, group, __: "it is z" if group == "z" else "")
            limited = replace(config.recovery, restart_limit=RestartLimit(0, 60))
            with pytest.raises(LucevisorError, match="nothing is reloaded: group z is FAILED: it is z"):
                await AdminOperations(service).reload(replace(config, recovery=limited))
            monkeypatch.undo()
            monkeypatch.setattr("lucevisor.kv_transfer.transfers.ExportedState.load", fails)
            with pytest.raises(LucevisorError, match="the memory is gone"):
                await AdminOperations(service).reload(config)
        assert streams.wrong == []
        assert (layers_of(service), [group.pid for group in service.groups.values()]) == (before, pids)
        assert set(service.groups) == {"a", "b"}
        drain = load(config.file, [*config.overrides, "server.drain_s=7"])
        monkeypatch.undo()
        assert (await AdminOperations(service).reload(drain))["server.drain_s"] == 7
        assert len(layers_of(service)) == 3


async def test_where_both_do_not_fit_requests_wait_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices are full while the earlier daemons are there; the second time the new split fits in no case."""
    real, never = deployment_module.plan, False

    def plan(spec: object, config: Config, *more: object) -> Placement | Infeasible:
        result = real(spec, config, *more)  # type: ignore[arg-type]
        assert isinstance(result, Placement)
        moved = len(result.devices) == 3
        full = any(group.pid for group in service.only.deployment.groups.values())
        return Infeasible(result, (), ("the device is full",)) if moved and (full or never) else result

    async with serving(CASES["mtp"], tmp_path, 2) as service:
        monkeypatch.setattr(deployment_module, "plan", plan)
        streams = Streams(service, prompts_of(CASES["mtp"], 9))
        await streams.learn()
        before = layers_of(service)
        async with streams.running():
            await asyncio.sleep(0.2)
            await AdminOperations(service).reload(changed(service, ["a:0", "b:0", "z:0"], [1.0, 1.0, 1.0]))
            assert len(layers_of(service)) == 3
            await AdminOperations(service).reload(changed(service, ["a:0", "b:0"], [1.0, 1.0]))
            assert layers_of(service) == before
            never = True
            with pytest.raises(LucevisorError, match=r"nothing is reloaded: group \w is FAILED: the device is full"):
                await AdminOperations(service).reload(changed(service, ["a:0", "b:0", "z:0"], [1.0, 1.0, 1.0]))
            assert layers_of(service) == before
        assert streams.wrong == []
        assert service.only.engine is not None
        now = service.only.engine.statistics().recovery
        assert now.pauses["reload"].n == 3
        assert (now.n_rebuilt, now.n_recomputed) == (0, 0)


async def fails(state: ExportedState, *_: object) -> None:
    state.close()
    raise LucevisorError("the memory is gone")
