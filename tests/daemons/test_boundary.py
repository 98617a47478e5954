"""Rows that cross from one stage to the next through shared memory."""

import os

import pytest
import torch

from daemons import device
from daemons.boundary import SharedMemoryBuffer
from daemons.errors import DeviceError
from lucevisor.model.values import Dtype
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan


@pytest.fixture
def arena():
    made = Arena.create(ArenaPlan(boundary=0, region_bytes=8192, n_regions=2))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_what_one_stage_writes_the_other_reads(arena, dtype):
    rows = torch.randn(5, 7).to(device.torch_dtype(dtype))
    SharedMemoryBuffer(arena, dtype, 7).write(1, rows)
    assert torch.equal(SharedMemoryBuffer(arena, dtype, 7).read(1, 5), rows)
    assert bytes(arena.region(1)[: rows.nbytes]) == rows.view(torch.uint8).numpy().tobytes()
    assert bytes(arena.region(0)) == bytes(8192)
    assert SharedMemoryBuffer(arena, dtype, 7).read(1, 0).shape == (0, 7)


def test_a_region_is_read_in_steps_of_any_length(arena):
    buffer, rows = SharedMemoryBuffer(arena, Dtype.FLOAT32, 7), torch.randn(5, 7)
    buffer.write(0, rows)
    for n in (5, 3, 5, 0, 1):
        assert torch.equal(buffer.read(0, n), rows[:n])
    assert buffer.read(1, 5).count_nonzero() == 0


def test_a_bell_is_heard_by_whoever_maps_the_arena(arena):
    buffer = SharedMemoryBuffer(arena, Dtype.FLOAT32, 7)
    assert not buffer.bells.rung(1, 17)
    buffer.write(1, torch.ones(2, 7))
    buffer.bells.ring(1, 17)
    other = Arena.attach(os.dup(arena.fd), arena.plan, os.dup(arena.bells.wake_fd))
    assert other.bells.rung(1, 17)
    assert not other.bells.rung(1, 18)
    assert not other.bells.rung(0, 17)
    other.close()


def test_more_rows_than_a_region_holds_are_refused(arena):
    buffer = SharedMemoryBuffer(arena, Dtype.FLOAT32, 1000)
    with pytest.raises(DeviceError, match="3 rows of 1000 float32 take 12000 bytes, the region has 8192"):
        buffer.read(0, 3)
    with pytest.raises(DeviceError, match="the region has 8192"):
        buffer.write(0, torch.zeros(3, 1000))
