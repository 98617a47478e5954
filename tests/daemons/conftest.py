import pytest

from daemons.ops.cpu.compiler import CpuCompileError


@pytest.fixture
def without_cpu_kernels(monkeypatch):
    """A machine without a C++ compiler."""

    def missing():
        raise CpuCompileError("no C++ compiler")

    monkeypatch.setattr("daemons.ops.selection.cpu_kernels", missing)
