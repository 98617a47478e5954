"""Timing of layers in a daemon: every kind of layer of every family can be timed alone, and work done takes time."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.check import run_check
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.placement.speeds import kinds_of, units_of
from lucevisor.protocol.messages import Check, Measure, Span

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"


def order(file: Path, spans: list[Span], n_rows: int, dtype: Dtype = Dtype.FLOAT32) -> Check:
    return Check([str(file)], 0, dtype, [], Measure(spans, dtype, n_rows, threads=1))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "gemma4_e2b", "laguna"])
def test_each_kind_of_layer_is_timed(name):
    [file] = (GOLDEN / name).glob("*.gguf")
    spec = open_spec(file)
    units = dict(zip(kinds_of(spec), units_of(spec), strict=True))
    spans = [Span(0, unit, embedding=i == 0, output=i == len(units) - 1) for i, unit in enumerate(units.values())]
    checked = run_check(order(file, spans, 65), Backend.CPU, [])
    assert checked.lines == []
    assert len(checked.timings) == len(spans)
    for span, timing in zip(spans, checked.timings, strict=True):
        assert 0 < timing.decode_s < 60
        assert 0 < timing.prefill_s < 60
        assert (timing.end_decode_s > 0) == (timing.end_prefill_s > 0) == (span.embedding or span.output)


def test_layers_that_cannot_be_run_are_a_line_and_no_times():
    spans = [Span(0, LayerRange(0, 1)), Span(0, LayerRange(7, 9))]
    checked = run_check(order(DEMO, spans, 8), Backend.CPU, [])
    assert checked.timings == []
    [line] = checked.lines
    assert not line.ok
    assert line.subject == "cpu:0 layers [7,9)"
    assert "the model has layers [0,8)" in line.detail
