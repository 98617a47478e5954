"""Random tiny models that see whole texts, against transformers: many texts in a step, whole and cut anywhere."""

from __future__ import annotations

import pytest
import torch

from daemons.errors import StateError
from lucevisor.model.families import open_spec
from lucevisor.protocol.steps import Slice
from tests.families.generate.bert import bert, pooled
from tests.families.generate.made import Draw
from tests.families.pipeline import Pipeline, load_stages
from tests.families.test_pooling import distance
from tests.families.test_pooling import pooled as ours

POOLINGS = ("mean", "cls", "rank")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_bert(pooling, seed, tmp_path):
    draw = Draw(seed)
    made = bert(draw, pooling)
    texts = [draw.ids(n, made.vocabulary) for n in (1, 160, 7, 33, 7, 64, 65, draw.between(2, 90))]
    expected = torch.stack([pooled(made, text) for text in texts])
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    assert spec.skipped == ()
    assert (spec.pooling.bidirectional, spec.pooling.generates) == (True, False)
    for split in ([], [1], [1, spec.n_layers - 1]):
        found = ours(Pipeline(spec, load_stages(spec, split)), *texts)
        if pooling == "rank":
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        else:
            assert distance(found, expected) < 1e-6


def test_half_a_text_is_refused(tmp_path):
    made = bert(Draw(1), "mean")
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    pipeline = Pipeline(spec, load_stages(spec))
    pipeline.open(0)
    pipeline.run((0, [1, 2, 3]), want_logits=False)
    with pytest.raises(StateError, match="must be in one step"):
        pipeline.stages[-1].pooled(pipeline.rows, [Slice(0, 3, [1, 2, 3], False, pooled=True)])
