"""KV Flash on a GPU: captured steps read resident pages; pages copied on their own stream are as they were written."""

from __future__ import annotations

import pytest
import torch

from daemons.device import prepare
from daemons.kv.pools import Pools
from daemons.ops.page_scores import sketches_of
from lucevisor.kv.residency import Residency
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from tests.families.golden import FIXTURES, opened
from tests.families.paged_texts import run
from tests.families.pipeline import How, load_stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
CHUNKS = [256, 256, 62, *[1] * 70, 100, *[3] * 30]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_those_of_the_whole_context(name: str) -> None:
    """And pages that are dropped are out of captured steps as they are out of the host's."""
    prepare(Backend.CUDA, 0)
    golden = opened(name)
    for policy, of_host in ((Residency(9, "exact"), None), (Residency(9), Residency(9))):
        how = How(Dtype.FLOAT32, Dtype.FLOAT32, Backend.CUDA, host_pages=80 if of_host is None else 0)
        found = run(golden.spec, load_stages(golden.spec, golden.layer_splits()[:1], how), CHUNKS, policy)
        wanted = run(golden.spec, golden.whole, CHUNKS, of_host)
        assert float((found.cpu() - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_a_page_may_be_overwritten_at_once() -> None:
    layers = tuple(LayerSpec(i, KvGroup.FULL, {}, attention_state(2, 64, 64)) for i in range(3))
    spec = ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 0, None)
    sizes = PoolSizes(40, 0, 0, host_pages=300)
    pools = Pools(spec, LayerRange(0, 3), torch.device("cuda", 0), Dtype.BFLOAT16, sizes)
    wanted: dict[int, float] = {}
    for turn in range(7):
        rows = [(turn * 40 + 3 * i) % 280 for i in range(40)]
        for i in range(3):
            for name in "kv":
                paged = pools.paged(i, name).pages
                paged.copy_(torch.arange(40, device="cuda").view(-1, 1, 1, 1).expand_as(paged) + turn + 100 * i)
        pools.page_out(list(range(40)), rows)
        wanted |= {row: float(page + turn) for page, row in enumerate(rows)}
    for i in range(3):
        host = pools.paged(i, "k").host
        assert host is not None
        order = sorted(wanted)
        found = []
        for [[chunk]], places in host.pages.chunks([host], order):
            found += chunk[places.long(), 5, 1, 7].float().tolist()
        exact = torch.tensor([wanted[row] + 100 * i for row in order]).to(torch.bfloat16)
        assert found == exact.tolist()


def test_pages_come_back_as_they_left() -> None:
    layers = tuple(LayerSpec(i, KvGroup.FULL, {}, attention_state(2, 64, 64)) for i in range(3))
    spec = ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 0, None)
    device, sizes = torch.device("cuda", 0), PoolSizes(40, 0, 0, host_pages=60)
    pools = Pools(spec, LayerRange(0, 3), device, Dtype.BFLOAT16, sizes, rank_pages=True)
    tensors = [pools.paged(i, name).pages for i in range(3) for name in "kv"]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    rows = [(7 * i) % 60 for i in range(40)]
    pools.page_out(list(range(40)), rows)
    for tensor in tensors:
        tensor.zero_()
    pools.page_in(rows, [39 - i for i in range(40)])
    assert all(torch.equal(tensor.flip(0), kept) for tensor, kept in zip(tensors, before, strict=True))
    sketches = pools.paged(1, "k").sketches
    assert sketches is not None
    wanted = sketches_of(before[2].float())
    assert all(torch.equal(mine[:, rows], one) for mine, one in zip(sketches.kept, wanted, strict=True))
