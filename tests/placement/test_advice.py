"""Plans that do not fit, automatic ranges, legal boundaries, and any plan at all."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.config import Config
from lucevisor.model.pages import pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Infeasible
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
        (BOX_SPLIT, {"max_context": 99_968, "prefill_chunk": 99_968, "pages": 1562}, box(), "engine.prefill_chunk"),
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
    owners = {"[0,4)": 2, "[4,12)": 1}  # layers of each space that own pages
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
