"""The attention kernel over tables that pages left: it reads what plain torch gathers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.device import CPU
from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.attention import reference
from daemons.ops.triton.paged_attention import paged_attention
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import OpenSequence, PageOut, SamplingParams, SetPages, Slice

SIZES = PoolSizes(16, 0, 0)
HEADS, KV_HEADS, WIDTH = 4, 2, 16


@pytest.mark.parametrize("n", [1, 3])
def test_pages_that_left_are_not_read(n: int) -> None:
    torch.manual_seed(1)
    layers = (LayerSpec(0, KvGroup.FULL, {}, attention_state(KV_HEADS, WIDTH, WIDTH)),)
    spec = ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 0, None)
    pools = Pools(spec, LayerRange(0, 1), CPU, Dtype.FLOAT32, SIZES)
    sequences = Sequences([pools], SIZES, max_sequences=3)
    pages = {1: [3, 9, 2, 8, 5, 11], 2: [0, 1], 3: [4, 10, 6, 7]}
    for s, ids in pages.items():
        sequences.apply(OpenSequence(s, 0, SamplingParams()))
        sequences.apply(SetPages(s, KvGroup.FULL, 0, ids))
    sequences.apply(PageOut(1, [1, 2, 3]))
    sequences.apply(PageOut(3, [1]))
    sequences.flush()
    keys, values = pools.paged(0, "k"), pools.paged(0, "v")
    for pool in (keys, values):
        pool.write(torch.arange(16 * 64), torch.randn(16 * 64, KV_HEADS, WIDTH))
        for page in (9, 2, 8, 10):
            pool.write(torch.arange(64) + 64 * page, torch.full((64, KV_HEADS, WIDTH), torch.nan))
    starts = {1: 5 * 64 + 7, 2: 70, 3: 3 * 64 + 61}
    layout = Layout([Slice(s, start, [1] * n, True) for s, start in starts.items()], sequences, spec)
    [group] = Batch(layout, sequences.tables(CPU), layout.on(CPU)).groups
    q = torch.randn(3, n, HEADS, WIDTH)
    read, mask = group.keys(KvGroup.FULL, 0)
    wanted = torch.zeros(3, n, HEADS, WIDTH)
    for b in range(3):
        k, v = (pool.read(read, torch.float32)[b : b + 1].nan_to_num(0.0) for pool in (keys, values))
        shown = None if mask is None else mask[b : b + 1]
        wanted[b] = reference(q[b : b + 1], k, v, shown, scale=0.25)[0]
    where = group.query(KvGroup.FULL)
    found = paged_attention(
        q.flatten(0, 1), keys, values, where.tables, where.rows, where.starts, n,
        window=0, scale=0.25, softcap=0.0, max_length=where.max_length,
    )  # fmt: skip
    torch.testing.assert_close(found.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
