"""What a daemon reports of an error before it exits: the cause in one line, the place, and whether a retry may help."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from daemons import worker as worker_module
from daemons.check import run_check
from daemons.errors import DeviceError, describe
from daemons.ops.basic import rotate
from daemons.ops.cpu import compiler
from daemons.ops.cpu.library import cpu_kernels
from daemons.ops.cuda.compiler import CompileError, compile_kernel, nvrtc, start
from daemons.ops.selection import KernelSelector
from daemons.options import Options
from daemons.runner import ModelRunner
from daemons.weights.packed import CHUNK, TILE_ROWS, PackedWeights, empty_packed
from daemons.worker import _MessageLoop
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import BY_NAME
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import Load, Loaded, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Check, MessageKind
from lucevisor.protocol.process import EXIT_CONFIGURATION, EXIT_FAILED
from tests.families.pipeline import pools_of


class Sent:
    """A link that keeps what was sent."""

    def __init__(self) -> None:
        self.messages = []

    def send(self, message) -> None:
        self.messages.append(message)


def reported(what: str, error: Exception):
    link = Sent()
    worker = _MessageLoop(link, None, Options("left", Backend.CPU, 0, 0, 0, 1, ()))
    try:
        raise error
    except Exception as caught:
        code = worker._fail(what, caught, "stage 0")
    [message] = link.messages
    return code, message


def test_an_error_of_torch_is_told_in_one_line_with_the_innermost_frame_of_ours():
    with pytest.raises(RuntimeError) as caught:
        rotate(torch.zeros(2, 4, 8), torch.zeros(3, 8), torch.zeros(3, 8))
    text = describe(caught.value)
    assert text.startswith("RuntimeError: The size of tensor a")
    assert "(at daemons/ops/" in text
    assert "in rotate)" in text


def test_the_hints_that_torch_adds_are_left_to_the_details():
    error = RuntimeError("CUDA error: out of luck\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n")
    assert describe(error) == "RuntimeError: CUDA error: out of luck"
    assert describe(MemoryError()) == "MemoryError"
    code, message = reported("step 7", error)
    assert code == EXIT_FAILED
    assert message.reason == "RuntimeError: CUDA error: out of luck"
    assert "CUDA_LAUNCH_BLOCKING" in message.details


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_file_that_is_missing_in_a_step_is_tried_again_and_in_a_load_is_not(kind):
    code, message = reported("step 7", kind(2, "No such file", "/root/.triton/cache/x"))
    assert (code, message.configuration) == (EXIT_FAILED, False)
    code, message = reported("load", kind(2, "No such file", "model.gguf"))
    assert (code, message.configuration) == (EXIT_CONFIGURATION, True)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "the device is full"),
        (MemoryError(), "the machine's memory is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the machine's memory is full"),
        (DeviceError("cuda:0", "gone", "look at the cables"), "look at the cables"),
    ],
)
def test_the_advice_names_what_is_short(error, advice):
    assert reported("step 7", error)[1].advice.startswith(advice)


@pytest.mark.usefixtures("no_thread_begins")
def test_a_load_whose_threads_find_no_memory_to_begin_fails_with_their_name(monkeypatch):
    runner = SimpleNamespace(load=lambda *_: (SimpleNamespace(state_map=lambda: None), Loaded([], {}, 0.0)))
    monkeypatch.setattr(worker_module, "ModelRunner", runner)
    link, reporter = Sent(), SimpleNamespace(phase=lambda *_: None)
    loop = _MessageLoop(link, reporter, Options("left", Backend.CPU, 0, 0, 0, 1, ()))
    load = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 1)
    assert loop._load(load, Frame(MessageKind.LOAD, 0, 0, load, memoryview(b""))) == EXIT_FAILED
    [message] = link.messages
    assert (message.what, message.configuration) == ("load", False)
    assert "the thread 'save_0' did not begin" in message.reason
    assert "memory is full" in message.advice


def test_a_daemon_begins_before_torch_is_imported() -> None:
    """So it can be stopped, report and pin itself meanwhile."""
    code = "import sys, daemons.main; print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- failed compilations


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
    """The file to which a compiler that fails writes its arguments, in a process that has not compiled yet."""
    called, broken = tmp_path / "calls", tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\necho \"$@\" >>{called}\necho 'fatal error: out of luck' >&2\nexit 1\n")
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
    sources = [argument for argument in calls.read_text().split() if argument.endswith(".cpp")]
    assert len(sources) == len(set(sources)) > 0  # several at once, none of them again


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
        self.code = start(compile_kernel, "gemv.cu", "sm_90", ("KIND=NONE", "TILE_BYTES=0"))
        return 1

    def load(self, packed: PackedWeights) -> None:
        self.n_calls += 1
        self.code.result()


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
        packed = [empty_packed(BY_NAME["Q6_K"], TILE_ROWS, CHUNK, CPU) for _ in range(3)]  # layers
        products = [selector.packed_linear(one, CHUNK) for one in packed]
        selector.finish()
        assert all(product.implementation.startswith("packed, triton") for product in products)
        assert selector.selected["cpu linear Q6_K"].startswith("packed, triton")
    assert gemv.n_calls == 1
    (warning,) = {*selectors[0].warnings, *selectors[1].warnings}
    assert len(selectors[1].warnings) == 1
    assert warning.startswith("cpu multiplies Q6_K with Triton kernels, slower than CUDA C++: CompileError: gemv.cu")
