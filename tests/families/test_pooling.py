"""The last hidden state of chat models against what transformers computes, whole and cut anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lucevisor.protocol.steps import Slice
from tests.families.golden import Golden, opened
from tests.families.pipeline import Pipeline, load_stages

COSINE = 1e-6


def pooled(pipeline: Pipeline, *texts: list[int]) -> Tensor:
    """What texts are pooled to that are computed in one step, [n, width]."""
    for sequence in range(len(texts)):
        pipeline.open(sequence)
    pipeline.run(*enumerate(texts), want_logits=False)
    slices = [Slice(sequence, 0, text, False, pooled=True) for sequence, text in enumerate(texts)]
    found = pipeline.stages[-1].pooled(pipeline.rows, slices)
    for sequence in range(len(texts)):
        pipeline.close(sequence)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """One less the cosine of each two rows, at worst."""
    return float((1 - torch.cosine_similarity(found.double(), expected.double(), dim=-1)).max())


def last_hidden_states(golden: Golden, ends: list[int]) -> Tensor:
    """Rows before ``ends`` of what transformers has after its last layer, normed."""
    rows = golden.hidden[-1][[end - 1 for end in ends]].double()
    output = golden.whole[-1].shards[-1].output
    assert output is not None
    weight = output.norm.weight
    return rows * (rows.square().mean(dim=-1, keepdim=True) + output.norm.epsilon).rsqrt() * weight.double()


@pytest.mark.parametrize("name", ["llama", "qwen35", "gemma3", "gemma4_e2b"])
def test_last_hidden_states_of_a_batch(name):
    golden, ends = opened(name), [len(opened(name).ids), 40, 1, 17]
    expected, texts = last_hidden_states(golden, ends), [golden.ids[:end] for end in ends]
    splits = golden.layer_splits()
    for split in ([], splits[:1], [splits[0], splits[-1]]):
        found = pooled(golden.pipeline(load_stages(golden.spec, split)), *texts)
        assert found.dtype == torch.float32
        assert distance(found, expected) < COSINE
