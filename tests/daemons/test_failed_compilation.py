"""A compilation that fails costs once in a process and is told once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from daemons.check import run_check
from daemons.ops.cpu import compiler
from daemons.ops.cpu.library import cpu_kernels
from daemons.ops.cuda.compiler import CompileError, compile_kernel, nvrtc
from daemons.ops.selection import KernelSelector
from daemons.runner import ModelRunner
from daemons.weights.packed import CHUNK, TILE_ROWS, PackedWeights, empty_packed
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import BY_NAME
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.loading import Load, ShardPlan, StagePlan
from lucevisor.protocol.messages import Check
from tests.families.pipeline import pools_of

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[2] / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"


class Log:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def progress(self, _: object) -> None:
        pass

    def log(self, level: str, event: str, **fields: object) -> None:
        self.warnings += [event] if level == "warning" else []


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The file to which a compiler that fails writes a line for each call, in a process that has not compiled yet."""
    called, broken = tmp_path / "calls", tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\necho call >>{called}\necho 'fatal error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_cpu_flags", lambda: compiler.NEEDED)
    monkeypatch.setattr(compiler, "_outcome", cache(compiler._outcome.__wrapped__))
    monkeypatch.setattr("daemons.ops.selection.cpu_kernels", cpu_kernels.__wrapped__)
    return called


def test_shards_of_a_daemon_wait_once_for_a_compiler_that_fails(calls):
    spec, log = open_spec(DEMO), Log()
    shards = [ShardPlan(0, LayerRange(0, 4)), ShardPlan(0, LayerRange(4, spec.n_layers))]
    stage = StagePlan(0, shards, None, None, embedding=True, output=True)
    load = Load([str(DEMO)], Dtype.BFLOAT16, Dtype.BFLOAT16, [stage], [], pools_of(spec), 4, 80)
    runner, loaded = ModelRunner.load(load, Backend.CPU, [], log)
    assert len(runner.stages[0].shards) == 2
    told = "the cpu computes with torch alone, several times slower than with C++ kernels: "
    assert log.warnings == [f"{told}{calls.parent}/broken: fatal error: out of luck"]
    assert loaded.warnings == log.warnings
    assert calls.read_text() == "call\n"


def test_doctor_is_told_what_makes_a_layer_slow(calls):
    found = run_check(Check([str(DEMO)], 0, Dtype.BFLOAT16), Backend.CPU, [])
    assert [line.ok for line in found.lines] == [True]
    [warning] = found.warnings
    assert warning.endswith("broken: fatal error: out of luck")


class BrokenGemv:
    """Stands in for the GPU's kernels: no device, but NVRTC, which is given a quant type that the source lacks."""

    def __init__(self) -> None:
        self.n_calls = 0

    def prepare(self, packed: PackedWeights) -> int:
        self.n_calls += 1
        compile_kernel("gemv.cu", "sm_90", ("KIND=NONE", "TILE_BYTES=0"))
        return 1


def test_matrices_for_which_nvrtc_fails_are_left_to_triton(monkeypatch, tmp_path):
    try:
        nvrtc()
    except CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("daemons.ops.selection._NOT_COMPILED", {})
    gemv, selectors = BrokenGemv(), [KernelSelector(CPU, torch.float16, kernels=True) for _ in range(2)]
    for selector in selectors:
        selector._row_gemv = gemv
        for _ in range(3):  # layers
            packed = empty_packed(BY_NAME["Q6_K"], TILE_ROWS, CHUNK, CPU)
            assert selector.packed_linear(packed, CHUNK).implementation.startswith("packed, triton")
    assert gemv.n_calls == 1
    (warning,) = {*selectors[0].warnings, *selectors[1].warnings}
    assert len(selectors[1].warnings) == 1
    assert warning.startswith("cpu multiplies Q6_K with Triton kernels, slower than CUDA C++: CompileError: gemv.cu")
