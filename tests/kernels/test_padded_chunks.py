"""Whole models on kernels: padded chunks, whose graph is replayed for other lengths and starts.

The interpreter runs the kernels; tests/gpu/test_graphs.py does the same on a GPU.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from daemons import graphs as graphs_module
from daemons.models import stage as stage_module
from daemons.ops.selection import KernelSelector
from tests.daemons.test_chunk_graphs import capture, keys, repeating
from tests.families.golden import opened
from tests.families.pipeline import Pipeline, load_stages

FIRST = (33, 40, 48)
"""Lengths of the first chunks of sequences; the last one is replayed."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # an interpreter runs the kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy says so, a GPU would not
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4_moe"])
def test_padded_chunks_on_kernels_give_the_golden_logits(name, monkeypatch):
    monkeypatch.setattr(graphs_module, "capture", capture)
    golden = opened(name)
    with mock.patch.object(stage_module, "KernelSelector", partial(KernelSelector, kernels=True)):
        stages = load_stages(golden.spec)
    [graphs] = repeating(stages)
    c = Pipeline(golden.spec, stages)
    for sequence, n in enumerate(FIRST):
        c.open(sequence)
        golden.assert_logits(torch.cat([c.run((sequence, part)) for part in (golden.ids[:n], golden.ids[n:])]))
    assert keys(graphs)[0] == (48, 128)
