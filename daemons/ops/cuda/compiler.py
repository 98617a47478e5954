"""Compile CUDA C++ to machine code with NVRTC, the compiler library that torch's CUDA wheels bring along.

Needs neither a GPU nor a CUDA installation.  A kernel takes 0.2 to 1 s and a model some thirty of them, so they are
compiled in threads while weights are read, and machine code is kept in the user's cache under a name made of sources,
options and compiler.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import ParamSpec

import torch

from daemons.ops.code_cache import kept
from lucevisor.protocol.threads import ThreadExecutor

SOURCES = Path(__file__).parent
MAX_THREADS = 8
_COMPILING: dict[str, Lock] = {}
"""By name of the machine code: who needs what another thread compiles finds it kept."""

P = ParamSpec("P")


class CompileError(Exception):
    """No machine code: the message says why."""


@cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC library of this environment, else the system's.  Raises CompileError when there is none."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [str(path) for root in roots for path in root.glob("*/lib/libnvrtc.so.*")]
    major = str(torch.version.cuda).partition(".")[0]  # of the driver that torch needs
    found.sort(key=lambda name: not name.endswith(f".so.{major}"))
    for name in (*found, "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("NVRTC is not installed: install nvidia-cuda-nvrtc into the daemon's environment")


def compile_kernel(file: str, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code of ``file`` in this directory for ``architecture`` such as sm_90.  Raises CompileError."""
    options = (f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{d}" for d in defines))
    digest = sha256(repr((_version(), file, options)).encode() + _sources())
    name = f"{Path(file).stem}-{architecture}-{digest.hexdigest()[:24]}.cubin"
    with _COMPILING.setdefault(name, Lock()):
        return kept(name, lambda: _compiled(file, options))


def start(compile_: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs) -> Future[bytes]:
    """Compile a kernel in a thread, while the caller goes on; the future has what ``compile_`` returns or raises."""
    with suppress(MemoryError):
        return _threads().submit(compile_, *args, **kwargs)
    future: Future[bytes] = Future()
    try:
        future.set_result(compile_(*args, **kwargs))
    except Exception as error:  # for whoever needs the kernel
        future.set_exception(error)
    return future


@cache
def _threads() -> ThreadExecutor:
    return ThreadExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS), "nvrtc")


@cache
def _sources() -> bytes:
    """All sources, which include each other."""
    paths = sorted(p for p in SOURCES.iterdir() if p.suffix in (".cu", ".cuh"))
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in paths)


@cache
def _version() -> tuple[int, int]:
    library, major, minor = nvrtc(), ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _compiled(file: str, options: tuple[str, ...]) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    source = (SOURCES / file).read_bytes()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None))
    try:
        all_options = (*options, f"-I{SOURCES}")
        array = (ctypes.c_char_p * len(all_options))(*(o.encode() for o in all_options))
        if library.nvrtcCompileProgram(program, len(all_options), array):
            raise CompileError(f"{file} for {options[0].partition('=')[2]}: {_text(library, program)}")
        return _output(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    return _output(library, program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC failed: {library.nvrtcGetErrorString(result).decode()}")
