"""Slots whose pages are partly in host memory: every byte goes to the file and to wherever the next slot has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.errors import StateError
from daemons.kv.pools import Pools
from daemons.ops.paged import PagedTensor, Pages
from daemons.snapshots.state_map import StateMap
from daemons.snapshots.streams import HostCopyStream, SnapshotIO
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import SlotPlace
from lucevisor.snapshots.file_format import slot_tensors

LAYERS = tuple(LayerSpec(i, Space.FULL, {}, attention_state(2, 32, 32)) for i in range(2))
SPEC = ModelSpec("test", "test", "F32", 16, 100, 4096, LAYERS, {}, {}, 0, None)
CPU = torch.device("cpu")
N = 5 * 64 + 9


def pools(kv_dtype: Dtype, n_device: int, n_host: int, *, ranks: bool = False) -> Pools:
    sizes = PoolSizes(n_device, 0, 0, host_pages=n_host)
    return Pools(SPEC, LayerRange(0, 2), CPU, kv_dtype, sizes, rank_pages=ranks)


def rows(one: Pools, layer: int, name: str, place: SlotPlace) -> Tensor:
    """The positions of a slot."""
    n_device, paged = one.units[Space.FULL], one.paged(layer, name)

    def page(i: int) -> Tensor:
        where: PagedTensor = paged
        if i >= n_device:
            assert paged.host is not None
            where = paged.over(paged.host.parts)
        return where.read(
            Pages(torch.tensor([i % n_device if i < n_device else i - n_device]), 1, 0, 64), torch.float32
        )

    return torch.cat([page(i) for i in place.full], dim=1)[0, : place.n_tokens]


@pytest.mark.parametrize(
    "formats", [(Dtype.FLOAT32, Dtype.FLOAT32), (Dtype.Q8_0, Dtype.Q8_0), (Dtype.FLOAT32, Dtype.Q8_0)]
)
def test_bytes_go_to_disk_and_back_from_both_memories(formats: tuple[Dtype, Dtype], tmp_path: Path) -> None:
    written, read = formats
    source, target = pools(written, 7, 6), pools(read, 9, 8, ranks=True)
    for layer in range(2):
        for name in "kv":
            paged = source.paged(layer, name)
            assert paged.host is not None
            for one in (paged, paged.over(paged.host.parts)):
                n = (7 if one is paged else 6) * 64
                one.write(torch.arange(n), torch.randn(n, 2, 32))
    place, to = SlotPlace(N, [3, 12, 4, 5, 7, 0]), SlotPlace(N, [16, 15, 1, 9, 8, 2])
    tensors, at = [], 0
    for tensor in slot_tensors(LAYERS, N, written):
        tensors.append(type(tensor)(**{f: getattr(tensor, f) for f in tensor.__struct_fields__} | {"offset": at}))
        at += tensor.n_bytes
    with (tmp_path / "slot").open("w+b") as file:
        io, stream = SnapshotIO(file.fileno(), "slot"), HostCopyStream()
        for segment in StateMap(SPEC, [source]).to_save(place, tensors):
            stream.save(segment, io)
        assert (tmp_path / "slot").stat().st_size == at
        states = StateMap(SPEC, [target])
        states.invalidate_host_pages(to)
        segments, conversions = states.to_restore(to, tensors)
        for segment in segments:
            stream.restore(segment, io)
        for conversion in conversions:
            stream.convert(conversion, io)
    for layer in range(2):
        for name in "kv":
            found, wanted = rows(target, layer, name, to), rows(source, layer, name, place)
            assert float((found - wanted).abs().max()) <= (0.0 if written is read else 0.02)
        sketches = target.paged(layer, "k").sketches
        assert sketches is not None
        assert sketches.missing == {0, 6, 7}


def test_a_page_that_neither_memory_has_is_refused() -> None:
    [tensor, *_] = slot_tensors(LAYERS, 64, Dtype.FLOAT32)
    with pytest.raises(StateError, match="page 13 is outside the pool of 7 and the 6 in host memory"):
        StateMap(SPEC, [pools(Dtype.FLOAT32, 7, 6)]).to_save(SlotPlace(64, [13]), [tensor])
