"""Plans that do not fit, automatic ranges, legal boundaries, and any plan at all."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.config import Config
from lucevisor.model.pages import pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_json, plan_rows, plan_table, plan_text
from lucevisor.placement.result import Infeasible
from lucevisor.protocol.loading import DeviceInfo
from tests.placement.made import BOX, BOX_SPLIT, CPUS, GIB, bare_spec, box, configure, cpu, gpu, placed, refused, wrong

# ---- what does not fit


def follow(spec: ModelSpec, folder: Path, devices: list[str], split: object, advice: str, **engine: object) -> Config:
    """The configuration with every ``key = value`` of a piece of advice applied."""
    written = advice.removeprefix("it fits with ").removesuffix(" together").split(" and ")
    for line in written:
        for section, values in tomllib.loads(line).items():
            if section == "placement":
                split = values["target_layer_split"]
            else:
                engine |= values
    return configure(folder, devices, split, **engine)


def quoted(advice: str) -> str:
    """TOML of an advice line whose format names are bare words."""
    for word in ("bfloat16", "float16", "float32"):
        advice = advice.replace(f"dtype = {word}", f'dtype = "{word}"')
    return advice


@pytest.mark.parametrize(
    ("split", "engine", "inventory", "expected"),
    [
        ([1, 1, 1], {"max_context": 4096}, box(first=4), "placement.target_layer_split"),
        (BOX_SPLIT, {"pages": 100_000}, box(), "engine.pages"),
        (BOX_SPLIT, {"max_context": 262144, "kv_dtype": "float32"}, box(third=26), "engine.kv_dtype"),
        (BOX_SPLIT, {"max_context": 262144}, box(third=16), "engine.max_context"),
        (BOX_SPLIT, {"max_context": 4096, "max_sequences": 600}, box(), "engine.max_sequences"),
        (BOX_SPLIT, {"max_context": 131_072, "prefill_chunk": 131_072, "pages": 2048}, box(), "engine.prefill_chunk"),
    ],
)
def test_advice_holds_when_it_is_followed(big, tmp_path, split, engine, inventory, expected):
    result = refused(big, configure(tmp_path, BOX, split, **engine), inventory)
    assert all(s.short_bytes > 0 for s in result.shortages)
    assert any(expected in line for line in result.advice)
    for line in result.advice:
        assert line.startswith("it fits with ")
        placed(big, follow(big, tmp_path, BOX, split, quoted(line), **engine), inventory)


def test_changes_that_only_help_together_are_found(big, tmp_path):
    engine = {"max_context": 262144, "kv_dtype": "float32", "dtype": "float32"}
    result = refused(big, configure(tmp_path, BOX, [1, 1, 1], **engine), box(8, 12, 12))
    [line] = result.advice
    assert " and " in line
    placed(big, follow(big, tmp_path, BOX, [1, 1, 1], quoted(line), **engine), box(8, 12, 12))


def test_what_can_never_fit_says_so(big, tmp_path):
    result = refused(big, configure(tmp_path, CPUS, [1, 1]), {"left": [cpu(4)], "right": [cpu(4)]})
    [line] = result.advice
    assert "use a smaller quant of the model, or add a device" in line
    [shortage] = result.shortages
    assert shortage.memory == "host"
    needed = sum(d.needed_bytes for d in result.placement.devices) + result.placement.arena_bytes
    assert shortage.needed_bytes == needed
    assert shortage.short_bytes == needed - int(4 * GIB * 0.9) - 1
    assert f"host is {shortage.short_bytes / GIB:.1f} GiB short" in result.message


# ---- automatic ranges


def test_automatic_ranges_follow_the_free_memory(big, tmp_path):
    even = placed(big, configure(tmp_path, BOX), box(24, 24, 24))
    skewed = placed(big, configure(tmp_path, BOX), box(8, 48, 24))
    assert len(skewed.devices[0].layers) < len(even.devices[0].layers)
    assert len(skewed.devices[1].layers) > len(even.devices[1].layers)
    fill = [d.needed_bytes / (d.free_bytes - d.reserve_bytes) for d in even.devices]
    assert max(fill) <= 1
    assert "layers: split so that the fullest device is least full" in " ".join(even.reasons)


# ---- layers that share state


@pytest.fixture
def sharing(monkeypatch) -> ModelSpec:
    """Twelve layers, the last six read pages of layers 4 and 5; weights are not looked at."""
    for function in ("non_layer_layouts", "layer_layouts"):
        monkeypatch.setattr(f"lucevisor.placement.cost.{function}", lambda *_, **__: [])
    return bare_spec(12, {i: 4 + i % 2 for i in range(6, 12)}, window=100)


def test_a_boundary_between_sharing_layers_moves_with_a_notice(sharing, tmp_path):
    p = placed(sharing, configure(tmp_path, CPUS, ["0-7", "7-12"]))
    assert [str(d.layers) for d in p.devices] == ["[0,4)", "[4,12)"]
    [notice] = p.notices
    assert "the boundary between left:0 and right:0 moved from layer 7 to 4" in notice
    weights = placed(sharing, configure(tmp_path, [*CPUS, "third:0"], [1, 1, 1]))
    assert [str(d.layers) for d in weights.devices] == ["[0,3)", "[3,4)", "[4,12)"]
    assert len(weights.notices) == 2
    auto = placed(sharing, configure(tmp_path, CPUS))
    assert auto.devices[0].layers.stop <= 4


def test_too_many_devices_for_the_legal_boundaries(sharing, tmp_path):
    error = wrong(sharing, configure(tmp_path, [f"left:{i}" for i in range(6)], "auto"))
    assert error.key == "placement.target_devices"
    assert "only in front of layers 1, 2, 3, 4" in error.why


def test_window_pages_hold_all_sequences(sharing, tmp_path):
    p = placed(sharing, configure(tmp_path, CPUS, max_sequences=3, prefill_chunk=128))
    assert p.window_tokens == 100
    # 99 + 128 positions fill 4 pages and touch 5; one more to grow by
    assert p.pools.window_pages == 3 * (5 + 1)
    assert p.pools.states == 0
    page = 2 * 64 * 2 * 32 * 4
    owners = {"[0,4)": 2, "[4,12)": 1}  # layers of each KV group that own pages
    for d in p.devices:
        assert d.state_bytes % page == 0
    total = sum(d.state_bytes for d in p.devices)
    assert total == page * sum(owners.values()) * (p.pools.full_pages + p.pools.window_pages)


# ---- whatever is asked


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_plan_covers_every_layer_and_fits(demo, tmp_path, data):
    groups = data.draw(st.lists(st.sampled_from(["cuda", "hip", "left", "right"]), min_size=1, max_size=6))
    devices = [f"{g}:{groups[:i].count(g)}" for i, g in enumerate(groups)]
    split = data.draw(
        st.one_of(
            st.just("auto"),
            st.lists(st.floats(0.01, 100), min_size=len(devices), max_size=len(devices)),
        )
    )
    engine = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "max_context": st.integers(2, 10_000),
                "max_sequences": st.integers(1, 40),
                "prefill_chunk": st.integers(1, 4096),
                "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
                "kv_dtype": st.sampled_from(["float32", "float16"]),
            },
        )
    )
    free = st.floats(0.6, 3)
    inventory = {g: [gpu(i, data.draw(free)) for i in range(6)] for g in ("cuda", "hip")}
    inventory |= {g: [cpu(data.draw(free))] for g in ("left", "right")}
    known = data.draw(st.sets(st.sampled_from(sorted(inventory))))
    result = plan(demo, configure(tmp_path, devices, split, **engine), {g: inventory[g] for g in known})
    p = result.placement if isinstance(result, Infeasible) else result
    assert [layer for d in p.devices for layer in range(d.layers.start, d.layers.stop)] == list(range(8))
    assert [layer for s in p.stages for layer in range(s.layers.start, s.layers.stop)] == list(range(8))
    assert [d.device for d in p.devices] == [shard.device for s in p.stages for shard in s.shards]
    assert p.max_step_tokens >= p.prefill_chunk + p.max_sequences
    assert p.pools.full_pages >= pages_of(p.max_context)
    assert p.max_context <= engine.get("max_context", demo.context_tokens)
    for memory in {d.memory for d in p.devices}:
        users = [d for d in p.devices if d.memory == memory]
        if users[0].free_bytes is None:
            continue
        needed = sum(d.needed_bytes for d in users) + (p.arena_bytes if memory == "host" else 0)
        fits = needed <= users[0].free_bytes - users[0].reserve_bytes
        assert all(d.fits is fits for d in users)
    assert isinstance(result, Infeasible) == any(d.fits is False for d in p.devices)


# ---- output of ``lucevisor plan``


DEVICES = ["cuda:0", "left:0", "left:1"]


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"),
        (1023 << 20, "1023.0 MiB"), (5000 << 40, "5000.0 TiB"), (-(3 << 20), "-3.00 MiB"), ((1 << 30) - 1, "1.00 GiB"),
        (1048575, "1.00 MiB"), (10239, "10.0 KiB"),
    ],
)  # fmt: skip
def test_sizes(n_bytes, shown):
    assert format_bytes(n_bytes) == shown


def test_what_fits(demo, tmp_path):
    inventory = {"cuda": [gpu(name="RTX 3090")], "left": [cpu()]}
    p = placed(demo, configure(tmp_path, DEVICES, [1, 2, 1]), inventory)
    assert [(r.group, r.device, r.layers, r.verdict) for r in plan_rows(p)] == [
        ("cuda", "cuda:0 RTX 3090", "[0,2)", "fits"),
        ("left", "left:0 CPU", "[2,6)", "fits"),
        ("left", "left:1 CPU", "[6,8)", "fits"),
    ]
    weights = [d.weight_bytes for d in p.devices]
    assert [r.weights for r in plan_rows(p)] == list(map(format_bytes, weights))
    lines = plan_table(p).splitlines()
    start, end = lines[0].index("DEVICE"), lines[0].index("WEIGHTS") + len("WEIGHTS")
    assert {(line[start - 1], line[start : start + 2], line[end - 1 : end + 1]) for line in lines[1:]} == {
        (" ", "cu", "B "),
        (" ", "le", "B "),
    }
    shown = plan_text(p)
    assert shown.startswith("lucevisor-demo-22m (qwen35, 8 layers, Q4_K) on 3 devices, 2 stages\n")
    assert all(reason in shown for reason in p.reasons)
    assert "host: 16.0 GiB are free for left:0, left:1 together; 1.60 GiB of that are kept free" in shown
    assert "It does not fit" not in shown
    data = json.loads(json.dumps(plan_json(p)))
    assert (data["fits"], data["advice"]) == (True, [])
    assert data["model"] == {"name": "lucevisor-demo-22m", "architecture": "qwen35", "layers": 8, "quant": "Q4_K"}
    assert data["pages"]["full"] == p.pools.full_pages
    assert [(d["layers"], d["weight_bytes"], d["memory"]) for d in data["devices"]] == [
        ([0, 2], weights[0], "cuda:0"),
        ([2, 6], weights[1], "host"),
        ([6, 8], weights[2], "host"),
    ]
    assert data["stages"] == [
        {"stage": 0, "group": "cuda", "layers": [0, 2], "devices": ["cuda:0"]},
        {"stage": 1, "group": "left", "layers": [2, 8], "devices": ["left:0", "left:1"]},
    ]


def test_what_is_short_is_shown_with_advice(demo, tmp_path):
    tight = DeviceInfo(0, "RTX 3090", 24 << 30, 10 << 20, "sm_86", gpu().dtypes)
    result = refused(demo, configure(tmp_path, DEVICES, [1, 2, 1]), {"cuda": [tight], "left": [cpu()]})
    [shortage] = result.shortages
    short = format_bytes(shortage.short_bytes)
    assert [r.verdict for r in plan_rows(result)] == [f"short by {short}", "fits", "fits"]
    shown = plan_text(result)
    assert f"cuda:0 is {short} short: cuda:0 would take" in shown
    assert all(line in shown for line in result.advice)
    data = json.loads(json.dumps(plan_json(result)))
    assert (data["fits"], data["advice"]) == (False, list(result.advice))
    assert [(d["fits"], d["short_bytes"] > 0) for d in data["devices"]] == [(False, True), (True, False), (True, False)]


def test_unknown_memory_is_shown_as_such(demo, tmp_path):
    result = plan(demo, configure(tmp_path, DEVICES))
    assert {(r.free, r.verdict) for r in plan_rows(result)} == {("unknown", "unknown")}
    assert plan_json(result)["fits"] is None
