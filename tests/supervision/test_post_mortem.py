"""Why a daemon ended, in one line: from what real crashes write, and from what torch writes on a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lucevisor.protocol.steps import Step
from lucevisor.supervision.child import N_LINES_AFTER, explain_kill, failure_cause, oom_kills
from lucevisor.supervision.events import State
from tests.supervision.real_groups import Owner, ready_group

CUDA_TRACEBACK = """\
[W init.cpp:12] some warning
Traceback (most recent call last):
  File "/run/staging/daemons/worker.py", line 137, in _step
    outcome = self._runtime.run_step(step, stage, wait_s)
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/run/staging/daemons/ops/linear.py", line 42, in gemv
    return torch.mm(a, b)
  File "/opt/rocm/lib/python3.12/site-packages/torch/functional.py", line 9, in mm
    return _mm(a, b)
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
CUDA_ABORT = """\
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: unspecified launch failure
CUDA kernel errors might be asynchronously reported at some other API call.
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in /opt/lib/libc10.so)

Fatal Python error: Aborted

Thread 0x00007f10202b96c0 (most recent call first):
  File "/run/staging/daemons/heartbeat.py", line 120 in _run

Current thread 0x00007f1020e39b80 (most recent call first):
  File "/opt/lib/python3.12/site-packages/torch/cuda/__init__.py", line 900 in synchronize
  File "/run/staging/daemons/runner.py", line 88 in run_step
  File "/run/staging/daemons/worker.py", line 137 in _step

Extension modules: numpy._core._multiarray_umath, torch._C, msgspec._core (total: 21)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            CUDA_TRACEBACK,
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered "
            "(at daemons/ops/linear.py:42 in gemv, inside torch/functional.py:9 in mm)",
        ),
        (
            CUDA_ABORT,
            "Aborted: CUDA error: unspecified launch failure "
            "(at daemons/runner.py:88 in run_step, inside torch/cuda/__init__.py:900 in synchronize)",
        ),
        ("Fatal Python error: Segmentation fault\n\n<no Python frame>\n", "Segmentation fault"),
        ("one\ntwo\n \n", "two"),
        ("", ""),
        ("Exception ignored in: <x>\n" + CUDA_TRACEBACK.partition("\n")[2] + "the end\n", "the end"),
        (CUDA_TRACEBACK + "served on\n" * N_LINES_AFTER + "out of patience\n", "out of patience"),
        ("Traceback (most recent call last):\n  File cut in the mid", "  File cut in the mid"),
    ],
)
def test_the_cause_is_the_line_that_says_what_failed_and_the_frame_of_ours(text, found):
    assert failure_cause(text.splitlines()) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ctypes; ctypes.string_at(0)", r"Segmentation fault \(at .*:1 in <module>\)|"
         r"Segmentation fault \(at ctypes/__init__.py:\d+ in string_at\)"),
        ("import os; os.abort()", r"Aborted \(at <string>:1 in <module>\)"),
        ("import json; json.loads('{')", r"json.decoder.JSONDecodeError: Expecting .* \(at json/decoder.py:.*\)"),
        ("raise MemoryError", r"MemoryError \(at <string>:1 in <module>\)"),
        ("try:\n 1/0\nexcept Exception:\n raise KeyError(3)", r"KeyError: 3 \(at <string>:4 in <module>\)"),
        ("import sys; sys.exit('no torch here')", "no torch here"),
        ("!", "SyntaxError: invalid syntax"),
    ],
)  # fmt: skip
def test_the_cause_of_real_crashes(code, found):
    ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert ended.returncode
    assert re.fullmatch(found, failure_cause(ended.stderr.splitlines())), ended.stderr


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("segfault", r"signal 11 \(SIGSEGV\): Segmentation fault \(at daemons/worker.py:\d+ in at, inside ctypes/.*\)"),
        ("double free", r"signal 6 \(SIGABRT\): Aborted: .*double free.* \(at daemons/worker.py:\d+ in at\)"),
        ("exit", r"exited with code 3: tiny ends at step"),
    ],
)
async def test_a_crashed_daemon_is_told_by_its_fatal_line(tmp_path, how, reason):
    async with ready_group(tmp_path, f"{how} at step") as (group, _):
        group.link.send(Step(5, 0))
        await group.wait(State.BACKOFF, timeout_s=100)
        assert re.fullmatch(rf"process \d+ (was killed by )?{reason}", group.reason)


async def test_a_sigkill_of_somebody_else_is_told_as_such(tmp_path):
    async with ready_group(tmp_path, owner=Owner()) as (group, _):
        os.kill(group.pid, signal.SIGKILL)
        await group.wait(State.BACKOFF, timeout_s=100)
        assert "(SIGKILL): the supervisor did not send it" in group.reason


def test_the_count_of_out_of_memory_kills(tmp_path: Path):
    assert oom_kills(tmp_path / "vmstat") is None
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    assert oom_kills(tmp_path / "vmstat") == 7
    assert oom_kills() is None or oom_kills() >= 0
    assert "the kernel was out of memory" in explain_kill(3, 4)
    assert "out of memory" not in explain_kill(4, 4) + explain_kill(None, 4) + explain_kill(None, None)
