"""What links between hosts do to an automatic placement: order of hosts, hosts that are left out, and what is said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lucevisor.config import Config, load
from lucevisor.model.drafters import draft_paths, open_draft, read_draft_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import dtype_bytes
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.links import ASSUMED, Link, Links, Traffic, best_order
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_text
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.placement.speeds import ANSWER_TOKENS, PROMPT_TOKENS, Speeds, measurement_request
from lucevisor.protocol.messages import Timing
from tests.model.drafter_files import UPSTREAM
from tests.placement.made import MIB, cpu

WHEN = "2026-01-02 03:04 UTC"
HOSTS = ["", "attic", "cellar"]
LAN, WLAN, WAN = Link(1e-4, 1.1e9, WHEN), Link(4e-3, 2e7, WHEN), Link(4e-2, 2e6, WHEN)


def configured(folder: Path, hosts: Sequence[str], goal: str = "latency", more: str = "") -> Config:
    """A group on each of ``hosts``, in this order, and no devices named."""
    (folder / "secret").write_text("0123456789abcdef" * 4)
    (folder / "secret").chmod(0o600)
    text = '[model]\npath = "model.gguf"\n[cluster]\nlisten = "10.0.0.1"\nsecret_file = "secret"\n'
    for i, host in enumerate(hosts):
        text += f'[groups.g{i}]\nbackend = "cpu"\nthreads = 1\n' + (f'host = "{host}"\n' if host else "")
    text += f'[placement]\ngoal = "{goal}"\n{more}[cache]\nprefix_slots = 0\n'
    text += '[draft]\nkind = "off"\n[engine]\nmax_sequences = 8\n'
    (folder / "box.toml").write_text(text)
    return load(folder / "box.toml")


def speeds_of(spec: ModelSpec, config: Config, inventory: dict, ms: Sequence[float]) -> Speeds:
    """Device i takes ``ms[i]`` for a layer and token, ten times that for 512, and as long for the output."""
    request = measurement_request(spec, config, inventory, dict.fromkeys(inventory, 1), "1")
    assert request is not None
    one = [Timing(each / 1e3, each / 1e2, each / 1e3, each / 1e3) for each in ms]
    return request.to_speeds([[one[i]] * len(spans) for i, spans in enumerate(request.spans)], WHEN)


def made(
    spec: ModelSpec, config: Config, ms: Sequence[float] | None, links: Links, gib: Sequence[float] = (16, 16, 16)
) -> Placement | Infeasible:
    inventory = {name: [cpu(gib[i])] for i, name in enumerate(config.groups)}
    config = with_target_devices(config, inventory)
    speeds = None if ms is None else speeds_of(spec, config, inventory, ms)
    return plan(spec, config, inventory, speeds, links=links)


def hosts_of(result: Placement | Infeasible) -> list[str]:
    assert isinstance(result, Placement), result.message
    return [device.host for device in result.devices]


def seconds_of(spec: ModelSpec, placement: Placement, links: Links, n_rows: int = PROMPT_TOKENS) -> float:
    """What the reference request takes by the model."""
    traffic = Traffic(PROMPT_TOKENS, n_rows, ANSWER_TOKENS, dtype_bytes(placement.dtype, spec.boundary_width))
    ways_s = sum(traffic.ways_s(links, [device.host for device in placement.devices]))
    times = [(device.prefill_s or 0, device.decode_s or 0) for device in placement.devices]
    return ways_s + sum(prefill_s * PROMPT_TOKENS / n_rows + decode_s * ANSWER_TOKENS for prefill_s, decode_s in times)


# ---- costs


def test_a_message_takes_half_a_round_trip_and_its_bytes():
    assert Links().between("attic", "attic") is None
    assert Links().message_s("", "", 1 << 20) == 0
    assert Links().between("", "attic") == ASSUMED
    links = Links({"attic": Link(2e-3, 1e6, "b"), "cellar": Link(1e-3, 5e5, "a")})
    assert links.message_s("", "attic", 1000) == pytest.approx(1e-3 + 40e-6 + 1e-3)
    assert links.between("attic", "cellar") == links.between("cellar", "attic") == Link(3e-3, 5e5, "a")
    between = links.between("attic", "barn")
    assert between is not None
    assert not between.measured


def test_tokens_go_back_to_the_first_stage():
    links, traffic = Links({"attic": Link(2e-3, 1e9, WHEN)}), Traffic(512, 256, 100, 1000)
    one_s = 1e-3 + 40e-6
    back, there = traffic.ways_s(links, ["", "attic"])
    assert back == pytest.approx(100 * one_s + one_s)
    assert there == pytest.approx(2 * (one_s + 256e3 / 1e9) + 100 * (one_s + 1e3 / 1e9))
    assert traffic.ways_s(links, ["attic"]) == pytest.approx((2 * one_s,))
    drafted, _ = traffic.ways_s(links, ["", "attic"], "")  # rows to the drafter here, and its drafts stay here
    assert drafted == pytest.approx(there + one_s)
    assert traffic.ways_s(links, ["", "attic"], "attic") == (back, there)


# ---- orders


@given(st.lists(st.integers(0, 20), min_size=15, max_size=15), st.booleans())
def test_no_order_is_worse_than_the_first(scores, drop):
    hosts = ("a", "b", "c")
    table = dict(zip([o for n in (1, 2, 3) for o in permutations(hosts, n)], scores, strict=True))
    chosen = best_order(hosts, lambda order: (table[order],), drop=drop)
    assert table[chosen] <= table[hosts]
    assert drop or len(chosen) == 3
    if not drop:  # all that one move reaches; of five other orders of three hosts, four
        reached = [order for order in permutations(hosts) if order != hosts[::-1]]
        assert table[chosen] <= min(table[order] for order in reached)


# ---- placements


def test_the_host_behind_a_slow_link_is_at_an_end(demo, tmp_path):
    """In the middle it would be reached twice a token."""
    links = Links({"attic": WLAN, "cellar": LAN})
    result = made(demo, configured(tmp_path, ["", "attic", "cellar"]), None, links)
    assert hosts_of(result)[1] != "attic"
    text = plan_text(result)
    assert "in this order: 512 prompt tokens and 256 generated tokens take" in text
    assert re.search(
        r"2\.\d+ ms a token, 2\d\.\d ms for 512 tokens at once \(round trip 4(\.1)? ms, 19\.1 MiB/s, measured 2026",
        text,
    )


def test_the_last_layers_are_where_the_drafter_is(small, tmp_path):
    """Its rows cross no link then."""
    text = configured(tmp_path, ["", "attic", "cellar"], more='target_layer_split = "auto"\n').file.read_text()
    text = text.replace('kind = "off"', 'kind = "dflash"\npath = "d.gguf"\ndevice = "g1:0"')
    (tmp_path / "box.toml").write_text(text)
    drafter = read_draft_spec(open_draft(draft_paths(UPSTREAM)), small, "dflash")
    config = load(tmp_path / "box.toml")
    inventory = {name: [cpu()] for name in config.groups}
    links = Links({"attic": WLAN, "cellar": WLAN})
    result = plan(small, with_target_devices(config, inventory), inventory, None, drafter, links=links)
    assert hosts_of(result)[-1] == "attic"


def test_groups_of_a_host_are_together(demo, tmp_path):
    result = made(demo, configured(tmp_path, ["", "attic", ""]), None, Links({"attic": LAN}))
    assert hosts_of(result) in (["", "", "attic"], ["attic", "", ""])


def test_what_is_named_is_in_the_order_in_which_it_is_named(demo, tmp_path):
    more = 'target_devices = ["g0:0", "g1:0", "g2:0"]\n'
    result = made(demo, configured(tmp_path, ["", "attic", ""], more=more), [1, 1, 1], Links({"attic": WAN}))
    assert hosts_of(result) == ["", "attic", ""]
    assert "g0:0 to g1:0: 20" in plan_text(result)


def test_a_host_that_only_costs_time_holds_no_layers(demo, tmp_path):
    config = configured(tmp_path, ["", "attic"])
    result = made(demo, config, [1, 1], Links({"attic": WAN}))
    assert hosts_of(result) == [""]
    assert isinstance(result, Placement)
    assert "with attic, 2.39 s on this one alone" in result.hosts_left_out
    assert result.reasons[0] == result.hosts_left_out
    assert hosts_of(made(demo, config, [1, 1], Links({"attic": LAN}))) in (["", "attic"], ["attic", ""])
    assert hosts_of(made(demo, config, [1, 0.01], Links({"attic": WLAN}))) == ["attic"]  # the slow one is this one
    assert hosts_of(made(demo, config, [1, 0.9], Links({"attic": WAN}))) == [""]
    for_throughput = configured(tmp_path, ["", "attic"], goal="throughput")
    assert len(hosts_of(made(demo, for_throughput, [1, 1], Links({"attic": WLAN})))) == 2


def test_a_host_whose_memory_is_needed_stays(demo, tmp_path):
    little = 60 * MIB / 2**30
    result = made(demo, configured(tmp_path, ["", "attic"]), [1, 1], Links({"attic": WAN}), [little, 16])
    assert isinstance(result, Placement)
    assert result.max_context == demo.context_tokens
    assert set(hosts_of(result)) >= {"attic"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    hosts=st.permutations(HOSTS),
    ways=st.lists(st.sampled_from([LAN, WLAN, WAN]), min_size=2, max_size=2),
    ms=st.lists(st.sampled_from([0.1, 1.0, 10.0]), min_size=3, max_size=3),
)
def test_by_the_model_a_placement_is_never_slower_than_in_the_order_of_the_configuration(
    demo, tmp_path, hosts, ways, ms
):
    links = Links(dict(zip(HOSTS[1:], ways, strict=True)))
    chosen = made(demo, configured(tmp_path, hosts), ms, links)
    named = configured(tmp_path, hosts, more='target_devices = ["g0:0", "g1:0", "g2:0"]\n')
    before = made(demo, named, ms, links)
    assert isinstance(chosen, Placement)
    assert isinstance(before, Placement)
    n_rows = min(PROMPT_TOKENS, demo.context_tokens - 1)
    took, takes = (seconds_of(demo, one, links, n_rows) for one in (before, chosen))
    event(f"{len(chosen.devices)} hosts, {takes / took:.1f} of the time")
    assert (
        takes <= took * 1.03 + 0.1
    )  # splits within 3 % count as equal; the named first one was timed with its embedding
    visited = hosts_of(chosen)
    assert len(set(visited)) == len(visited)
