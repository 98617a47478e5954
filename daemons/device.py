"""Devices as torch sees them: names, memory, threads, copies between host and device.

The only file of the daemon that branches on cuda and hip.  torch calls the devices of both ``cuda``;
``torch.version.hip`` tells them apart.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daemons.errors import DeviceError
from lucevisor.model.values import Backend, Dtype
from lucevisor.protocol.loading import DeviceInfo

_TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
CPU = torch.device("cpu")
_KFD = Path("/dev/kfd")
_VISIBILITY = {
    Backend.CUDA: ["CUDA_VISIBLE_DEVICES"],
    Backend.HIP: ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"],
}
"""Variables that hide devices."""


def built_backend() -> Backend:
    """The accelerator stack that this interpreter's torch was built for, whether it sees a device or not."""
    if torch.version.hip:
        return Backend.HIP
    return Backend.CUDA if torch.version.cuda else Backend.CPU


def prepare(backend: Backend, threads: int) -> None:
    """Configure the process: full float32 products, the number of cpu threads (0: torch's choice)."""
    torch.set_float32_matmul_precision("highest")
    if backend is not Backend.CPU:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # 1 to 2 s for the first call, and 70 ms for each further shape
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    set_threads(threads)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Operations of a cpu by one thread: torch's sums and vectors depend on how many share them."""
    n = torch.get_num_threads()
    if device.type != "cpu" or n == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)


def set_threads(n: int) -> None:
    """Number of cpu threads of one operation; 0 leaves torch's choice."""
    if n > 0:
        torch.set_num_threads(n)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's dtype of an activation format.  Raises DeviceError for a storage-only format such as q8_0."""
    if dtype not in _TORCH_DTYPES:
        raise DeviceError(
            "dtype",
            f"{dtype.value} is a format of attention state, not of activations",
            "use float32, bfloat16 or float16",
            configuration=True,
        )
    return _TORCH_DTYPES[dtype]


def torch_device(backend: Backend, index: int) -> torch.device:
    """The torch device of a backend's index.  Raises DeviceError naming the visible devices."""
    if backend is Backend.CPU:
        return CPU
    _require(backend)
    n = torch.cuda.device_count()
    if not 0 <= index < n:
        seen = ", ".join(f"{backend.value}:{i}" for i in range(n)) or "none"
        raise DeviceError(
            f"{backend.value}:{index}",
            f"no such device, torch sees {seen}",
            "check the group's visible_devices and target_devices",
            configuration=True,
        )
    return torch.device("cuda", index)


def visible_devices(backend: Backend) -> list[DeviceInfo]:
    """All devices of ``backend``.  Raises DeviceError when torch is built for another backend."""
    if backend is Backend.CPU:
        return [_cpu_info()]
    _require(backend)
    return [_accelerator_info(i) for i in range(torch.cuda.device_count())]


def accelerators(backend: Backend) -> list[torch.device]:
    """The devices of ``backend`` that kernels can run on: none of a cpu, or of torch built for another backend."""
    if backend is Backend.CPU or built_backend() is not backend:
        return []
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _require(backend: Backend) -> None:
    if (built := built_backend()) is not backend:
        raise DeviceError(
            f"backend {backend.value}",
            f"torch {torch.__version__} of this interpreter is a {built.value} build",
            f"point the group's python at an environment with a {backend.value} build of torch",
            configuration=True,
        )
    if not torch.cuda.is_available():
        advice = "check the driver (nvidia-smi or rocminfo), the device permissions and the group's visible_devices"
        raise DeviceError(f"backend {backend.value}", _why_unseen(backend), advice, configuration=True)


def _why_unseen(backend: Backend) -> str:
    """Return why torch sees no device: its own reason, and settings that hide devices."""
    reasons = []
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reasons.append(str(error).partition(". Please")[0].partition("\n")[0])
    if backend is Backend.HIP and not _KFD.exists():
        reasons.append(f"there is no {_KFD}: the driver amdgpu is not loaded, or the container was not given it")
    elif backend is Backend.HIP and not os.access(_KFD, os.R_OK | os.W_OK):
        reasons.append(f"user {os.geteuid()} may not open {_KFD}")
    reasons += [f"{name} is {os.environ[name]!r}" for name in _VISIBILITY[backend] if name in os.environ]
    return "; ".join(reasons) or "torch sees no device"


def _accelerator_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    if torch.version.hip:
        architecture = str(getattr(properties, "gcnArchName", "gfx")).split(":")[0]
        bfloat16 = architecture.startswith(("gfx9", "gfx11", "gfx12")) and architecture != "gfx906"
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
        bfloat16 = properties.major >= 8
    dtypes = [Dtype.FLOAT32, Dtype.FLOAT16] + ([Dtype.BFLOAT16] if bfloat16 else [])
    uuid = str(getattr(properties, "uuid", ""))  # none of some drivers, or zeros
    uuid = uuid if uuid.strip("0-") else ""
    return DeviceInfo(index, properties.name, total, free, architecture, dtypes, uuid)


