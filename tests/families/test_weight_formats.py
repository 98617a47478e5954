"""Quantised files of every family: in every weight format the numbers are those of the dequantised file."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.check import run_check, with_sources
from daemons.device import CPU, torch_dtype
from daemons.models.shard import ShardConfig, ShardModel
from daemons.models.stage import LoadedStage
from daemons.ops.selection import KernelSelector
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import DENSE, NATIVE, WeightFormat, row_bytes
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import TensorLayout, TensorRole, shard_layouts
from lucevisor.protocol.loading import Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Check
from tests.daemons.tiny_models import write_data
from tests.families.pipeline import Pipeline, load_stages, pools_of
from tests.families.rounding import Formats, bounds, explained, middle_error
from tests.families.shapes import SMALL_GEMMA4_EXPERTS, SMALL_GEMMA4_INPUTS, SMALL_LAGUNA, Model
from tests.model import qwen35_file

HYBRID = qwen35_file.Shape(n_layers=4, feed_forward=256, vocabulary=320, n_experts=5, n_used=2)
MODELS = {
    "qwen35moe": Model("qwen35moe", qwen35_file.metadata(HYBRID), qwen35_file.tensors(HYBRID)),
    "gemma4 inputs": SMALL_GEMMA4_INPUTS,
    "gemma4 experts": SMALL_GEMMA4_EXPERTS,
    "laguna": SMALL_LAGUNA,
}
MIXES = {"k": ["Q4_K", "Q6_K", "Q5_K"], "four": ["Q4_K"], "old": ["Q8_0", "Q4_0"], "all": sorted(NATIVE)}
IDS = [(i * 31 + 7) % 320 for i in range(80)]


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")

    @cache
    def get(name: str, mix: str, expand: bool = False) -> ModelSpec:
        path = folder / f"{name}-{mix}-{expand}.gguf"
        return open_spec(write_data(Path(path), MODELS[name], MIXES[mix], expand=expand))

    return get


def with_formats_of(
    spec: ModelSpec, backend: Backend, dtype: Dtype = Dtype.FLOAT32, layer_split=(), *, kernels: bool = False
) -> list[LoadedStage]:
    """Stages with the weight formats of ``backend``, computed on the cpu."""
    boundaries = [0, *layer_split, spec.n_layers]
    stages = []
    for i, (a, b) in enumerate(pairwise(boundaries)):
        shard_plan, last = ShardPlan(0, LayerRange(a, b)), b == spec.n_layers
        plan = StagePlan(i, [shard_plan], None if i == 0 else i - 1, None if last else i, i == 0, last)
        config = ShardConfig(spec, shard_plan, i == 0, last, backend, dtype, dtype, pools_of(spec))
        with torch.inference_mode():
            shard = ShardModel(config, KernelSelector(CPU, torch_dtype(dtype), kernels), lambda done, total: None)
        load = Load([], dtype, dtype, [], [], pools_of(spec), 16, 512)
        stages.append(LoadedStage(spec, plan, load, [shard]))
        kept = shard_layouts(spec, shard_plan.layers, embedding=i == 0, output=last, backend=backend, dtype=dtype)
        assert_planned(shard.weight_bytes, kept)
    return stages


def assert_planned(n_bytes: int, kept: list[TensorLayout]) -> None:
    """The bytes that were planned, but for the padding of packed matrices, all or some of which may be missing.

    A cpu's C++ kernels keep quantised matrices at the size of their blocks and a little, within what was planned.
    """
    planned = sum(r.n_bytes for r in kept)
    tiled = {WeightFormat.INT4, WeightFormat.INT8, WeightFormat.BFLOAT16, WeightFormat.BLOCKS}
    packed = [
        r for r in kept
        if r.format is WeightFormat.PACKED
        or (r.format in tiled and r.kind.name not in DENSE and r.role is TensorRole.MATRIX)
    ]  # fmt: skip
    padding = sum(max(0, r.n_bytes - prod(r.shape[:-1]) * row_bytes(r.kind, r.shape[-1])) for r in packed)
    assert planned - padding <= n_bytes <= planned


def each_once(mixes: list[str]) -> list[object]:
    """All models with all mixes, of which each mix with some model runs always."""
    always = {(name, mixes[i % len(mixes)]) for i, name in enumerate(MODELS)}
    return [
        pytest.param(name, mix, marks=() if (name, mix) in always else pytest.mark.slow, id=f"{name}-{mix}")
        for name in MODELS
        for mix in mixes
    ]


def logits(spec: ModelSpec, stages: list[LoadedStage]) -> Tensor:
    c = Pipeline(spec, stages)
    c.open(0)
    return torch.cat((c.run((0, IDS[:70])), c.run_in_chunks(0, IDS[70:], 1)))


@pytest.mark.parametrize(("name", "mix"), each_once(["k", "all"]))
def test_float32_on_the_cpu_is_the_dequantised_file(name, mix, spec_of):
    exact = spec_of(name, mix, True)
    wanted = logits(exact, load_stages(exact))
    spec = spec_of(name, mix)
    assert torch.equal(logits(spec, load_stages(spec)), wanted)
    assert float(wanted.std()) > 0.1


@pytest.mark.parametrize(("name", "mix"), each_once(list(MIXES)))
def test_blocks_as_a_gpu_keeps_them_give_the_same_numbers(name, mix, spec_of):
    spec = spec_of(name, mix)
    bound = bounds(spec, IDS).logits
    for layer_split in ((), [b for b in range(1, spec.n_layers) if spec.legal_boundary(b)]):
        worst = bound.worst(logits(spec, with_formats_of(spec, Backend.CUDA, layer_split=layer_split)))
        assert worst <= 1.0, f"{worst:.2f} times as far from the exact logits as rounding explains"


@pytest.mark.parametrize(("name", "mix"), each_once(["k", "four", "old"]))
def test_bfloat16_on_the_cpu_keeps_experts_packed_and_stays_near(name, mix, spec_of):
    spec = spec_of(name, mix)
    stages = with_formats_of(spec, Backend.CPU, Dtype.BFLOAT16)
    if "inputs" not in name:
        chosen = {k: v for k, v in stages[0].kernels.items() if " experts " in k}
        assert chosen
        assert all("packed" in v or "tiles" in v for v in chosen.values()), chosen
        dense = sum(2 * torch.Size(shape).numel() for shape in MODELS[name].tensors.values())
        assert stages[0].usage()[0].weight_bytes < 0.7 * dense
    found = logits(spec, stages)
    exact = logits(spec, load_stages(spec))
    formats = Formats(Dtype.BFLOAT16, Dtype.BFLOAT16, packed=True)
    assert middle_error(found, exact) <= explained(spec, IDS, exact, formats)


def test_the_doctor_checks_layers_that_share_with_their_sources(tmp_path):
    path = write_data(tmp_path / "model.gguf", MODELS["gemma4 inputs"], ["Q8_0"])
    spec = open_spec(path)
    assert [str(with_sources(spec, i)) for i in range(6)] == ["[0,1)", "[1,2)", "[2,3)", "[3,4)", "[2,5)", "[2,6)"]
    for layer in range(6):
        [line] = run_check(Check([str(path)], layer, Dtype.FLOAT32), Backend.CPU, []).lines
        assert line.ok, line
