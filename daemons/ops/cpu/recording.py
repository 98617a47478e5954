"""Steps of a cpu as lists of kernel calls: recorded once without computing anything, then replayed by one call of C++.

While work is recorded, torch may allocate memory and take views, and nothing else: what computes must be a kernel of
kernels.cpp, or the work is refused before it changed anything.  Knows neither layers nor steps.  Invariants: a replay
makes the calls that the work would make, with the same arguments; memory is handed out again within a recording when
its last tensor is gone, so recordings take as much as the work needs at a time.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from daemons.ops.cpu.library import SIGNATURES, CpuKernels, cpu_kernels

MIN_BYTES: Final = 64
"""Of a buffer: a vector of the processor."""
MAX_ARGUMENTS: Final = 14

_aten = torch.ops.aten
_VIEWS: Final = frozenset(
    {
        _aten.alias, _aten.as_strided, _aten.detach, _aten.expand, _aten.permute, _aten.select, _aten.slice,
        _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unsqueeze,
        _aten.view,
    }
)  # fmt: skip
_ALLOCATIONS: Final = frozenset({_aten.empty, _aten.empty_like, _aten.new_empty})

Output = TypeVar("Output")


class UnrecordableError(RuntimeError):
    """The work computes something that is not a kernel: the message says what."""


class _Argument(ctypes.Union):
    """recorded.h's Argument."""

    _fields_ = (("number", ctypes.c_long), ("real", ctypes.c_float))


class _Call(ctypes.Structure):
    """recorded.h's RecordedCall."""

    _fields_ = (("run", ctypes.c_void_p), ("arguments", _Argument * MAX_ARGUMENTS))


class RecordedMemory:
    """The memory of results in recordings that run one after the other, in buffers of powers of two.

    A buffer is free again when the last tensor on it is gone.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._free: dict[int, list[Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on a free buffer."""
        n_numbers = prod(shape)
        if not n_numbers:
            return torch.empty(shape, dtype=dtype)
        size = max(MIN_BYTES, 1 << (n_numbers * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
            self.n_bytes += size
        use = memoryview(buffer.numpy())  # type: ignore[arg-type]  # torch's stub of numpy() hides the buffer
        weakref.finalize(use, free.append, buffer).atexit = False
        return torch.frombuffer(use, dtype=dtype, count=n_numbers).view(*shape)


class Recording:
    """Kernel calls in order."""

    def __init__(self, kernels: CpuKernels, calls: Sequence[_Call], kept: Sequence[object]) -> None:
        """``kept``: what the calls point to and nobody else holds."""
        self._calls, self._kept = (_Call * len(calls))(*calls), kept
        self._replay = partial(kernels.library.replay, ctypes.addressof(self._calls), len(calls))

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Make the calls."""
        if self._replay():
            raise RuntimeError("a recorded kernel call failed")


class _CallRecorder:
    """Takes the place of the library: notes calls instead of making them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.calls: list[_Call] = []
        self.kept: list[object] = []
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., int]:
        try:
            entry = ctypes.cast(getattr(self._library, f"recorded_{name}"), ctypes.c_void_p).value
        except AttributeError:
            raise UnrecordableError(f"{name} is not a kernel of steps") from None
        return partial(self._note, entry, SIGNATURES[name])

    def _note(self, entry: int | None, types: Sequence[Any], *arguments: Any) -> int:
        call = _Call(entry)
        for i, (kind, value) in enumerate(zip(types, arguments, strict=True)):
            if kind is ctypes.c_float:
                call.arguments[i].real = value
            else:
                call.arguments[i].number = value if isinstance(value, int) else self._copied(value)
        self.calls.append(call)
        return 0

    def _copied(self, reference: Any) -> int:
        """The address of a copy of a structure that was passed by reference: its owner fills it again for each call."""
        found = reference._obj
        copy = type(found).from_buffer_copy(found)
        self.kept.append(copy)
        return ctypes.addressof(copy)


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands memory to torch, and refuses what computes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first recording imports torch's compiler: a second or more of each load, and 140 MB a daemon."""
        return False

    def __init__(self, memory: RecordedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet in _VIEWS:
            return func(*args, **kwargs)
        if packet in _ALLOCATIONS:
            like = args[0] if isinstance(args[0], Tensor) else None
            shape = args[0] if like is None else like.shape if packet is _aten.empty_like else args[1]
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            return self._memory.take(shape, dtype)
        with self:
            found = func.decompose(*args, **kwargs)
        if found is NotImplemented:
            raise UnrecordableError(f"{packet} is not a kernel")
        return found


def record(work: Callable[[], Output], memory: RecordedMemory) -> tuple[Recording, Output]:
    """Record the kernel calls of ``work`` without making them; its result lies in ``memory``.

    ``work`` runs on the thread that computes steps.  Raises UnrecordableError.
    """
    kernels = cpu_kernels()
    recorder = _CallRecorder(kernels.library)
    kernels.calls = recorder
    try:
        with _TorchWatch(memory):
            out = work()
    finally:
        kernels.calls = kernels.library
    return Recording(kernels, recorder.calls, [memory, *recorder.kept]), out
