"""Machine code of kernels that start while the one ahead still runs: what that one writes is read behind the wait."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from daemons.ops.cuda.compiler import CompileError, compile_kernel
from daemons.ops.cuda.limits import DTYPES

triton = importlib.util.find_spec("triton")
DISASSEMBLER = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else Path()


@pytest.mark.skipif(not DISASSEMBLER.is_file(), reason="Triton's wheel has no nvdisasm here")
@pytest.mark.parametrize(("heads", "halves"), [(3, 2), (2, 2), (8, 1)])
def test_the_delta_net_reads_its_inputs_behind_the_wait(heads, halves, tmp_path):
    """A compiler may move loads of what it takes for constant, and it did not write the kernel ahead."""
    constants = (f"HEADS={heads}", "N_KEY=16", "TAPS=4", "WARPS=8", f"HALVES={halves}", *DTYPES[torch.bfloat16])
    try:
        (tmp_path / "code").write_bytes(compile_kernel("delta_net.cu", "sm_90", constants))
    except CompileError as error:
        pytest.skip(str(error))
    told = subprocess.run([DISASSEMBLER, "-c", tmp_path / "code"], check=True, capture_output=True, text=True).stdout
    lines = told.splitlines()
    [wait] = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    inputs = [i for i, line in enumerate(lines) if "LDG.E.U16" in line]  # nothing else is 16 bits wide
    assert len(inputs) >= 16
    assert min(inputs) > wait
