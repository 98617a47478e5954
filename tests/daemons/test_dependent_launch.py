"""Machine code of kernels that start while the one ahead still runs: what that one writes is read behind the wait."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from daemons.ops.cuda.compiler import CompileError, compile_kernel
from daemons.ops.cuda.limits import DTYPES, WIDE_ARCHITECTURE
from daemons.ops.cuda.slabs import SlabShape

triton = importlib.util.find_spec("triton")
DISASSEMBLER = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else Path()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DISASSEMBLER.is_file(), reason="Triton's wheel has no nvdisasm here"),
]


def machine_code(folder: Path, kernel: str, file: str, architecture: str, constants: tuple[str, ...]) -> list[str]:
    """Of one kernel of a file, line by line."""
    try:
        (folder / "code").write_bytes(compile_kernel(file, architecture, (*constants, *DTYPES[torch.bfloat16])))
    except CompileError as error:
        if "error:" in str(error):
            raise
        pytest.skip(str(error))
    told = subprocess.run([DISASSEMBLER, "-c", folder / "code"], check=True, capture_output=True, text=True).stdout
    return told.partition(f".section\t.text.{kernel},")[2].partition(".section\t.text.")[0].splitlines()


@pytest.mark.parametrize("blocks_each", [1, 2])
@pytest.mark.parametrize(("heads", "halves"), [(3, 2), (2, 2), (8, 1)])
def test_the_delta_net_reads_its_inputs_behind_the_wait(heads, halves, blocks_each, tmp_path):
    """A compiler may move loads of what it takes for constant, and it did not write the kernel ahead."""
    constants = (f"HEADS={heads}", "N_KEY=16", "TAPS=4", "WARPS=8", f"HALVES={halves}", f"BLOCKS_EACH={blocks_each}")
    lines = machine_code(tmp_path, "delta_net", "delta_net.cu", "sm_90", constants)
    [wait] = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    inputs = [i for i, line in enumerate(lines) if "LDG.E.U16" in line]  # nothing else is 16 bits wide
    assert len(inputs) >= 16
    assert min(inputs) > wait


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_sums_are_read_behind_the_wait_and_all_before_one_is_added(gated, tmp_path):
    """Of 12, with 71 registers; a compiler that keeps 32 blocks on a multiprocessor has 32 of them."""
    shape = SlabShape(gated, 2, 2, 1, 132, 0, from_shared=True)
    lines = machine_code(tmp_path, "gemv_slabs_sums", "gemv_slabs.cu", WIDE_ARCHITECTURE, shape.constants("Q4_K"))
    [wait] = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    parts = [i for i, line in enumerate(lines) if "LDG.E.128" in line]
    assert len(parts) == 12
    assert wait < min(parts)
    assert max(parts) < min(i for i, line in enumerate(lines) if "FADD" in line and i > min(parts))
