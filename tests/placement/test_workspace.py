"""The memory that is planned for a step's temporaries."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from lucevisor.config import DeviceRef
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.workspace import GRAPH_LENGTH, GRAPH_ROWS
from lucevisor.placement.cost import CostModel, StepSizes
from lucevisor.placement.result import Shard
from lucevisor.protocol.loading import PoolSizes


def test_graphs_of_chunks_have_memory_of_their_own(demo):
    """Beside that of an eager step, on GPUs, where keys and values can be written without pad rows."""
    layers = LayerRange(0, demo.n_layers)
    pools = PoolSizes(64, 64, 4)
    steps = StepSizes(512, 4, 4096, 4096, 4, pools)

    def workspace(steps: StepSizes, backend: Backend = Backend.CUDA, kv_dtype: Dtype = Dtype.BFLOAT16) -> int:
        shard = Shard(DeviceRef("cuda", 0), backend, layers, first=True, last=True)
        return CostModel(demo, Dtype.BFLOAT16, kv_dtype).workspace_bytes(shard, steps)

    def eager(steps: StepSizes) -> int:
        with mock.patch.object(CostModel, "_graph_bytes", return_value=0):
            return workspace(steps)

    def of_graphs(steps: StepSizes) -> int:
        return workspace(steps) - eager(steps)

    rows = 512 * demo.boundary_width * 2
    assert of_graphs(steps) > 2 * rows
    assert of_graphs(replace(steps, max_tokens=GRAPH_ROWS)) > of_graphs(steps)
    assert of_graphs(replace(steps, max_tokens=2 * GRAPH_ROWS)) == of_graphs(replace(steps, max_tokens=GRAPH_ROWS))
    longer = replace(steps, resident=GRAPH_LENGTH, max_context=1 << 20)
    assert of_graphs(replace(longer, resident=1 << 20)) == of_graphs(longer)
    with mock.patch.object(CostModel, "_graph_bytes", side_effect=AssertionError):
        workspace(steps, Backend.CPU)
        workspace(steps, kv_dtype=Dtype.Q8_0)
