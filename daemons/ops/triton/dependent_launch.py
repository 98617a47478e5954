"""Programmatic dependent launch of short kernels, on NVIDIA GPUs from sm_90 on.

A kernel that calls :func:`wait_for_inputs` first lets the one behind it start at once, and waits until all kernels
ahead of it are done.  Launches thus hide behind the kernel ahead, and products of ``daemons.ops.cuda`` load
weights meanwhile.  Invariant: no kernel launched so touches memory before :func:`wait_for_inputs`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """The first statement of a kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls :func:`wait_for_inputs`."""
    if device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
