"""The best tokens of large vocabularies."""

from __future__ import annotations

import pytest
import torch

from daemons.ops.choices import TOP_K_CHUNK, top_k


@pytest.mark.parametrize("vocabulary", [17, 4096, TOP_K_CHUNK**2, TOP_K_CHUNK**2 + 1, 248320])
@pytest.mark.parametrize("k", [1, 16])
def test_values_and_indices_are_those_of_torch(vocabulary: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary + k)
    logits = torch.randperm(2 * 3 * vocabulary, generator=generator).view(2, 3, vocabulary).float()  # no two are equal
    logits[0, 0, -16:] += 2e7  # all in one chunk
    wanted = logits.topk(k, dim=-1)
    best, tokens = top_k(logits, k)
    assert torch.equal(best, wanted.values)
    assert torch.equal(tokens, wanted.indices)
