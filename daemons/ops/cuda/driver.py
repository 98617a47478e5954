"""Load machine code into a device and launch it, through the CUDA driver's C interface.

torch and Triton offer no way to launch a kernel of other origin with programmatic dependent launch; the driver does, on
torch's streams and while torch captures a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from daemons.ops.compile_only import compile_only

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH = 36, 37  # CU_DEVICE_ATTRIBUTE_..., in kHz and bits
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(Exception):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from error


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise DriverError(f"{what} failed: {(name.value or b'unknown error').decode()}")


def memory_speed(index: int) -> float:
    """Bytes a second that a device's memory delivers at most, by its clock, both of whose edges count, and its width.

    0.0: the driver does not say.
    """
    driver, device, kilohertz, bits = _driver(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(kilohertz), _MEMORY_CLOCK_RATE, device)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(bits), _MEMORY_BUS_WIDTH, device)
    return 0.0 if failed else 2e3 * kilohertz.value * bits.value / 8


def _argument(value: Tensor | int | float | None) -> ctypes._SimpleCData[Any]:
    if isinstance(value, int):
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


class Kernel:
    """The kernel ``name`` of some machine code on one device, loaded when it is first launched, or by ``load``.

    ``dependent``: it waits for its inputs itself, so it may start while the kernel ahead of it still runs (from sm_90).
    ``cluster``: the blocks of a cluster, for which it was compiled; more than one only from sm_90 on.
    """

    dependent_launches: ClassVar[bool] = True
    """False: every kernel waits for the whole one ahead, so that a benchmark can compare."""

    def __init__(
        self,
        code: Future[bytes],
        name: str,
        device: torch.device,
        shared_bytes: int,
        *,
        dependent: bool,
        cluster: int = 1,
    ) -> None:
        self.name, self.device, self.cluster = name, device, cluster
        self._code, self._shared_bytes = code, shared_bytes
        self._function: ctypes.c_void_p | None = None
        size, program = (_Attribute(_CLUSTER_DIMENSION), _Attribute(_PROGRAMMATIC_SERIALIZATION))
        size.value[:3], program.value[0] = (cluster, 1, 1), 1
        self._attributes = (_Attribute * 2)(size, program) if cluster > 1 else (_Attribute * 1)(program)
        self.dependent = dependent and torch.cuda.get_device_capability(device) >= (9, 0)

    def load(self) -> None:
        """Wait until it is compiled, and load it.  Raises CompileError or DriverError."""
        if self._function is None:
            self._function = _function(self._code.result(), self.name, self.device, self._shared_bytes)

    def __call__(
        self, grid: tuple[int, int], n_threads: int, shared_bytes: int, arguments: Sequence[Tensor | int | float | None]
    ) -> None:
        """Launch on the device's current stream.  Numbers are passed as 32 bits, tensors and None as pointers."""
        if compile_only():
            return
        self.load()
        values = [_argument(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = self._config(grid, n_threads, shared_bytes)
        result = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(result, f"launching {self.name}")

    def max_clusters(self, n_threads: int, shared_bytes: int) -> int:
        """How many clusters run on the device at once."""
        self.load()
        found, config = ctypes.c_int(), self._config((self.cluster, 1), n_threads, shared_bytes)
        with torch.cuda.device(self.device):
            result = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, ctypes.byref(config))
        _check(result, f"counting clusters of {self.name}")
        return found.value

    def _config(self, grid: tuple[int, int], n_threads: int, shared_bytes: int) -> _Config:
        stream, attributes = torch.cuda.current_stream(self.device).cuda_stream, ctypes.addressof(self._attributes)
        n_attributes = int(self.cluster > 1) + int(self.dependent and self.dependent_launches)
        return _Config(*grid, 1, n_threads, 1, 1, shared_bytes, stream, attributes, n_attributes)


@cache
def _function(code: bytes, name: str, device: torch.device, shared_bytes: int) -> ctypes.c_void_p:
    """The kernel's handle, loaded once in a process: the driver waits for all that the device computes when it loads
    one.

    A spare's rehearsal leaves them to its load.
    """
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        # makes the device's context this thread's; waits for nothing: other threads may have work queued
        torch.cuda.current_stream().query()
        _check(driver.cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        if shared_bytes:
            _check(
                driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes),
                f"{shared_bytes} bytes of shared memory for {name}",
            )
    return function
