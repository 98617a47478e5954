"""Load machine code into a device and launch it, through the CUDA driver's C interface.

torch and Triton offer no way to launch a kernel of other origin with programmatic dependent launch; the driver does, on
torch's streams and while torch captures a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(Exception):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


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


class Kernel:
    """The kernel ``name`` of some machine code on one device.

    ``dependent``: it waits for its inputs itself, so it may start while the kernel ahead of it still runs (from sm_90).
    """

    def __init__(self, code: bytes, name: str, device: torch.device, shared_bytes: int, *, dependent: bool) -> None:
        self.name, self.device = name, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), f"loading {name}")
            _check(
                driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"finding {name}"
            )
            if shared_bytes:
                _check(
                    driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes),
                    f"{shared_bytes} bytes of shared memory for {name}",
                )
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
        self.dependent = dependent and torch.cuda.get_device_capability(device) >= (9, 0)
        self._launch = driver.cuLaunchKernelEx

    def __call__(
        self, grid: tuple[int, int], n_threads: int, shared_bytes: int, arguments: Sequence[Tensor | int | None]
    ) -> None:
        """Launch on the device's current stream.  Integers are passed as 32 bits, tensors and None as pointers."""
        values = [
            ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        attributes = ctypes.addressof(self._attribute)
        config = _Config(*grid, 1, n_threads, 1, 1, shared_bytes, stream, attributes, int(self.dependent))
        _check(self._launch(ctypes.byref(config), self._function, pointers, None), f"launching {self.name}")
