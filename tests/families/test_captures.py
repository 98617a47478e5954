"""Captures are the residual stream after their layers, however the layers are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.families.golden import Golden
from tests.families.pipeline import load_stages
from tests.numerics import Bound


@pytest.mark.parametrize("shards", [False, True])
def test_captures_of_every_layer_split_are_the_golden_hidden_states(golden: Golden, shards: bool) -> None:
    n, cuts = golden.spec.n_layers, golden.layer_splits()[1::2]
    layers = sorted({0, 1, n // 2, n - 1})
    split = {"shard_split" if shards else "layer_split": cuts}
    c = golden.pipeline(load_stages(golden.spec, **split, captures=layers))
    c.open(0)
    c.run((0, golden.ids))
    borders = [0, n] if shards else [0, *cuts, n]
    of_stages = [[i for i in layers if a <= i < b] for a, b in pairwise(borders)]
    assert [found is not None for found in c.captures] == [bool(own) for own in of_stages]
    captures = torch.cat([found for found in c.captures if found is not None], dim=-1)
    assert captures.shape == (len(golden.ids), len(layers) * golden.spec.hidden_size)
    for layer, found in zip(layers, captures.split(golden.spec.hidden_size, dim=-1), strict=True):
        bound = Bound(*(x[layer + 1] for x in golden.bounds.hidden))
        assert bound.worst(found, golden.hidden[layer + 1]) <= 1.0
    c.run((0, golden.ids[:9]), want_hidden=True)
    found = [x for x in c.captures if x is not None]
    assert torch.equal(torch.cat(found, dim=-1), torch.cat([c.hidden[i + 1] for i in layers], dim=-1))
