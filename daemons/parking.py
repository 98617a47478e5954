"""Park models: free their GPU memory and map it again at the same addresses, so that CUDA graphs stay valid.

As vLLM's sleep mode and its CuMemAllocator do, with CUDA's virtual memory management: addresses are reserved once, and
chunks of physical memory are mapped behind them.  Weights are copied to page-locked host memory when the model is
parked for the first time, and that copy stays; state comes back as zeros.  Where this is not supported (cpus, HIP, an
old driver), torch allocates the memory, and a model that leaves is unloaded.
Invariant: tensors in a MappedMemory keep their addresses as long as it exists.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from daemons.device import CPU, host_zeros, memory_free, memory_total
from daemons.errors import DeviceError

CHUNK_BYTES: Final = 32 << 20
ALIGNMENT: Final = 512

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


@cache
def _driver() -> Any:
    """The functions of the CUDA driver; raises OSError or AttributeError where there are none."""
    library = ctypes.CDLL("libcuda.so.1")
    signatures = {
        "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
        "cuMemAddressReserve": [POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong],
        "cuMemAddressFree": [c_ulonglong, c_size_t],
        "cuMemCreate": [POINTER(c_ulonglong), c_size_t, POINTER(_Properties), c_ulonglong],
        "cuMemRelease": [c_ulonglong],
        "cuMemMap": [c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong],
        "cuMemUnmap": [c_ulonglong, c_size_t],
        "cuMemSetAccess": [c_ulonglong, c_size_t, POINTER(_Access), c_size_t],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_uint
    return library


class _OutOfMemory(RuntimeError):
    """The message is one that ``device.allocating`` matches."""


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == 2:  # CUDA_ERROR_OUT_OF_MEMORY
        raise _OutOfMemory(f"{name}: cannot allocate memory")
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


class _Bytes:
    """A range of mapped memory, as torch.as_tensor takes it; keeps its owner alive."""

    def __init__(self, owner: MappedMemory, address: int, n_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


class MappedMemory:
    """Memory of one device at a reserved range of addresses: taken in order, parked and unparked as a whole."""

    def __init__(self, device: torch.device, n_reserved: int = 0) -> None:
        self.device = device
        self._properties = _Properties(_PINNED, 0, _Location(_DEVICE, device.index), None, _Flags())
        self._access = _Access(_Location(_DEVICE, device.index), _READ_WRITE)
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # makes the context current
            granularity, base = c_size_t(), c_ulonglong()
            _call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
            self._chunk = -(-CHUNK_BYTES // granularity.value) * granularity.value
            wanted = n_reserved or memory_total(device)
            self._n_reserved = -(-wanted // self._chunk) * self._chunk
            _call("cuMemAddressReserve", byref(base), self._n_reserved, 0, 0, 0)
        self._base, self.n_bytes = base.value, 0
        self._handles: list[int] = []  # of the chunks that are mapped, in order
        self._n_chunks = 0  # while it is not parked
        self._host: Tensor | None = None

    def take(self, extent: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory.  Raises RuntimeError when the device is full."""
        n_bytes = prod(extent) * dtype.itemsize
        if not n_bytes:
            return torch.empty(*extent, dtype=dtype, device=self.device)
        start = -(-self.n_bytes // ALIGNMENT) * ALIGNMENT
        n_chunks = -(-(start + n_bytes) // self._chunk)
        if n_chunks * self._chunk > self._n_reserved:
            raise _OutOfMemory("cannot allocate memory beyond that of the device")
        with torch.cuda.device(self.device):
            while len(self._handles) < n_chunks:
                self._map_chunk()
        self.n_bytes, self._host = start + n_bytes, None
        data = torch.as_tensor(_Bytes(self, self._base + start, n_bytes), device=self.device)
        return data.view(dtype).view(*extent)

    def park(self, *, copies: bool) -> None:
        """Free the memory; ``copies``: keep its bytes in host memory.  Nothing may use it until ``unpark``."""
        torch.cuda.synchronize(self.device)
        if copies and self._host is None and self.n_bytes:
            host, _ = host_zeros((self.n_bytes,), torch.uint8, self.device, "weights of a parked model", "unload it")
            host.copy_(self._whole(), non_blocking=True)
            torch.cuda.synchronize(self.device)
            self._host = host
        self._n_chunks = len(self._handles)
        self._unmap()

    def unpark(self) -> None:
        """Map the memory again, with the bytes that were kept, or zeros.  Raises RuntimeError when the device is full;
        nothing is mapped then."""
        try:
            with torch.cuda.device(self.device):
                while len(self._handles) < self._n_chunks:
                    self._map_chunk()
        except BaseException:
            self._unmap()
            raise
        if not self.n_bytes:
            return
        if self._host is None:
            self._whole().zero_()
        else:
            self._whole().copy_(self._host, non_blocking=True)
        torch.cuda.synchronize(self.device)

    def _whole(self) -> Tensor:
        return torch.as_tensor(_Bytes(self, self._base, self.n_bytes), device=self.device)

    def _map_chunk(self) -> None:
        handle, at = c_ulonglong(), self._base + len(self._handles) * self._chunk
        _call("cuMemCreate", byref(handle), self._chunk, byref(self._properties), 0)
        try:
            _call("cuMemMap", at, self._chunk, 0, handle, 0)
            _call("cuMemSetAccess", at, self._chunk, byref(self._access), 1)
        except BaseException:
            _driver().cuMemUnmap(at, self._chunk)
            _driver().cuMemRelease(handle)
            raise
        self._handles.append(handle.value)

    def _unmap(self) -> None:
        for i, handle in enumerate(self._handles):
            _driver().cuMemUnmap(self._base + i * self._chunk, self._chunk)
            _driver().cuMemRelease(handle)
        self._handles.clear()

    def __del__(self) -> None:
        if getattr(self, "_base", 0) and not sys.is_finalizing():
            if self._handles:
                torch.cuda.synchronize(self.device)
            self._unmap()
            _driver().cuMemAddressFree(self._base, self._n_reserved)


@cache
def unsupported_reason(device: torch.device) -> str:
    """Try to park memory of a device; return why that does not work, or empty."""
    if device.type == "cpu":
        return "a cpu's memory is host memory"
    if torch.version.hip:
        return "it is not implemented for HIP"
    try:
        mapped = MappedMemory(device, 2 * CHUNK_BYTES)
        numbers = mapped.take((1024,), torch.float32)
        numbers.copy_(torch.arange(1024.0))
        address = numbers.data_ptr()
        mapped.park(copies=True)
        mapped.unpark()
        if numbers.data_ptr() != address or float((numbers * 2).sum()) != 1024 * 1023:
            return "memory that was parked came back with other bytes"
    except (OSError, AttributeError, RuntimeError, DeviceError) as error:
        return str(error).partition("\n")[0]
    return ""


class ParkableMemory:
    """The memory of one model that may be parked: of its weights and of its state, on each device."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[torch.device, bool], MappedMemory] = {}
        self.parked_bytes = 0

    def take(self, extent: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_state: bool) -> Tensor:
        key = device, is_state
        if key not in self._mapped:
            self._mapped[key] = MappedMemory(device)
        return self._mapped[key].take(extent, dtype)

    def park(self) -> int:
        """Free the memory of the devices; return the bytes kept in host memory.  0: they are more than half of what is
        free there, and nothing was done."""
        n_bytes = sum(mapped.n_bytes for (_, is_state), mapped in self._mapped.items() if not is_state)
        has_copy = all(mapped._host is not None for (_, is_state), mapped in self._mapped.items() if not is_state)
        if not n_bytes or (not has_copy and 2 * n_bytes > memory_free(CPU)):
            return 0
        for (_, is_state), mapped in self._mapped.items():
            mapped.park(copies=not is_state)
        self.parked_bytes = n_bytes
        return n_bytes

    def unpark(self) -> None:
        """Map all memory again.  Raises DeviceError when a device is full; then the model is lost."""
        for mapped in self._mapped.values():
            try:
                mapped.unpark()
            except RuntimeError as error:
                free = memory_free(mapped.device)
                reason = f"{mapped.n_bytes} bytes for a parked model, {free} are free ({error})"
                raise DeviceError(str(mapped.device), reason, "unload other models, or lower their shares") from error
        self.parked_bytes = 0


_thread = threading.local()


@contextmanager
def use_memory(memory: ParkableMemory | None) -> Iterator[None]:
    """Allocate what this thread allocates for weights and state in ``memory``; None: with torch."""
    before, _thread.memory = getattr(_thread, "memory", None), memory
    try:
        yield
    finally:
        _thread.memory = before


def empty(extent: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory for weights."""
    memory: ParkableMemory | None = getattr(_thread, "memory", None)
    if memory is None or device.type == "cpu":
        return torch.empty(*extent, dtype=dtype, device=device)
    return memory.take(extent, dtype, device, is_state=False)


def zeros(extent: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros for state."""
    memory: ParkableMemory | None = getattr(_thread, "memory", None)
    if memory is None or device.type == "cpu":
        return torch.zeros(*extent, dtype=dtype, device=device)
    return memory.take(extent, dtype, device, is_state=True).zero_()
