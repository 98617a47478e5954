"""Compile the C++ kernels of this directory with the machine's compiler, for the cpu at hand, and load them.

The library is kept in the user's cache under a name made of sources, compiler and cpu, so only the first daemon of a
version waits for it.  It is linked to no OpenMP library: it takes torch's, whose threads it shares.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from fcntl import LOCK_EX, flock
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock

from daemons.ops.code_cache import cache_directory
from lucevisor.protocol.threads import ThreadExecutor

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fopenmp", "-march=native", "-ffp-contract=off")
NEEDED = frozenset({"avx2", "fma", "f16c"})
"""Flags in /proc/cpuinfo of a cpu that can run the kernels; vectors.h decides by the compiler's what is used beyond."""
TIMEOUT_S = 300.0
_LOADING = Lock()


class CpuCompileError(Exception):
    """No library: the message says why."""


def library() -> ctypes.CDLL:
    """The compiled kernels.  Raises CpuCompileError, the same one at each call: what failed is not tried again."""
    with _LOADING:  # so that two threads do not both compile
        found = _outcome()
    if isinstance(found, CpuCompileError):
        raise CpuCompileError(*found.args)
    return found


@cache
def _outcome() -> ctypes.CDLL | CpuCompileError:
    """What :func:`load` returned or raised in this process."""
    try:
        return load()
    except CpuCompileError as error:
        return error.with_traceback(None)


def load() -> ctypes.CDLL:
    """Load the kernels, compiled unless they are in the cache.  Raises CpuCompileError."""
    flags = _cpu_flags()
    if not flags >= NEEDED:
        raise CpuCompileError(f"the cpu lacks {', '.join(sorted(NEEDED - flags))}")
    compiler = next((found for name in _compilers() if (found := shutil.which(name))), None)
    if compiler is None:
        raise CpuCompileError("no C++ compiler: install g++, or set CXX")
    try:
        file, made_now = _built(compiler, flags)
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            if made_now:
                raise
            file.unlink(missing_ok=True)  # cut short, by a disk that was full or a machine that stopped
            return ctypes.CDLL(str(_built(compiler, flags)[0]))
    except (OSError, MemoryError) as error:
        raise CpuCompileError(str(error)) from error


def _compilers() -> list[str]:
    return [name for name in (os.environ.get("CXX"), "g++", "c++") if name]


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _built(compiler: str, cpu_flags: frozenset[str]) -> tuple[Path, bool]:
    """The library's file, and whether it was compiled now: it was not in the cache.

    Raises CpuCompileError or OSError.
    """
    sources = sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h"))
    digest = sha256(repr((compiler, os.stat(compiler).st_mtime_ns, FLAGS, sorted(cpu_flags))).encode())
    digest.update(platform.machine().encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    directory = cache_directory() or Path(tempfile.mkdtemp(prefix="lucevisor-"))
    target = directory / f"cpu-kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target, False
    with open(directory / "cpu-kernels.lock", "wb") as lock:
        flock(lock, LOCK_EX)  # daemons that start together wait for the first
        missing = not target.exists()
        if missing:
            _compile(compiler, target)
    return target, missing


def _compile(compiler: str, target: Path, flags: Sequence[str] = FLAGS) -> None:
    """Compile each source, as many at a time as there are cores, and link them."""
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects, made = [f"{scratch}/{source.stem}.o" for source in sources], Path(scratch) / "kernels.so"
        commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadExecutor(min(len(sources), len(os.sched_getaffinity(0))), "c++") as threads:
            list(threads.map(_run, commands))  # the first error cancels those that wait
        # without -fopenmp: OpenMP's symbols are found among those of torch's own library
        _run([compiler, "-shared", *objects, "-o", str(made)])
        with open(made, "rb") as file:
            os.fsync(file.fileno())  # else a machine that stops now may leave the name with holes for bytes
        made.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CpuCompileError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CpuCompileError(f"{command[0]}: {lines[0].strip() if lines else f'exit code {done.returncode}'}")
