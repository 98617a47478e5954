"""Automatic splits by speed: what is measured, under which conditions, and what the planner does with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lucevisor.config import Config
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.devices import Inventory, target_devices
from lucevisor.placement.planner import partition_problem, plan
from lucevisor.placement.report import plan_json, plan_text
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.placement.sizing import SizingInputs
from lucevisor.placement.speeds import MeasurementRequest, SpeedModel, Speeds, kinds_of, measurement_request, model_key
from lucevisor.protocol.messages import Timing
from tests.placement.made import CPUS, DEMO, configure, cpu, gpu, placed
from tests.placement.test_partition import every_split

TWO = {"left": [cpu()], "right": [cpu()]}
THREADS = {"left": 1, "right": 1, "third": 1}


def asked(spec: ModelSpec, config: Config, inventory: Inventory) -> MeasurementRequest:
    request = measurement_request(spec, config, inventory, THREADS, "1")
    assert request is not None
    return request


def made(request: MeasurementRequest, timing: Callable[[int, str], Timing]) -> Speeds:
    """Speeds from a function of target and kind."""
    targets = [[timing(i, kind) for kind in spans] for i, spans in enumerate(request.spans)]
    return request.to_speeds(targets, "2026-01-02 03:04 UTC")


def uniform(request: MeasurementRequest, factors: Sequence[float], tail_s: float = 0.0) -> Speeds:
    """TargetDevice i takes ``factors[i]`` ms a layer and token, 100 of that for a prompt; the last has a tail."""
    last = len(factors) - 1
    return made(
        request, lambda i, _: Timing(factors[i] / 1e3, factors[i] / 10, tail_s * (i == last), tail_s * (i == last))
    )


def layers_of(result: Placement | Infeasible) -> list[str]:
    assert isinstance(result, Placement), result.message
    return [str(d.layers) for d in result.devices]


# ---- what is measured


def test_one_layer_of_each_kind_is_timed_with_the_ends_where_they_lie(demo, tmp_path):
    request = asked(demo, configure(tmp_path, [*CPUS, "third:0"]), {**TWO, "third": [cpu()]})
    kinds = kinds_of(demo)
    assert len(kinds) == demo.n_layers
    assert 2 <= len(set(kinds)) < demo.n_layers  # delta net, attention, and types that differ
    for i, spans in enumerate(request.spans):
        assert set(spans) == set(kinds[i : demo.n_layers - 2 + i])
        for kind, span in spans.items():
            assert kinds[span.layers.start] == kind
            assert span.layers.stop == span.layers.start + 1
        assert [s.embedding for s in spans.values()].count(True) == (i == 0)
        assert [s.output for s in spans.values()].count(True) == (i == 2)


def test_nothing_is_asked_where_nothing_is_chosen(demo, tmp_path):
    for config in (configure(tmp_path, CPUS, [1, 1]), configure(tmp_path, ["left:0"])):
        assert measurement_request(demo, config, TWO, THREADS, "1") is None
    assert measurement_request(demo, configure(tmp_path, CPUS), {"left": [cpu()]}, THREADS, "1") is None
    many = [f"left:{i}" for i in range(9)]  # more than there are layers: refused by the planner
    assert measurement_request(demo, configure(tmp_path, many), TWO, THREADS, "1") is None


def test_the_key_changes_with_all_that_speeds_depend_on(demo, big, tmp_path):
    config = configure(tmp_path, CPUS)
    conditions = asked(demo, config, TWO).conditions
    assert asked(demo, for_throughput(config), TWO).conditions == conditions
    others = [
        measurement_request(demo, config, TWO, {"left": 1, "right": 2}, "1"),
        measurement_request(demo, config, TWO, THREADS, "2"),
        measurement_request(big, config, TWO, THREADS, "1"),
        measurement_request(demo, configure(tmp_path, CPUS[::-1]), TWO, THREADS, "1"),
        measurement_request(demo, configure(tmp_path, CPUS, dtype="float32"), TWO, THREADS, "1"),
        measurement_request(demo, configure(tmp_path, CPUS, kv_dtype="q8_0"), TWO, THREADS, "1"),
        measurement_request(demo, configure(tmp_path, CPUS, prefill_chunk=64), TWO, THREADS, "1"),
        measurement_request(demo, configure(tmp_path, ["cuda:0", "left:0"]), {**TWO, "cuda": [gpu()]}, THREADS, "1"),
        measurement_request(
            demo, configure(tmp_path, ["cuda:0", "left:0"]), {**TWO, "cuda": [gpu(name="B")]}, THREADS, "1"
        ),
    ]
    keys = {conditions.key(), *(other.conditions.key() for other in others if other is not None)}
    assert len(keys) == 1 + len(others)
    more_memory = {"left": [cpu(99)], "right": [cpu(99)]}
    assert asked(demo, config, more_memory).conditions.key() == conditions.key()
    assert model_key(demo) == model_key(open_spec(DEMO))


def test_speeds_survive_json_and_nonsense_is_seen(demo, tmp_path):
    speeds = uniform(asked(demo, configure(tmp_path, CPUS), TWO), [1.0, 2.0])
    assert msgspec.json.decode(msgspec.json.encode(speeds), type=Speeds) == speeds
    assert speeds.valid()
    for bad in (float("nan"), float("inf"), -1.0):
        targets = [{**speeds.targets[0], "x": Timing(bad, 1.0)}, speeds.targets[1]]
        assert not msgspec.structs.replace(speeds, targets=targets).valid()
    assert not msgspec.structs.replace(speeds, targets=speeds.targets[:1]).valid()


# ---- what the planner makes of it


def for_throughput(config: Config) -> Config:
    return replace(config, placement=replace(config.placement, goal="throughput"))


def test_the_goals(demo, tmp_path):
    config = configure(tmp_path, CPUS)
    request = asked(demo, config, TWO)
    speeds = uniform(request, [1.0, 3.0])
    assert layers_of(plan(demo, config, TWO, speeds)) == ["[0,7)", "[7,8)"]
    assert layers_of(plan(demo, for_throughput(config), TWO, speeds)) == ["[0,6)", "[6,8)"]
    slow_tail = uniform(request, [1.0, 1.0], tail_s=0.005)
    assert layers_of(plan(demo, for_throughput(config), TWO, slow_tail)) == ["[0,6)", "[6,8)"]


def test_memory_bounds_what_the_fast_device_gets(big, tmp_path):
    """The fast device would take all 64 layers; it has room for some, with 32768 tokens of one sequence."""
    config = configure(tmp_path, ["cuda:0", "hip:0"])
    box = {"cuda": [gpu(0, 12)], "hip": [gpu(0, 94)]}
    speeds = uniform(asked(big, config, box), [1.0, 3.0])
    result = placed(big, config, box, speeds=speeds)
    n_first = result.devices[0].layers.stop
    assert 10 < n_first < 50
    assert result.max_context >= 32768
    assert all(d.fits for d in result.devices)
    n = n_first + 3  # within 3 % of the fastest is good enough, so that it may leave room for two more
    more = configure(tmp_path, ["cuda:0", "hip:0"], [f"0-{n}", f"{n}-64"], max_context=32768)
    assert isinstance(plan(big, more, box), Infeasible)


def test_a_plan_by_speeds_is_quick_and_explained(big, tmp_path):
    devices = ["cuda:0", "hip:0", "hip:1", "left:0"]
    config = configure(tmp_path, devices)
    box = {"cuda": [gpu(0, 23)], "hip": [gpu(0, 94), gpu(1, 31)], "left": [cpu(64)]}
    speeds = uniform(asked(big, config, box), [0.9, 1.3, 1.1, 20.0], tail_s=0.002)
    started = time.process_time()
    result = placed(big, config, box, speeds=speeds)
    assert time.process_time() - started < 10
    shown = plan_text(result)
    assert "layers: goal latency: 512 prompt tokens and 256 generated tokens take all devices together" in shown
    assert "speeds were measured 2026-01-02 03:04 UTC" in shown
    assert f"left:0: {result.devices[3].layers.stop - result.devices[3].layers.start} layer" in shown
    as_data = plan_json(result)
    assert (as_data["goal"], as_data["speeds_measured"]) == ("latency", "2026-01-02 03:04 UTC")
    assert as_data["devices"][3]["decode_s"] == pytest.approx(0.022)
    assert "the first start with this model measures them" in plan_text(plan(big, config, box))


times = st.floats(1e-5, 1e-2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    devices=st.sampled_from([["cuda:0", "left:0"], ["left:0", "right:0", "third:0"], ["cuda:0", "left:0", "left:1"]]),
    throughput=st.booleans(),
    mib=st.tuples(st.integers(1440, 1540), st.integers(70, 420)),
)
def test_any_speeds_give_the_best_of_all_splits_that_fit(demo, tmp_path, data, devices, throughput, mib):
    config = configure(tmp_path, devices, max_context=2048, dtype="float32")
    config = for_throughput(config) if throughput else config
    inventory = {"cuda": [gpu(0, mib[0] / 1024)], **{g: [cpu(mib[1] / 1024)] for g in THREADS}}
    speeds = made(asked(demo, config, inventory), lambda *_: Timing(data.draw(times), 100 * data.draw(times)))
    result = plan(demo, config, inventory, speeds)
    placement = result.placement if isinstance(result, Infeasible) else result
    assert [i for d in placement.devices for i in range(d.layers.start, d.layers.stop)] == list(range(8))
    inputs = SizingInputs(
        spec=demo, targets=target_devices(config, inventory), dtype=placement.dtype, kv_dtype=placement.kv_dtype,
        max_sequences=8, prefill_chunk=512, max_context=2048, pages=None,
    )  # fmt: skip
    problem = partition_problem(
        inputs, SpeedModel.of(demo, speeds), config.placement.goal, demo.legal_boundary, [0.0] * len(inputs.targets)
    )
    splits = {ranges: (seconds, fill) for seconds, fill, ranges in every_split(problem)}
    chosen = tuple(d.layers for d in placement.devices)
    event(f"{len(splits)} of the splits fit")
    if not splits:
        assert placement.goal == ""
        return
    assert isinstance(result, Placement)
    assert all(d.fits for d in result.devices)
    best_s = min(seconds for seconds, _ in splits.values())
    assert splits[chosen][0] <= best_s * 1.03
    assert splits[chosen][1] == min(full for seconds, full in splits.values() if seconds <= best_s * 1.03)
    for ranges in splits:  # what the search took for fitting does fit
        again = configure(tmp_path, devices, [f"{r.start}-{r.stop}" for r in ranges], max_context=2048, dtype="float32")
        assert isinstance(plan(demo, again, inventory), Placement)
