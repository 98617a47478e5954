"""What daemons hold goes to host memory and from there to other daemons, whatever layers these have."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest

from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.kv_transfer.host_memory import HostMemory, HostMemoryShort
from lucevisor.kv_transfer.transfers import ExportedState, KvTransfer
from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.steps import SamplingParams
from tests.e2e.service import GOLDEN, generate, generate_all, running, write_config

PROMPT = list(range(1, 100))
SAMPLING = SamplingParams(temperature=0.8, seed=3)
MODEL = GOLDEN / "qwen35" / "model.gguf"


def test_more_than_half_of_the_free_memory_is_refused() -> None:
    layers, units = open_spec(MODEL).layers, {KvGroup.FULL: [0, 1, 5], KvGroup.RECURRENT: [2]}
    memory = HostMemory()
    state = ExportedState(memory, layers, Dtype.Q8_0, units)
    assert memory.used(HostOwner.EXPORTS) == state.n_bytes > 0
    state.close()
    state.close()
    assert memory.used(HostOwner.EXPORTS) == 0
    little = HostMemory(lambda: 2 * state.n_bytes - 1)
    with pytest.raises(HostMemoryShort, match="of host memory for exports are more than half"):
        ExportedState(little, layers, Dtype.Q8_0, units)


def test_a_drafter_is_taken_along_by_its_own_daemon() -> None:
    layers, units = open_spec(MODEL).layers, {KvGroup.FULL: [1, 5], KvGroup.RECURRENT: [3]}
    drafter = [layer for layer in layers if layer.kv_group is KvGroup.FULL][:1]
    exported = ExportedState(HostMemory(), layers, Dtype.FLOAT32, units, drafter)
    pages, state = (file for file, _ in exported.units)
    ours = pages.tensors(LayerRange(0, len(layers)))
    drafts = pages.draft_tensors()
    assert {tensor.name for tensor in drafts} == {f"draft.{drafter[0].index}.{kind}" for kind in ("k", "v")}
    assert not {tensor.name for tensor in ours} & {tensor.name for tensor in drafts}
    ends = sorted((t.offset, t.offset + t.n_bytes) for t in [*ours, *drafts, *state.contents])
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert not state.draft_tensors(), "it has no recurrent layer"
    assert exported.with_draft
    exported.close()


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
        await AdminOperations(service).restart_all(["a"], now=False)
        assert service.only.host_memory.used(HostOwner.EXPORTS) == 0
        assert service.only.engine.statistics().cache.n_slots == n_slots
        found, finished = await generate_all(service, PROMPT, 8, SAMPLING, turns=(64,))
        assert (found, finished.usage.cached_tokens) == (wanted, 64)


class Broken(ExportedState):
    """Memory that cannot be written, or is gone before it is read."""

    fails = ""

    async def save(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        if self.fails == "export":
            for file, _ in self.units:
                os.dup2(os.open(os.devnull, os.O_RDONLY), file.fd)
        await super().save(transfers, groups)

    async def load(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        os.ftruncate(self.units[0][0].fd, 0)
        await super().load(transfers, groups)


@pytest.mark.usefixtures("forked_daemons")
async def test_what_cannot_be_handed_over_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, MODEL, {"a": 1, "b": 1}, ["0-4", "4-8"], "[cache]\nmin_tokens = 8\n")
    async with running(config, tmp_path, ["engine.dtype=float32"]) as service:
        assert service.only.engine is not None
        wanted = await generate(service, PROMPT, 8, SAMPLING)
        monkeypatch.setattr("lucevisor.deployment.deployment.ExportedState", Broken)
        for fails in ("export", "import"):
            monkeypatch.setattr(Broken, "fails", fails)
            assert service.only.engine.statistics().cache.n_slots > 0
            await AdminOperations(service).restart_all(["b"], now=False)
            assert service.only.engine.statistics().recovery.n_kept == 0
            assert service.only.host_memory.used(HostOwner.EXPORTS) == 0
            assert await generate(service, PROMPT, 8, SAMPLING) == wanted
