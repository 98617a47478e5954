"""What the daemon says about devices, and the arena memory it reads and writes."""

import mmap

import pytest
import torch

from daemons import device
from daemons.errors import DeviceError
from lucevisor.model.values import Backend, Dtype

WITHOUT_ACCELERATOR = pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees an accelerator")


def test_the_cpu_describes_itself():
    (info,) = device.visible_devices(Backend.CPU)
    assert (info.index, info.total_bytes) == (0, device.host_total_bytes())
    assert 0 < info.free_bytes <= info.total_bytes
    assert info.name
    assert Dtype.FLOAT32 in info.dtypes
    assert device.torch_device(Backend.CPU, 0) == torch.device("cpu")
    assert device.memory_total(device.CPU) == info.total_bytes


@WITHOUT_ACCELERATOR
@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="this torch is not a cpu build")
@pytest.mark.parametrize("backend", [Backend.CUDA, Backend.HIP])
def test_another_backend_than_torchs_names_the_build(backend):
    assert device.seen_backend() is Backend.CPU
    for ask in (lambda: device.visible_devices(backend), lambda: device.torch_device(backend, 0)):
        with pytest.raises(DeviceError, match=f"backend {backend.value}: torch .* is a cpu build") as caught:
            ask()
        assert caught.value.configuration
        assert "python" in caught.value.advice


@WITHOUT_ACCELERATOR
def test_host_memory_cannot_be_registered_without_an_accelerator():
    assert not device.register_host(memoryview(bytearray(4096)))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_boundary_views_are_the_arenas_bytes(dtype):
    arena = mmap.mmap(-1, 8192)
    region = memoryview(arena)[4096:]
    rows = torch.randn(5, 7).to(device.torch_dtype(dtype))
    view = device.boundary_view(region, dtype, 5, 7)
    device.copy_out(rows, view)
    assert torch.equal(device.copy_in(device.boundary_view(region, dtype, 5, 7), device.CPU), rows)
    assert bytes(region[: rows.nbytes]) == rows.view(torch.uint8).numpy().tobytes()
    assert arena[:4096] == bytes(4096)
    assert device.boundary_view(region, dtype, 0, 7).shape == (0, 7)


def test_a_boundary_larger_than_its_region_is_refused():
    with pytest.raises(DeviceError, match="3 rows of 10 float32 take 120 bytes, the region has 100"):
        device.boundary_view(memoryview(bytearray(100)), Dtype.FLOAT32, 3, 10)


def test_threads_and_precision(monkeypatch):
    before = torch.get_num_threads()
    try:
        device.prepare(Backend.CPU, 1)
        assert torch.get_num_threads() == 1
        device.prepare(Backend.CPU, 0)
        assert torch.get_num_threads() == 1
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_num_threads(before)
