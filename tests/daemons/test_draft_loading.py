"""A daemon loads the drafter that was planned, takes the memory that was planned, and serves without it if it must."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from daemons.errors import LoadError
from daemons.runner import ModelRunner
from lucevisor.config import CacheConfig
from lucevisor.model.drafters import draft_paths, open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.values import Backend, Space
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.arena import Arena, descriptors
from lucevisor.protocol.loading import Load, Loaded
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step
from tests.combinations import combinations
from tests.daemons.test_loading import Reporter
from tests.model.drafter_files import DFLASH2, DFLASH2_CONFIG, MTP, TARGET, UPSTREAM, checkpoint
from tests.placement.made import configure

SIZES = {"pages": 6, "max_context": 128, "max_sequences": 2, "prefill_chunk": 64}


def placed(folder: Path, model: Path, draft: dict[str, object], devices: list[str], **engine: object) -> Placement:
    spec = open_spec(model)
    path = Path(str(draft["path"])) if "path" in draft else None
    assert spec.files is not None
    files = spec.files if path is None else open_draft(draft_paths(path))
    drafter = read_draft_spec(files, spec, str(draft["kind"]))
    config = configure(folder, devices, [1] * len(devices), draft, **(SIZES | engine))
    config = replace(config, cache=CacheConfig(prefix_slots=2, states=str(draft.get("states", "device"))))  # type: ignore[arg-type]
    result = plan(spec, config, drafter=drafter)
    assert isinstance(result, Placement)
    return result


def loaded(placement: Placement, group: str, model: Path, drafter: Path) -> tuple[ModelRunner, Loaded]:
    files = LoadFiles([str(path) for path in draft_paths(drafter)])
    return run(load_message(placement, group, LoadFiles([str(model)]), 1, files))


def run(load: Load) -> tuple[ModelRunner, Loaded]:
    arenas = [Arena.create(arena) for arena in load.arenas]
    fds = [os.dup(fd) for fd in descriptors(arenas)]  # those of a daemon, which are its own
    for arena in arenas:
        arena.close()
    return ModelRunner.load(load, Backend.CPU, fds, Reporter())  # type: ignore[arg-type]


WHERE = (
    (["left:0", "right:0"], {}),
    (["left:0"], {}),
    (["left:0", "left:1"], {"device": "left:0"}),
    (["left:0", "right:0"], {"device": "left:0"}),
    (["left:0", "right:0"], {"device": "draft:0"}),
)
DRAFTERS = ((TARGET, UPSTREAM, "dflash"), (TARGET, DFLASH2, "dflash"), (MTP, MTP, "mtp"))


@combinations(dtype=["float32", "bfloat16"], where=range(len(WHERE)), drafter=range(len(DRAFTERS)))
def test_a_drafter_takes_the_memory_that_was_planned(tmp_path, drafter, where, dtype):
    (model, path, kind), (devices, draft) = DRAFTERS[drafter], WHERE[where]
    asked = {"kind": kind} | draft | ({} if model == path else {"path": str(path)})
    placement = placed(tmp_path, model, asked, devices, dtype=dtype)
    assert placement.draft is not None
    assert placement.draft_device is not None
    runner, answer = loaded(placement, placement.draft.group, model, path)
    assert answer.draft is not None
    assert answer.draft_problem == ""
    assert (answer.draft.layers, answer.draft.weight_bytes, answer.draft.state_bytes) == (
        placement.draft_device.layers,
        placement.draft_device.weight_bytes,
        placement.draft_device.state_bytes,
    )
    stages = placement.stages_of(placement.draft.group)
    assert [use.layers for use in answer.shards] == [shard.layers for stage in stages for shard in stage.shards]
    assert sorted(runner.stages) == [stage.index for stage in stages]


def test_states_of_a_drafter_are_where_those_of_the_model_are(tmp_path):
    placement = placed(tmp_path, MTP, {"kind": "mtp"}, ["left:0"], dtype="float32")
    _, on_device = loaded(placement, "left", MTP, MTP)
    pools = replace(placement, pools=msgspec.structs.replace(placement.pools, host_states=2))
    _, in_host = loaded(pools, "left", MTP, MTP)
    assert on_device.draft is not None
    assert in_host.draft is not None
    width = open_spec(MTP).hidden_size
    assert on_device.draft.state_bytes - in_host.draft.state_bytes == in_host.draft.host_state_bytes == 2 * width * 4


def test_the_files_that_were_read_are_told_the_drafters_last(tmp_path):
    folder = checkpoint(tmp_path / "hf", DFLASH2, DFLASH2_CONFIG)
    placement = placed(tmp_path, TARGET, {"kind": "dflash", "path": str(folder)}, ["left:0"], dtype="float32")
    _, answer = loaded(placement, "left", TARGET, folder)
    model, drafter = open_spec(TARGET).files, open_draft(draft_paths(folder))
    assert model is not None
    assert answer.identities == [*model.identities, *drafter.identities]


def broken(drafter: Path, how: str) -> None:
    if how == "gone":
        drafter.unlink()
    elif how == "cut":
        drafter.write_bytes(drafter.read_bytes()[:-1000])
    else:
        shutil.copyfile(TARGET, drafter)


@pytest.mark.parametrize("how", ["gone", "cut", "another"])
def test_the_output_stage_serves_without_a_drafter_that_cannot_be_loaded(tmp_path, how):
    drafter = Path(shutil.copy(UPSTREAM, tmp_path / "d.gguf"))
    placement = placed(tmp_path, TARGET, {"kind": "dflash", "path": str(drafter)}, ["left:0"], dtype="float32")
    broken(drafter, how)
    runner, answer = loaded(placement, "left", TARGET, drafter)
    assert answer.draft is None
    assert answer.draft_problem.startswith("the drafter cannot be loaded: ")
    assert "d.gguf" in answer.draft_problem
    operations = [OpenSequence(0, 0, SamplingParams(temperature=0.0)), SetPages(0, Space.FULL, 0, [0])]
    output = runner.run_step(Step(1, 0, operations, [Slice(0, 0, [5, 6, 7], sample=True)]), 0, 0.0)
    assert len(output.result.sampled) == 1
    runner.reset()


@pytest.mark.parametrize("how", ["gone", "another"])
def test_a_daemon_that_is_there_for_the_drafter_fails_without_it(tmp_path, how):
    drafter = Path(shutil.copy(UPSTREAM, tmp_path / "d.gguf"))
    draft = {"kind": "dflash", "path": str(drafter), "device": "draft:0"}
    placement = placed(tmp_path, TARGET, draft, ["left:0"], dtype="float32")
    broken(drafter, how)
    with pytest.raises((GgufError, LoadError, OSError), match=r"d\.gguf|No such file"):
        loaded(placement, "draft", TARGET, drafter)
