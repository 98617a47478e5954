"""A rehearsal runs layers of a load on zeros; the load takes the files that it opened, if they are the right ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from daemons.errors import LoadError
from daemons.identities import opened
from daemons.models import rehearsal
from daemons.models.rehearsal import of_other_types, rehearse, some_of_each_kind
from daemons.models.replay import WORK_BYTES, LayerwiseReplay
from lucevisor.model.gguf_files import open_model
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from tests.daemons.snapshot_pipeline import golden_spec

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def load_of(spec) -> Load:
    shard = ShardPlan(0, LayerRange(0, spec.n_layers))
    plan = StagePlan(0, [shard], None, None, embedding=True, output=True)
    paths = [str(path) for path in spec.files.paths]
    pools = PoolSizes(full_pages=2, window_pages=0, states=1)
    return Load(paths, Dtype.FLOAT32, Dtype.FLOAT32, [plan], [], pools, 1, 128)


@pytest.fixture
def on_a_device(monkeypatch):
    """The cpu plays an accelerator with so much memory."""

    def pretend(free: int) -> list[LayerwiseReplay]:
        made: list[LayerwiseReplay] = []
        real = rehearsal.layerwise_replays

        def noted(*args):
            found = real(*args)
            made.extend(found.values())
            return found

        monkeypatch.setattr(rehearsal, "layerwise_replays", noted)
        monkeypatch.setattr(rehearsal, "torch_device", lambda backend, index: torch.device("cpu"))
        monkeypatch.setattr(rehearsal, "memory_free", lambda device: free)
        monkeypatch.setattr(rehearsal.LoadedStage, "load", load_on_cpu(rehearsal.LoadedStage.load))
        monkeypatch.setattr(rehearsal.torch.cuda, "empty_cache", lambda: None)
        return made

    def load_on_cpu(real):
        def load(spec, plan, one, backend, *rest):
            return real(spec, plan, one, Backend.CPU, *rest)

        return load

    return pretend


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "qwen3"])
def test_some_layers_are_loaded_and_replayed(architecture, on_a_device):
    spec = golden_spec(architecture)
    made = on_a_device(100 * WORK_BYTES)
    done = rehearse(load_of(spec), Backend.CUDA, spec.files)
    assert done.problem == ""
    [replay] = made
    assert replay.sequences is not None  # computed: else the problem says why not
    # two chunks of eight sequences, what follows them, at most a chunk, and a token of each
    assert [s.n_tokens for s in replay.steps] == [0, *[128] * 21, 47, 21, 6, 8]


def test_fewer_rows_where_little_memory_is_free_and_kernels_alone_where_too_little_is(on_a_device, monkeypatch):
    spec = golden_spec("qwen35")
    made = on_a_device(9 * WORK_BYTES)
    assert rehearse(load_of(spec), Backend.CUDA, spec.files).problem == ""
    assert [s.n_tokens for s in made[0].steps] == [0, *[128] * 4, 128, 128, 2]  # two sequences
    kernels = []
    monkeypatch.setattr(rehearsal, "load_kernels", lambda spec, layers, *_: kernels.append(layers))
    for free, n_loaded in ((4 * WORK_BYTES, 1), (WORK_BYTES - 1, 1)):
        on_a_device(free)
        assert f"a quarter of the {free} that are free" in rehearse(load_of(spec), Backend.CUDA, spec.files).problem
        assert len(kernels) == n_loaded
    assert len(made) == 1


def test_what_fails_is_told(on_a_device, monkeypatch):
    spec = golden_spec("qwen35")
    on_a_device(100 * WORK_BYTES)

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(rehearsal.LoadedStage, "load", full)
    assert "OutOfMemoryError: no room" in rehearse(load_of(spec), Backend.CUDA, spec.files).problem


def test_a_cpu_loads_no_layers(monkeypatch):
    spec = golden_spec("qwen35")
    monkeypatch.setattr(rehearsal.LoadedStage, "load", None)
    assert rehearse(load_of(spec), Backend.CPU, spec.files).problem == ""


def test_layers_until_there_is_one_of_each_kind():
    spec = golden_spec("qwen35")
    kinds = [layer.space for layer in spec.layers]
    attention = kinds.index(Space.FULL)
    assert attention > 0
    assert some_of_each_kind(spec, LayerRange(0, spec.n_layers)) == LayerRange(0, attention + 1)
    assert some_of_each_kind(spec, LayerRange(attention, attention + 1)) == LayerRange(attention, attention + 1)


def test_a_layer_of_each_other_type_of_matrices_is_loaded():
    def layer(space, kind, shares_with=None):
        names = [f"blk.{len(layers)}.{name}" for name in ("up", "norm")]
        for name, shape in zip(names, ((8, 4), (4,)), strict=True):
            tensors[name] = SimpleNamespace(kind=SimpleNamespace(name=kind), shape=shape)
        layers.append(SimpleNamespace(space=space, tensors=[*names, "shared"], shares_with=shares_with))

    layers, tensors = [], {}
    for one in (
        (Space.FULL, "Q6_K"), (Space.FULL, "Q6_K"), (Space.FULL, "Q4_K"), (Space.FULL, "Q6_K"),
        (Space.RECURRENT, "Q4_K"), (Space.FULL, "Q4_K"), (Space.FULL, "Q5_K", 2),
    ):  # fmt: skip
        layer(*one)
    spec = SimpleNamespace(layers=layers, files=SimpleNamespace(tensors=tensors))
    found = of_other_types(spec, LayerRange(1, 7), LayerRange(1, 2))
    assert found == [LayerRange(2, 3), LayerRange(4, 5)]


def test_a_load_takes_the_files_of_its_rehearsal_only_if_they_are_those_it_names(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "qwen35" / "model.gguf", path)
    before = open_model([path])
    load = Load([str(path)], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 128)
    named = replace(load, identities=list(before.identities))
    assert opened(named, before) is before
    assert opened(load, before) is not before  # nothing says that it is still the same
    other = tmp_path / "other.gguf"
    shutil.copy(path, other)
    os.replace(other, path)
    assert opened(load, before).identities != before.identities
    with pytest.raises(LoadError, match="changed or replaced"):
        opened(named, None)
