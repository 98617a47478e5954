"""A random gated delta net for tests of its kernels: weights, the plain form, pools."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.models.blocks import DeltaNet, DeltaShape, DeltaWeights
from daemons.ops.basic import RmsNorm
from daemons.ops.operations import MixWeights, Reference

EPS = 1e-6


def random_net(
    n_key: int, n_value: int, dim: int, n_taps: int, decay: tuple[float, float], n_states: int, device: str
) -> tuple[MixWeights, DeltaNet, Tensor, Tensor]:
    """``decay``: exp A of the first and of the last head.  The net has copies of the two pools, ``n_states`` long."""
    g = torch.Generator().manual_seed(0)
    shape = DeltaShape(n_key, n_value, dim)

    def random(*extent: int) -> Tensor:
        return torch.randn(*extent, generator=g).to(device)

    taps, dt, weight = random(n_taps, shape.channels), random(n_value), random(dim)
    rates = -torch.linspace(*decay, n_value).to(device)
    norm = RmsNorm(weight, dim, EPS)
    pools = random(n_states, n_taps - 1, shape.channels), random(n_states, n_value, dim, dim)
    weights = DeltaWeights(None, None, taps, rates, dt, norm)  # type: ignore[arg-type]  # the matrices are around it
    net = DeltaNet(shape, weights, pools[0].clone(), pools[1].clone(), Reference())
    return MixWeights(n_key, n_value, dim, taps, rates, dt, norm), net, *pools
