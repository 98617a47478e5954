"""What daemons hold goes to host memory and from there to other daemons, whatever layers these have."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from lucevisor.deployment import state_memory
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.deployment.state_memory import ReplacementState, StateMemory
from lucevisor.engine.recovery import StateReplay
from lucevisor.errors import LucevisorError
from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import Load, PoolSizes, StageReplay
from lucevisor.protocol.steps import SamplingParams
from lucevisor.snapshots.transfers import ShardTransfers
from tests.e2e.service import GOLDEN, generate, generate_all, running, write_config

PROMPT = list(range(1, 100))
SAMPLING = SamplingParams(temperature=0.8, seed=3)
MODEL = GOLDEN / "qwen35" / "model.gguf"


def test_more_than_half_of_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = open_spec(MODEL).layers
    units = {Space.FULL: [0, 1, 5], Space.RECURRENT: [2]}
    memory = StateMemory(layers, Dtype.Q8_0, units)
    n_bytes, fd = memory.n_bytes, memory._fd
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)

    class Little:
        available = 2 * n_bytes - 1

    monkeypatch.setattr(state_memory.psutil, "virtual_memory", Little)
    with pytest.raises(LucevisorError, match=f"takes {n_bytes} bytes, {2 * n_bytes - 1} of host memory are free"):
        StateMemory(layers, Dtype.Q8_0, units)


def test_a_drafter_is_taken_along_by_its_own_daemon() -> None:
    layers, units = open_spec(MODEL).layers, {Space.FULL: [1, 5], Space.RECURRENT: [3]}
    drafter = [layer for layer in layers if layer.space is Space.FULL][:1]
    memory = StateMemory(layers, Dtype.FLOAT32, units, drafter)
    pages, state = (file for _, file in memory.parts)
    ours = pages.tensors(LayerRange(0, len(layers)))
    drafts = pages.draft_tensors()
    assert {tensor.name for tensor in drafts} == {f"draft.{drafter[0].index}.{kind}" for kind in ("k", "v")}
    assert not {tensor.name for tensor in ours} & {tensor.name for tensor in drafts}
    ends = sorted((tensor.offset, tensor.offset + tensor.n_bytes) for tensor in [*ours, *drafts])
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert not state.draft_tensors(), "it has no recurrent layer"
    assert memory.with_draft
    memory.close()


@pytest.mark.usefixtures("forked_daemons")
@pytest.mark.parametrize("kv_dtype", ["q8_0", "float32"])
async def test_a_restart_without_requests_keeps_prefix_slots(tmp_path: Path, kv_dtype: str) -> None:
    config = write_config(tmp_path, MODEL, {"a": 1}, ["0-8"], "[cache]\nmin_tokens = 8\n")
    overrides = ["engine.dtype=float32", f"engine.kv_dtype={kv_dtype}", "engine.prefill_chunk=64"]
    async with running(config, tmp_path, overrides) as service:
        assert service.only.engine is not None
        wanted, _ = await generate_all(service, PROMPT, 8, SAMPLING, turns=(64,))
        n_slots = service.only.engine.statistics().cache.n_slots
        assert n_slots > 0
        await AdminOperations(service).restart("a", now=False)
        assert service.only.engine.statistics().cache.n_slots == n_slots
        found, finished = await generate_all(service, PROMPT, 8, SAMPLING, turns=(64,))
        assert (found, finished.usage.cached_tokens) == (wanted, 64)


class Broken(StateMemory):
    """Memory that cannot be written, or is gone before it is read."""

    fails = ""

    async def save(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        if self.fails == "export":
            os.dup2(os.open(os.devnull, os.O_RDONLY), self._fd)
        await super().save(transfers, groups)

    async def restore(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        os.ftruncate(self._fd, 0)
        await super().restore(transfers, groups)


@pytest.mark.usefixtures("forked_daemons")
async def test_what_cannot_be_handed_over_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, MODEL, {"a": 1, "b": 1}, ["0-4", "4-8"], "[cache]\nmin_tokens = 8\n")
    async with running(config, tmp_path, ["engine.dtype=float32"]) as service:
        assert service.only.engine is not None
        wanted = await generate(service, PROMPT, 8, SAMPLING)
        monkeypatch.setattr("lucevisor.deployment.state_memory.StateMemory", Broken)
        for fails in ("export", "import"):
            monkeypatch.setattr(Broken, "fails", fails)
            assert service.only.engine.statistics().cache.n_slots > 0
            await AdminOperations(service).restart("b", now=False)
            assert service.only.engine.statistics().recovery.n_kept == 0
            assert await generate(service, PROMPT, 8, SAMPLING) == wanted


# ---- replay in the load of a replacement


LOAD = Load(["model.gguf"], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 128)


class LostPipeline:
    """Requests wait for group `lost`, whose next daemon is to replay a step."""

    complete, holding = False, True

    async def replay(self, group: str, _timeout_s: float) -> StateReplay | None:
        return StateReplay([StageReplay(0, [])], os.memfd_create(group)) if group == "lost" else None


@pytest.mark.parametrize(
    "read_or_dropped",
    [
        lambda state: state.take("lost"),
        lambda state: state.drop("lost"),
        lambda state: state.close(),
        lambda state: asyncio.run(state.load_order("lost", LOAD, None)),
    ],
)
def test_a_replay_goes_with_the_load_and_its_file_is_closed(
    read_or_dropped: Callable[[ReplacementState], None],
) -> None:
    state, assembly = ReplacementState([]), cast(PipelineAssembly, LostPipeline())
    order = asyncio.run(state.load_order("lost", LOAD, assembly))
    assert order.load.replay == [StageReplay(0, [])]
    assert not order.load.warm_up
    [file] = order.fds
    inode = os.fstat(file).st_ino
    read_or_dropped(state)
    with contextlib.suppress(OSError):
        assert os.fstat(file).st_ino != inode  # the number may be another file's by now
    other = asyncio.run(state.load_order("other", LOAD, assembly))
    assert (other.load.replay, other.load.warm_up, other.fds) == ([], False, ())
