"""Timing of layers in a daemon: every kind of layer of every family can be timed alone, and work done takes time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
import torch

from daemons import tuning
from daemons.check import run_check
from daemons.device import CPU
from daemons.models.loader import WeightLoader
from daemons.ops.cpu.compiler import CpuCompileError
from daemons.ops.cpu.library import cpu_kernels
from daemons.ops.cpu.linear import TiledLinear
from daemons.ops.kernel_thresholds import CANDIDATES, KernelThresholds, conditions, name_of, read, write
from daemons.ops.selection import KernelSelector
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.placement.speeds import kinds_of, units_of
from lucevisor.protocol.messages import Check, Measure, Span, Tune
from tests.daemons.cpu_kernels import needs_cpu_kernels

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


# ---- tuning


@pytest.fixture
def amx(monkeypatch):
    """A cpu with AMX: others multiply all rows in the same way, and there is nothing to tune."""
    monkeypatch.setattr(cpu_kernels(), "many_by_onednn", True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Other tests must not load what is kept here, and the C++ kernels are not compiled anew."""
    with contextlib.suppress(CpuCompileError):
        cpu_kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tuning_order() -> Check:
    return Check([str(DEMO)], 0, Dtype.BFLOAT16, tune=Tune([0], torch.get_num_threads()))


@needs_cpu_kernels
def test_a_cpu_is_tuned_and_loads_what_it_found(amx, monkeypatch):
    monkeypatch.setattr(tuning, "N_TURNS", 1)
    monkeypatch.setattr("daemons.timing.ROUND_S", 0.001)
    lines = run_check(tuning_order(), Backend.CPU, []).lines
    assert {line.subject for line in lines} == {"cpu:0 bfloat16 Q4_K", "cpu:0 bfloat16 Q6_K"}
    found, ignored = read(conditions(CPU, torch.bfloat16))
    assert not ignored
    assert all(limits["tiled rows"] in CANDIDATES["tiled rows"] for limits in found.tuned.values())
    spec = open_spec(DEMO)
    layouts = shard_layouts(
        spec, LayerRange(0, 1), embedding=False, output=False, backend=Backend.CPU, dtype=Dtype.BFLOAT16
    )
    layout = next(r for r in layouts if r.kind.name == "Q4_K" and len(r.shape) == 2)
    selector = KernelSelector(CPU, torch.bfloat16)
    weights = WeightLoader(spec.files, [layout], selector, lambda done, total: None)
    product = weights.linear(layout.name)
    weights.close()
    assert isinstance(product, TiledLinear)
    assert product.max_rows == found.limit("Q4_K", "tiled rows", 0)
    assert selector.selected["cpu linear Q4_K"] == f"{product.implementation} (tuned)"


@needs_cpu_kernels
def test_a_cpu_without_amx_has_nothing_to_tune(monkeypatch):
    monkeypatch.setattr(cpu_kernels(), "many_by_onednn", False)
    assert run_check(tuning_order(), Backend.CPU, []).lines == []


@needs_cpu_kernels
def test_what_fails_is_told_and_nothing_is_kept(amx, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such speed")

    monkeypatch.setattr(tuning, "seconds", broken)
    [line] = run_check(tuning_order(), Backend.CPU, []).lines
    assert not line.ok
    assert "no such speed" in line.detail
    assert not any(tmp_path.rglob(name_of(conditions(CPU, torch.bfloat16))))


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setattr(tuning, "seconds", lambda *_: pytest.fail("it was measured"))
    [line] = run_check(tuning_order(), Backend.CPU, []).lines
    assert not line.ok
    assert "XDG_CACHE_HOME/lucevisor cannot be written" in line.detail
    assert read(conditions(CPU, torch.bfloat16)) == (KernelThresholds(), "")
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        write(conditions(CPU, torch.bfloat16), GOOD)


GOOD = {"Q4_K": {"tiled rows": 64}}


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: b"{",
        lambda record: b"\xff",
        lambda record: b"[]",
        lambda record: msgspec.json.encode(record | {"version": 2}),
        lambda record: msgspec.json.encode(record | {"more": 1}),
        lambda record: msgspec.json.encode(record | {"limits": {"Q4_K": {"tiled rows": 65}}}),
        lambda record: msgspec.json.encode(record | {"limits": {"Q4_K": {"tiled rows": -1}}}),
        lambda record: msgspec.json.encode(record | {"limits": {"Q4_K": {"rows": 64}}}),
        lambda record: msgspec.json.encode(record | {"conditions": record["conditions"] | {"torch": "1.0"}}),
    ],
)
def test_a_damaged_or_foreign_file_changes_nothing_and_is_told(damage):
    here = conditions(CPU, torch.bfloat16)
    path = write(here, GOOD)
    assert read(here) == (KernelThresholds(GOOD), "")
    path.write_bytes(damage(msgspec.json.decode(path.read_bytes())))
    found, ignored = read(here)
    assert found == KernelThresholds()
    assert str(path) in ignored
    assert "lucevisor bench --tune" in ignored