def _cpu_info() -> DeviceInfo:
    model, flags = platform.machine(), frozenset[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = frozenset(value.split())
                break
    except OSError:
        pass  # no /proc/cpuinfo: the machine type is name enough
    known = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    dtypes = [Dtype.FLOAT32] + ([Dtype.BFLOAT16] if flags >= {"avx2", "fma", "f16c"} else [])
    architecture = "+".join([platform.machine(), *known[-1:]])
    return DeviceInfo(0, model, host_total_bytes(), memory_free(CPU), architecture, dtypes)


# ---- memory


def host_total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_total(device: torch.device) -> int:
    """Bytes of the device's memory; for the cpu those of the host."""
    return host_total_bytes() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def memory_free(device: torch.device) -> int:
    """Bytes that can be allocated on the device, including what torch's allocator caches."""
    if device.type == "cpu":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def release_memory(device: torch.device) -> None:
    """Give memory that is no longer used back to the system, the caches of allocators included."""
    gc.collect()
    if device.type == "cpu":
        with suppress(OSError, AttributeError):  # a libc without it
            ctypes.CDLL(None).malloc_trim(0)
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give memory of a GPU that torch has cached back to the driver: graphs, kernels and other streams can use it."""
    if device.type != "cpu":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> int:
    """Start anew to measure the most that torch has allocated on a GPU; return what it has now, in bytes."""
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """Return what torch's allocator has of a GPU, allocated or cached."""
    return torch.cuda.memory_reserved(device)


def graph_bytes(device: torch.device) -> int:
    """Return the bytes that torch keeps for the pools of graphs on a GPU, in use or not."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    own = (segment for segment in segments if segment["device"] == device.index)
    return sum(segment["total_size"] for segment in own if any(segment.get("segment_pool_id", ())))


def peak_bytes(device: torch.device) -> int:
    """Return the most that torch had allocated since ``reset_peak``."""
    return torch.cuda.max_memory_allocated(device)


def wait_until_free(device: torch.device, n_bytes: int, seconds: float = 10.0) -> bool:
    """Wait until so much memory is free: that of a process which has just ended may not be.  Return whether it is."""
    if device.type != "cpu" and torch.cuda.mem_get_info(device)[0] >= n_bytes:
        return True  # torch's own statistics take half a millisecond, and a load asks hundreds of times
    end_s = time.monotonic() + seconds
    while memory_free(device) < n_bytes:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def allocating(device: torch.device, what: str, n_bytes: int, advice: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into a DeviceError that says what was allocated and how much.

    Waits for memory of a GPU that is about to be free.
    """
    if device.type != "cpu":
        wait_until_free(device, n_bytes)
    try:
        yield
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one; the cpu allocator raises a bare one
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        free, total = memory_free(device), memory_total(device)
        raise DeviceError(
            str(device),
            f"out of memory for {what}: {n_bytes} bytes asked, {free} of {total} are free",
            advice,
            configuration=True,
        ) from error


def host_zeros(
    extent: Sequence[int], dtype: torch.dtype, device: torch.device, what: str, advice: str
) -> tuple[Tensor, bool]:
    """Zeros in host memory for copies to and from ``device``, and whether these copies are DMA.

    Page-locked for a GPU if possible, for the lifetime of the tensor.  Raises DeviceError with ``what`` and
    ``advice`` when host memory runs out.
    """
    n_bytes = prod(extent) * dtype.itemsize
    with allocating(CPU, what, n_bytes, advice):
        if device.type == "cpu" or not n_bytes:
            return torch.zeros(*extent, dtype=dtype), device.type == "cpu"
        try:
            memory = _HostMemory(-1, n_bytes)  # not torch's pinned memory, which is rounded up to powers of two
        except OSError as error:
            raise RuntimeError(f"cannot allocate memory: {error.strerror}") from error
    memory.locked = register_host(memoryview(memory))
    zeros = torch.frombuffer(memory, dtype=dtype).view(*extent)
    memory.address = zeros.data_ptr()
    return zeros, memory.locked


class _HostMemory(mmap):
    """Memory shared by tensors; unlocked before it is unmapped if it was page-locked."""

    locked = False
    address = 0

    def __del__(self) -> None:
        if self.locked and not sys.is_finalizing():
            _unregister(self.address)


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the thread's current one, where Triton launches its kernels."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device's current stream."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


# ---- boundary activations


def register_host(buffer: memoryview) -> bool:
    """Page-lock arena memory, so that copies to and from devices are DMA.

    False where that fails: copies then go through the driver's staging memory, slower but correct.
    """
    if not torch.cuda.is_available() or not len(buffer):
        return False
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    # Portable: valid for every device of this process.
    done = int(_runtime().cudaHostRegister(address, len(buffer), 1)) == 0
    if not done:
        _clear_last_error()
    return done


def unregister_host(buffer: memoryview) -> None:
    """Undo ``register_host``, before the memory is unmapped: copies to what is mapped there next would go astray."""
    _unregister(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr())


def _unregister(address: int) -> None:
    if int(_runtime().cudaHostUnregister(address)) != 0:
        _clear_last_error()


def _runtime() -> Any:
    """The CUDA or HIP runtime functions that torch exposes."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_last_error() -> None:
    """Clear the error with a dummy launch: the runtime reports it a second time at the next launch."""
    with suppress(RuntimeError):  # the error that the caller already has from the return value
        torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
