"""Compile CUDA C++ to machine code with NVRTC, the compiler library that torch's CUDA wheels bring along.

Needs neither a GPU nor a CUDA installation.  A kernel takes some 0.2 s, so nothing is cached between processes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCES = Path(__file__).parent


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
    library, program = nvrtc(), ctypes.c_void_p()
    source = (SOURCES / file).read_bytes()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{SOURCES}", *(f"-D{d}" for d in defines)]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if library.nvrtcCompileProgram(program, len(options), array):
            raise CompileError(f"{file} for {architecture}: {_text(library, program)}")
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
