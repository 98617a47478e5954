"""Compiled kernels of cpus, kept in build/cpu-kernels by the hash of what they are made of: once for all workers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import patch

from daemons.ops.code_cache import cache_directory
from daemons.ops.cpu import compiler

KEPT = Path(__file__).parents[1] / "build" / "cpu-kernels"


def share() -> None:
    """Put the library into this process' cache, if this machine can have one; workers that need it at once wait."""
    own, found = cache_directory(), next(filter(None, map(shutil.which, compiler._compilers())), None)
    if own is None or found is None or not compiler._cpu_flags() >= compiler.NEEDED:
        return
    try:
        with patch.dict(os.environ, {"XDG_CACHE_HOME": str(KEPT)}):
            library, _ = compiler._built(found, compiler._cpu_flags())
    except (compiler.CpuCompileError, OSError):
        return  # whoever needs it says why
    if not (own / library.name).exists():
        shutil.copy(library, own)
