"""Attention that reads host memory in place: what chunks that are copied first give, for slices side by side."""

from __future__ import annotations

import pytest
import torch

from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import HOST, Sequences
from daemons.kv.slice_group import GraphKey
from daemons.models.host_attention import HostAttention
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CloseSequence, OpenSequence, PageOut, SamplingParams, SetPages, Slice

LAYERS = (LayerSpec(0, Space.FULL, {}, attention_state(2, 32, 32)),)
SPEC = ModelSpec("test", "test", "F32", 16, 100, 4096, LAYERS, {}, {}, 0, None)
SIZES = PoolSizes(40, 0, 0, host_pages=30)
CPU = torch.device("cpu")


def opened(kv_dtype: Dtype, *, in_place: bool) -> tuple[Pools, Sequences]:
    """Three sequences: one with pages out among those that stay, one with all of them, one with most of them out."""
    torch.manual_seed(1)
    pools = Pools(SPEC, LayerRange(0, 1), CPU, kv_dtype, SIZES)
    slots = torch.arange(SIZES.full_pages * 64)
    for name in "kv":
        pools.paged(0, name).write(slots, torch.randn(len(slots), 2, 32))
    sequences = Sequences([pools], SIZES, 4, attend_host=True, in_place=in_place)
    operations = [OpenSequence(i, 0, SamplingParams()) for i in range(3)]
    operations += [SetPages(i, Space.FULL, 0, list(range(12 * i, 12 * i + 10))) for i in range(3)]
    operations += [PageOut(0, [1, 2, 5], [50, 47, 61]), PageOut(2, list(range(1, 8)), list(range(63, 70)))]
    operations += [PageOut(0, [7], [41])]
    for operation in operations:
        sequences.apply(operation)
    return pools, sequences


@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.Q8_0])
@pytest.mark.parametrize("n", [1, 3])
def test_host_memory_is_read_in_place(n: int, kv_dtype: Dtype) -> None:
    pytest.importorskip("triton")
    from daemons.ops.triton_operations import TritonOperations

    q = torch.randn(3, n, 8, 32)
    slices = [Slice(i, 10 * 64 - 9 * (i + 1), [1] * n, True) for i in range(3)]
    fused = TritonOperations().partial_attention(scale=0.2, softcap=0.0)
    found = []
    for in_place in (True, False):
        pools, sequences = opened(kv_dtype, in_place=in_place)
        sequences.flush()
        layout = Layout(slices, sequences, SPEC)
        assert layout.reads_in_place == in_place
        assert layout.graph_key == (GraphKey(3, n, 1024, 512) if in_place else None)
        [group] = Batch(layout, sequences.tables(CPU), layout.on(CPU)).groups
        pages = pools.paged(0, "k"), pools.paged(0, "v")
        found.append(HostAttention(*pages, fused if in_place else None, 0.2, 0.0)(group, q))
    assert float((found[0] - found[1]).abs().max()) <= 1e-5


def test_the_table_of_host_rows_follows_what_leaves() -> None:
    _, sequences = opened(Dtype.FLOAT32, in_place=True)
    sequences.flush()
    rows = {i: sequences.get(i, "here") for i in range(3)}
    assert sequences.tables(CPU)[HOST][rows[0].row, :4].tolist() == [1, 7, 10, 21]
    assert sequences.tables(CPU)[HOST][rows[2].row, :7].tolist() == list(range(23, 30))
    at = rows[2].row
    for operation in (CloseSequence(2), OpenSequence(5, 0, SamplingParams()), SetPages(5, Space.FULL, 0, [30, 31, 32])):
        sequences.apply(operation)
    sequences.apply(PageOut(5, [1], [69]))
    sequences.flush()
    assert sequences.get(5, "here").row == at
    assert sequences.tables(CPU)[HOST][at, 0].item() == 29
