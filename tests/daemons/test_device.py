"""What the daemon says about devices."""

import subprocess
import sys
import threading

import psutil
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


BUILT_FOR = device.built_backend()
GPUS = [Backend.CUDA, Backend.HIP]


@pytest.mark.parametrize("backend", [backend for backend in GPUS if backend is not BUILT_FOR])
def test_another_backend_than_torchs_names_the_build(backend):
    for ask in (lambda: device.visible_devices(backend), lambda: device.torch_device(backend, 0)):
        with pytest.raises(
            DeviceError, match=f"backend {backend.value}: torch .* is a {BUILT_FOR.value} build"
        ) as caught:
            ask()
        assert caught.value.configuration
        assert "python" in caught.value.advice


@WITHOUT_ACCELERATOR
@pytest.mark.skipif(BUILT_FOR is Backend.CPU, reason="this torch is a cpu build")
def test_a_build_for_gpus_that_sees_none_says_why_and_what_hides_them(monkeypatch):
    name = {Backend.CUDA: "CUDA_VISIBLE_DEVICES", Backend.HIP: "HIP_VISIBLE_DEVICES"}[BUILT_FOR]
    monkeypatch.setenv(name, "7")
    with pytest.raises(DeviceError, match=f"{name} is '7'") as caught:
        device.visible_devices(BUILT_FOR)
    assert caught.value.configuration
    assert "Please" not in caught.value.reason


HOLDS = """
import sys
held = bytearray(1 << 28)
held[::4096] = b"x" * len(held[::4096])
print("held", flush=True)
sys.stdin.read(1)
"""


def test_memory_of_a_process_that_ends_is_waited_for(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        total, process = 8 << 30, psutil.Process(holder.pid)
        # other processes of this machine take and free memory meanwhile: this one alone counts
        monkeypatch.setattr(device, "memory_free", lambda _: total - process.memory_info().rss)
        wanted = device.memory_free(device.CPU) + (1 << 27)  # half of what it holds more than there is
        assert not device.wait_until_free(device.CPU, wanted, 0.1)
        timer = threading.Timer(0.3, holder.kill)
        timer.start()
        assert device.wait_until_free(device.CPU, wanted)
        timer.join()


def test_what_is_free_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(device.time, "sleep", lambda _: pytest.fail("it waited"))
    assert device.wait_until_free(device.CPU, 1)
