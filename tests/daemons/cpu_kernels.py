"""Whether this machine can compile and run the cpu's C++ kernels."""

import pytest

from daemons.ops.cpu.compiler import CpuCompileError
from daemons.ops.cpu.library import cpu_kernels
from tests.cpu_library import share


def _reason() -> str:
    share()
    try:
        cpu_kernels()
    except CpuCompileError as error:
        return str(error)
    return ""


needs_cpu_kernels = pytest.mark.skipif(bool(_reason()), reason=f"no C++ kernels here: {_reason()}")
