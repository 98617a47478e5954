"""The operations of a layer as Triton kernels: one launch where the reference has up to sixty.  For GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.ops.operations import FEW_TOKENS, Attend, Mix, MixWeights, Norm, PagedQuery
from daemons.ops.paged import PagedTensor
from daemons.ops.router import Chosen, Route, Router
from daemons.ops.triton import basic
from daemons.ops.triton.attention import attend_few
from daemons.ops.triton.delta_chunks import mix_run
from daemons.ops.triton.delta_rule import mix_few
from daemons.ops.triton.routing import choose, scores_few, weighted


class KernelNorm:
    """See :class:`daemons.ops.basic.RmsNorm`."""

    __slots__ = ("epsilon", "weight")

    def __init__(self, weight: Tensor | None, epsilon: float) -> None:
        self.weight = None if weight is None else weight.contiguous()
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return basic.rms_norm(x, self.weight, self.epsilon)

    def float32(self, x: Tensor) -> Tensor:
        return basic.rms_norm(x, self.weight, self.epsilon, torch.float32)

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        return basic.add_rms_norm(h, delta, self.weight, self.epsilon)


class KernelMix:
    """See :class:`daemons.ops.operations.Mix`.  Only heads of 32, 64, 128, ... have a form for long runs."""

    __slots__ = ("longest", "weights")

    def __init__(self, w: MixWeights) -> None:
        self.weights = w
        self.longest = None if w.dim >= 32 and w.dim & (w.dim - 1) == 0 else FEW_TOKENS

    def __call__(self, y: Tensor, convolution: Tensor, states: Tensor, ids: Tensor, offset: int) -> Tensor:
        if y.shape[0] // ids.shape[0] <= FEW_TOKENS:
            return mix_few(y, convolution, states, ids, self.weights)
        return mix_run(y, convolution, states, ids, self.weights, offset)


class KernelRouter:
    """See :class:`daemons.ops.router.Router`."""

    __slots__ = ("router",)

    def __init__(self, router: Router) -> None:
        self.router = router

    def __call__(self, x: Tensor) -> Chosen:
        few = x.shape[0] <= FEW_TOKENS
        return choose(self.router, scores_few(x.contiguous(), self.router.weight) if few else self.router.scores(x))


class Kernels:
    """See :class:`daemons.ops.operations.Operations`."""

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return KernelNorm(weight, eps)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return basic.gated(x, activation)

    def opened(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        return basic.gate_heads(x, gate, "softplus" if softplus else "sigmoid")

    def turned(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        assert norm.weight is not None
        return basic.query_key(x, norm.weight, norm.epsilon, cos, sin)

    def router(self, router: Router) -> Route:
        return KernelRouter(router)

    def weighted(self, results: Tensor, weights: Tensor, shared: Tensor | None, opening: Tensor | None) -> Tensor:
        return weighted(results, weights, shared, opening)

    def attend(self, *, window: int, scale: float, softcap: float) -> Attend | None:
        def few(q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery) -> Tensor:
            return attend_few(
                q,
                keys,
                values,
                where.tables,
                where.rows,
                where.starts,
                where.n_tokens,
                window=window,
                scale=scale,
                softcap=softcap,
                longest=where.reach,
            )

        return few

    def mix(self, weights: MixWeights) -> Mix | None:
        return KernelMix(weights)
