"""What a daemon reports of an error before it exits: the cause in one line, the place, and whether a retry may help."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from daemons import worker as worker_module
from daemons.errors import DeviceError, describe
from daemons.ops.basic import rotate
from daemons.options import Options
from daemons.worker import _MessageLoop
from lucevisor.model.values import Backend
from lucevisor.protocol.process import EXIT_CONFIGURATION, EXIT_FAILED


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
    runner = SimpleNamespace(load=lambda *_: (SimpleNamespace(state_map=lambda: None), None))
    monkeypatch.setattr(worker_module, "ModelRunner", runner)
    link, reporter = Sent(), SimpleNamespace(phase=lambda *_: None)
    loop = _MessageLoop(link, reporter, Options("left", Backend.CPU, 0, 0, 0, 1, ()))
    assert loop._load(SimpleNamespace(stages=[], draft=None, score=None, spin_s=0.0), ()) == EXIT_FAILED
    [message] = link.messages
    assert (message.what, message.configuration) == ("load", False)
    assert "the thread 'save_0' did not begin" in message.reason
    assert "memory is full" in message.advice


def test_a_daemon_begins_before_torch_is_imported() -> None:
    """So it can be stopped, report and pin itself meanwhile."""
    code = "import sys, daemons.main; print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
