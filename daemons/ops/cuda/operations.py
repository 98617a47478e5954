"""The operations of a layer on Triton kernels and, where it is faster, CUDA C++, for NVIDIA GPUs with clusters."""

from __future__ import annotations

import torch

from daemons.ops.cuda.delta_net import CudaDeltaNet, constants, fits
from daemons.ops.operations import GatedDeltaNetOp, GatedDeltaNetParams
from daemons.ops.triton_operations import TritonGatedDeltaNet, TritonOperations


class CudaOperations(TritonOperations):
    """See :class:`daemons.ops.operations.Operations`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, architecture: str) -> None:
        self.device, self.dtype, self.architecture = device, dtype, architecture
        self._delta_nets: dict[tuple[str, ...], CudaDeltaNet] = {}

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        if not fits(weights):
            return super().gated_delta_net(weights)
        key = constants(weights)
        if key not in self._delta_nets:
            self._delta_nets[key] = CudaDeltaNet(weights, self.device, self.dtype, self.architecture)
        return TritonGatedDeltaNet(weights, self._delta_nets[key])

    def load(self) -> None:
        """Wait for kernels that compile.  Raises CompileError or DriverError."""
        for delta_net in list(self._delta_nets.values()):
            delta_net.load()
