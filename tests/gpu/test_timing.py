"""Layers can be timed on a GPU, where steps of one token are captured."""

from __future__ import annotations

import pytest
import torch

from daemons.check import run_check
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from lucevisor.placement.speeds import kinds_of, units_of
from lucevisor.protocol.messages import Span
from tests.daemons.test_timing import GOLDEN, order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/model.gguf")))
def test_each_kind_of_layer_is_timed(name: str) -> None:
    [file] = (GOLDEN / name).glob("*.gguf")
    spec = open_spec(file)
    units = units_of(spec)
    assert len(kinds_of(spec)) == len(units)
    spans = [Span(0, unit, embedding=i == 0, output=i == len(units) - 1) for i, unit in enumerate(units)]
    checked = run_check(order(file, spans, 65, Dtype.BFLOAT16), Backend.CUDA, [])
    assert checked.lines == []
    assert all(0 < t.decode_s < 1 and 0 < t.prefill_s < 1 for t in checked.timings)
