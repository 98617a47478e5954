"""The planner's workspace bounds what a daemon takes of a GPU while it warms up, and is not far above it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.runner import ModelRunner
from lucevisor.config import DeviceRef
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.placement.cost import CostModel, StepSizes
from lucevisor.placement.gpu_workspace import BLAS_BYTES
from lucevisor.placement.result import Shard
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from tests.daemons.test_gpu_workspace import DENSE, EXPERTS
from tests.daemons.test_run_ahead import Reporter
from tests.model.qwen35_file import Shape, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

GPU = Backend.HIP if torch.version.hip else Backend.CUDA
N_SEQUENCES, MAX_TOKENS, CONTEXT = 64, 2112, 65536


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_peak_of_a_warm_up_is_planned(shape: Shape, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", shape)
    spec = open_spec(path)
    layers = LayerRange(0, spec.n_layers)
    pools = PoolSizes(full_pages=CONTEXT // 64 + 1, window_pages=0, states=N_SEQUENCES)
    plan = StagePlan(0, [ShardPlan(0, layers)], None, None, embedding=True, output=True)
    sizes = {"max_sequences": N_SEQUENCES, "max_step_tokens": MAX_TOKENS, "max_attended": CONTEXT}
    load = Load([str(path)], Dtype.BFLOAT16, Dtype.BFLOAT16, [plan], [], pools, **sizes)
    _, loaded = ModelRunner.load(load, GPU, [], Reporter())  # type: ignore[arg-type]
    cost, shard = CostModel(spec, Dtype.BFLOAT16, Dtype.BFLOAT16), Shard(DeviceRef("gpu", 0), GPU, layers, True, True)
    steps = StepSizes(MAX_TOKENS, N_SEQUENCES, CONTEXT, CONTEXT, N_SEQUENCES, pools, sampled_rows=N_SEQUENCES)
    planned, measured = cost.workspace_bytes(shard, steps), loaded.workspace_bytes[0]
    print(f"planned {planned}, measured {measured}")
    rounded = 64 << 20  # what torch has beside weights, of which a small model has more than its share
    assert 0.6 * (planned - BLAS_BYTES) < measured <= planned + rounded
