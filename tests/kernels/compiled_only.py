"""Runs kernels for sm_90 without a GPU, on the cpu's memory: they compile, and none is launched.

    python -m tests.kernels.compiled_only  prints what the test of this name wants to know as JSON

Runs in a process of its own, as :mod:`tests.kernels.targets` does.
"""

from __future__ import annotations

import json
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from daemons.cuda_graphs import RepeatedLaunches
from daemons.ops import compile_only
from daemons.ops.triton.basic import act_and_mul, rms_norm


class Driver:
    """Of two devices, on which nothing can be launched."""

    def __init__(self) -> None:
        self.device, self.launchers = 0, 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> None:
        self.launchers += 1


def main() -> None:
    devices = Driver()
    driver.set_active(devices)
    x, found = torch.ones(4, 256, dtype=torch.bfloat16), {}
    launches = RepeatedLaunches(torch.device("cuda"), "what a test does")
    with mock.patch("torch.cuda.current_device", side_effect=devices.get_current_device):
        for name in ("first", "again"):
            with compile_only.compiling() as compilation:
                out = act_and_mul(x, "silu")
                for devices.device in (0, 1):
                    rms_norm(x, None, 1e-6)
                for _ in range(3):  # the second is captured, where launches are
                    launches.launch("key", lambda: None)
                compilation.wait(lambda: None)
                cached = compilation.are_cached()
            found[name] = {"kernels": len(compilation.seconds), "zeros": not out.any(), "done": cached}
            devices.device = 0
    found["launchers"] = devices.launchers
    found["compile only"] = compile_only.compile_only()
    try:
        act_and_mul(x, "silu")
    except AttributeError as error:  # the driver cannot launch
        found["launch"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
