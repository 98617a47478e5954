"""What a device offers the kernels, and what they are compiled with for a dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from daemons.ops.cuda.driver import memory_speed

DTYPES = {torch.bfloat16: (), torch.float16: ("FLOAT16_ACTIVATIONS",)}
"""dtype of the activations -> what the kernels are compiled with."""
CLUSTER_CAPABILITIES = (9, 10)
"""Major capabilities of GPUs whose blocks work in clusters."""
WIDE_CAPABILITY, WIDE_ARCHITECTURE = (9, 0), "sm_90a"
"""Those of GPUs whose matrix units read a factor from shared memory (wgmma); no later one runs this code."""
FAST_MEMORY = 4e12
"""Bytes a second from which on products of some rows wait for instructions, not memory: H200 4.9e12, H100 3.4e12."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A device's multiprocessors, and bytes of shared memory of each and of one block."""

    n_processors: int
    shared_bytes: int
    block_shared_bytes: int
    clusters: bool
    """Whether blocks of a cluster reach each other's."""
    wide_products: bool = False
    """Whether matrix units read it (wgmma)."""
    fast_memory: bool = False
    """Whether the device's memory delivers FAST_MEMORY and more."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        found = torch.cuda.get_device_properties(device)
        block = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stub
        clusters, wide = found.major in CLUSTER_CAPABILITIES, (found.major, found.minor) == WIDE_CAPABILITY
        fast = wide and memory_speed(device.index) >= FAST_MEMORY
        return cls(found.multi_processor_count, found.shared_memory_per_multiprocessor, block, clusters, wide, fast)


def eight_rows_bytes(kind: str) -> int:
    """Shared bytes of a chunk of eight rows: numbers, their factors and, for some quant types, sums (rows.cuh)."""
    return 4096 + 32 + (256 if kind in ("Q4_K", "Q5_K") else 0)
