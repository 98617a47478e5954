"""Operations of a cpu in bfloat16 whose results for a row have the same bits whatever rows are beside it.

Most C++ kernels are so anyway.  These take the place of torch's forms, whose sums and vectors depend on the number of
rows, and of the chunks in which attention of a long slice was computed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from daemons.errors import LoadError
from daemons.ops.batch_invariant import in_short_slices
from daemons.ops.cpu.library import CpuKernels
from daemons.ops.cpu.operations import CpuOperations
from daemons.ops.operations import SHORT_SLICE, GatedDeltaNetOp, GatedDeltaNetParams, PagedAttention
from daemons.ops.router import RoutedExperts, RouteFn, Router


class BatchInvariantInt8Linear:
    """See :class:`daemons.ops.linear.Int8CpuLinear`."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, scale: Tensor) -> None:
        self.kernels, self.weight, self.scale = kernels, weight, scale.float()
        self.n_out, self.n_bytes = weight.shape[0], weight.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        product = self.kernels.multiply_dense(x, self.weight.to(x.dtype), torch.float32)
        return product.mul_(self.scale).to(x.dtype)


class BatchInvariantRouter:
    """See :class:`daemons.ops.router.Router`."""

    def __init__(self, kernels: CpuKernels, router: Router) -> None:
        self.kernels, self.router = kernels, router

    def __call__(self, x: Tensor) -> RoutedExperts:
        router, n_experts = self.router, self.router.n_experts
        scores = self.kernels.multiply_dense(x.float(), router.weight)
        if router.logit_bias is not None:
            scores += router.logit_bias
        probabilities = torch.empty(len(x), n_experts)
        self._gate(scores, n_experts, router.gating == "sigmoid", probabilities)
        shared_gate = None
        if router.has_shared_gate:
            shared_gate = torch.empty(len(x), 1)
            self._gate(scores[:, n_experts:], 1, True, shared_gate)
            shared_gate = shared_gate.squeeze(1)
        return router.top_experts(probabilities, shared_gate, _sum_in_order)

    def _gate(self, scores: Tensor, n: int, is_sigmoid: bool, out: Tensor) -> None:
        self.kernels.calls.gate_rows(scores.data_ptr(), len(scores), scores.stride(0), n, is_sigmoid, out.data_ptr())


def _sum_in_order(x: Tensor) -> Tensor:
    """[T, k] -> [T, 1], without torch's sum, whose order depends on the shape."""
    total = x[:, :1].clone()
    for i in range(1, x.shape[1]):
        total += x[:, i : i + 1]
    return total


class BatchInvariantCpuOperations(CpuOperations):
    """See :class:`daemons.ops.operations.Operations`."""

    batch_invariant = True
    longest_paged_slice = 1 << 30

    def router(self, router: Router) -> RouteFn:
        return BatchInvariantRouter(self.kernels, router)

    def moe_combine(
        self, results: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
    ) -> Tensor:
        # each of these rounds exactly, with vectors or without; a fused multiply-add or a library's sum would not
        total = results[:, 0].float() * weights[:, :1]
        for i in range(1, results.shape[1]):
            total = total + results[:, i].float() * weights[:, i : i + 1]
        if shared is not None:
            beside = shared.float()
            total = total + (beside if shared_gate is None else beside * shared_gate.unsqueeze(1))
        return total.to(results.dtype)

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        attend = super().paged_attention(window=window, scale=scale, softcap=softcap, causal=causal, sinks=sinks)
        assert attend is not None
        return partial(in_short_slices, attend, SHORT_SLICE) if causal else attend

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        found = super().gated_delta_net(weights)
        if found is None:
            why = f"the cpu has no kernel for a gated delta net with heads of {weights.dim}"
            raise LoadError("engine.deterministic", why, "set it to false", configuration=True)
        return found

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        self.kernels.calls.softcap(logits.data_ptr(), logits.numel(), cap, out.data_ptr())
        return out

    def gelu(self, x: Tensor) -> Tensor:
        return self.act_and_mul(torch.cat((x, torch.ones_like(x)), dim=1), "gelu_tanh")

    def log1p(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self.kernels.calls.log1p_of(x.data_ptr(), x.numel(), out.data_ptr())
        return out
