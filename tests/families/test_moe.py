"""Routing and the ways to multiply with chosen experts, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.experts import ConcatExperts, DenseExperts
from daemons.ops.moe import ExpertMlp
from daemons.ops.operations import TorchOperations
from daemons.ops.router import RoutedExperts, Router
from tests.numerics import Bound, bound


def by_token(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What the words say, one token and one expert at a time, in float64."""
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for e, w in zip(ids[t].tolist(), weights[t].double(), strict=True):
            row = x[t].double()
            out[t] += w * (down[e].double() @ (F.silu(gate[e].double() @ row) * (up[e].double() @ row)))
    return out


@pytest.mark.parametrize(("n_tokens", "n_experts", "k"), [(1, 8, 3), (5, 1, 1), (40, 8, 3), (33, 4, 4), (64, 50, 2)])
@pytest.mark.parametrize("joined", [False, True])
def test_every_way_is_the_loop(n_tokens, n_experts, k, joined, monkeypatch):
    g = torch.Generator().manual_seed(n_tokens)
    gate, up = (torch.randn(n_experts, 24, 20, generator=g) / 4 for _ in range(2))
    down = torch.randn(n_experts, 20, 24, generator=g) / 4
    x = torch.randn(n_tokens, 20, generator=g)
    ids = torch.stack([torch.randperm(n_experts, generator=g)[:k] for _ in range(n_tokens)])
    weights = torch.rand(n_tokens, k, generator=g)
    both = ConcatExperts([DenseExperts(gate), DenseExperts(up)]) if joined else DenseExperts(torch.cat((gate, up), 1))
    mlp = ExpertMlp(both, DenseExperts(down), "silu", TorchOperations())
    wanted = by_token(x, ids, weights, gate, up, down)
    ways = [mlp.results, mlp.per_expert, mlp.grouped, mlp.batched]

    def summed(way):
        return (way(x, ids) * weights.unsqueeze(2)).sum(1).double()

    allowed = bound(lambda x: (mlp.per_expert(x, ids) * weights.unsqueeze(2)).sum(1), x)
    assert all(allowed.worst(summed(way), wanted) <= 1 for way in ways)
    assert allowed.worst(mlp(x, RoutedExperts(ids, weights, None)), wanted) <= 1
    monkeypatch.setattr("daemons.ops.experts.DEQUANT_ELEMENTS", 3000)
    monkeypatch.setattr("daemons.ops.moe.DEQUANT_ELEMENTS", 3000)  # two experts at a time
    assert mlp.experts_at_a_time == 2
    assert all(allowed.worst(summed(way), wanted) <= 1 for way in ways)


def test_biases_in_every_way():
    g = torch.Generator().manual_seed(5)
    gate_up, down = (torch.randn(4, n, 20, generator=g) / 4 for n in (40, 20))
    biases = torch.randn(4, 40, generator=g), torch.randn(4, 20, generator=g)
    x, ids = torch.randn(9, 20, generator=g), torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(9)])
    mlp = ExpertMlp(DenseExperts(gate_up), DenseExperts(down), "swiglu_oai", TorchOperations(), biases)
    wanted = torch.empty(9, 2, 20, dtype=torch.float64)
    for t in range(9):
        for i, e in enumerate(ids[t].tolist()):
            gate, up = (gate_up[e].double() @ x[t].double() + biases[0][e].double()).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            wanted[t, i] = down[e].double() @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + biases[1][e].double()
    allowed = bound(lambda x: mlp.per_expert(x, ids), x)
    assert all(allowed.worst(way(x, ids).double(), wanted) <= 1 for way in (mlp.per_expert, mlp.grouped, mlp.batched))


def test_a_row_does_not_depend_on_its_neighbours():
    g = torch.Generator().manual_seed(3)
    mlp = ExpertMlp(
        DenseExperts(torch.randn(6, 32, 16, generator=g)),
        DenseExperts(torch.randn(6, 16, 16, generator=g)),
        "silu",
        TorchOperations(),
    )
    router = Router(torch.randn(6, 16, generator=g), 2, "softmax", True, 1.0)
    x = torch.randn(30, 16, generator=g)
    together = mlp(x, router(x))
    allowed = bound(lambda x: mlp(x, router(x)), x)
    for i in (0, 7, 29):
        row = x[i : i + 1]
        assert Bound(*(part[i : i + 1] for part in allowed)).worst(mlp(row, router(row)), together[i : i + 1]) <= 1


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_the_chosen(gating, normalise):
    g = torch.Generator().manual_seed(1)
    weight, x, bias = torch.randn(7, 12, generator=g), torch.randn(9, 12, generator=g), torch.randn(7, generator=g)
    per_expert = torch.rand(7, generator=g)
    router = Router(weight, 3, gating, normalise, 2.5, bias, per_expert)
    ids, weights, shared_gate = router(x)
    wanted = torch.empty(weights.shape, dtype=torch.float64)
    assert shared_gate is None
    for t in range(9):
        scores = weight.double() @ x[t].double()
        scores = scores.sigmoid() if gating == "sigmoid" else scores.exp() / scores.exp().sum()
        best = sorted(range(7), key=lambda e: -float(scores[e] + bias[e]))[:3]
        assert ids[t].tolist() == best
        total = sum(float(scores[e]) for e in best) if normalise else 1.0
        wanted[t] = torch.tensor([float(scores[e]) / total * 2.5 * float(per_expert[e]) for e in best])
    assert bound(lambda x: router(x).weights, x).worst(weights, wanted) <= 1


def test_weights_that_are_all_almost_nothing_stay_finite():
    router = Router(torch.full((4, 2), -200.0), 2, "sigmoid", True, 1.0)
    assert torch.isfinite(router(torch.ones(1, 2)).weights).all()


def test_a_shared_part_is_added_as_far_as_it_is_open():
    g = torch.Generator().manual_seed(4)
    weight, x, shared = (torch.randn(*shape, generator=g) for shape in ((5, 12), (3, 12), (3, 12)))
    matrices = [DenseExperts(torch.randn(4, *shape, generator=g)) for shape in ((16, 12), (12, 8))]
    mlp = ExpertMlp(*matrices, "silu", TorchOperations())
    chosen = Router(weight, 2, "softmax", True, 1.0, has_shared_gate=True)(x)
    plain = Router(weight[:4], 2, "softmax", True, 1.0)(x)
    assert torch.equal(chosen.experts, plain.experts)
    opened = mlp(x, plain) + shared * torch.sigmoid(x @ weight[4:].t())
    allowed = bound(lambda x: mlp(x, plain) + shared * torch.sigmoid(x @ weight[4:].t()), x)
    assert allowed.worst(mlp(x, chosen, shared), opened) <= 1
    assert allowed.worst(mlp(x, plain, shared), mlp(x, plain) + shared) <= 1
