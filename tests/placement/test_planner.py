"""Plans of real and full-size models: exact bytes, what fits and what is chosen."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace as replaced

from daemons.models.stage import LoadedStage
from lucevisor.config import CacheConfig, Config, KvFlashConfig, load
from lucevisor.model.families import open_spec
from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES, ResidencyPolicy, max_resident_chunk, pages_of, pool_pages
from lucevisor.model.quant_types import padded_rows
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.placement.devices import (
    HOST_PAGES,
    HOST_RESERVE,
    SPARE_DEVICE_BYTES,
    SPARE_HOST_BYTES,
    with_target_devices,
)
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.report import plan_json, plan_text
from lucevisor.placement.result import Placement, PlacementError
from lucevisor.placement.stages import LoadFiles, load_message
from tests.combinations import combinations
from tests.model.qwen35_file import Shape, write
from tests.placement.made import BOX, BOX_SPLIT, CPUS, DEMO, GIB, MIB, box, configure, cpu, gpu, placed, refused, wrong

# ---- what is where


def test_gpus_hold_the_bytes_of_the_file(big, tmp_path):
    """Every type of the Q4_K_M mix rests on a GPU as it is, and float32 vectors and taps stay float32."""
    p = placed(big, configure(tmp_path, BOX, BOX_SPLIT), box())
    assert sum(d.weight_bytes for d in p.devices) == 16_536_406_016

    def stored(part: str) -> int:
        return sum(t.n_bytes for name, t in big.files.tensors.items() if name.startswith(part))

    layers = [sum(stored(f"blk.{i}.") for i in range(d.layers.start, d.layers.stop)) for d in p.devices]
    assert p.devices[0].weight_bytes == layers[0] + 248320 * 5120 * 144 // 256
    assert p.devices[1].weight_bytes == layers[1]
    assert p.devices[2].weight_bytes == layers[2] + 248320 * 5120 * 210 // 256 + 5120 * 4


def test_tied_embeddings_count_at_both_ends_but_once_on_one_gpu(tmp_path):
    table = 1024 * 256 * 210 // 256
    shape = Shape(tied=True)
    spec = open_spec(write(tmp_path / "tied.gguf", shape))
    tensors = spec.files.tensors.values()
    whole = sum(t.n_bytes // t.shape[0] * padded_rows(t.shape[0]) if len(t.shape) > 1 else t.n_bytes for t in tensors)
    one = placed(spec, configure(tmp_path, ["cuda:0"]), {"cuda": [gpu()]})
    two = placed(spec, configure(tmp_path, ["cuda:0", "hip:0"]), {"cuda": [gpu()], "hip": [gpu()]})
    assert one.devices[0].weight_bytes == whole
    assert sum(d.weight_bytes for d in two.devices) == whole + table
    assert any("token_embd.weight is both embedding and output matrix" in reason for reason in two.reasons)


def test_all_cpu_devices_draw_from_one_memory(big, tmp_path):
    devices = ["left:0", "left:1", "right:0"]
    config = configure(tmp_path, devices, [1, 1, 1], max_context=4096, pages=64)
    p = placed(big, config, {"left": [cpu(24)], "right": [cpu(25)]})
    assert {d.memory for d in p.devices} == {"host"}
    assert {d.free_bytes for d in p.devices} == {24 * GIB}
    assert len(p.stages) == 2
    short = refused(big, config, {"left": [cpu(14)], "right": [cpu(14)]})  # each shard alone would fit
    [shortage] = short.shortages
    assert [str(d) for d in shortage.devices] == devices
    assert all(d.short_bytes == shortage.short_bytes for d in short.placement.devices)
    assert all(d.needed_bytes < 14 * GIB for d in short.placement.devices)


# ---- formats


@pytest.mark.parametrize(
    ("devices", "inventory", "expected"),
    [
        (CPUS, {"left": [cpu()], "right": [cpu()]}, "bfloat16"),
        (CPUS, {"left": [cpu()], "right": [cpu(bfloat16=False)]}, "float32"),
        (CPUS, None, "float32"),
        (BOX, None, "bfloat16"),
        (BOX, {"cuda": [gpu(bfloat16=False)], "hip": [gpu(), gpu(1)]}, "float16"),
        (["cuda:0", "left:0"], {"cuda": [gpu()], "left": [cpu()]}, "bfloat16"),
        (["cuda:0", "left:0"], {"cuda": [gpu()], "left": [cpu(bfloat16=False)]}, "float32"),
    ],
)
def test_automatic_dtype(demo, tmp_path, devices, inventory, expected):
    p = placed(demo, configure(tmp_path, devices), inventory)
    assert (p.dtype, p.kv_dtype) == (expected, expected)
    assert p.reasons[0].startswith(f"dtype {expected}: ")


def test_a_configured_dtype_is_taken_and_slow_devices_are_named(demo, tmp_path):
    config = configure(tmp_path, CPUS, dtype="bfloat16", kv_dtype="float32")
    p = placed(demo, config, {"left": [cpu()], "right": [cpu(bfloat16=False)]})
    assert (p.dtype, p.kv_dtype) == ("bfloat16", "float32")
    [notice] = p.notices
    assert "right:0 cannot multiply it natively" in notice
    assert "left:0" not in notice


# ---- context and pages


def test_what_fits_entirely_is_given_entirely(demo, tmp_path):
    p = placed(demo, configure(tmp_path, CPUS), {"left": [cpu()], "right": [cpu()]})
    assert p.max_context == demo.context_tokens
    assert p.pools.full_pages == 8 * pages_of(demo.context_tokens)
    assert p.max_step_tokens == 512 + 8
    assert (p.pools.states, p.window_tokens) == (9, None)


def test_automatic_pages_fill_the_device_that_is_short_and_no_more(big, tmp_path):
    p = placed(big, configure(tmp_path, BOX, BOX_SPLIT), box())
    assert p.max_context == 262144
    assert f"pages {p.pools.full_pages}: as many as fit in hip:1" in " ".join(p.reasons)
    hip1 = p.devices[2]
    assert hip1.free_bytes is not None
    page = big.unit_bytes(KvGroup.FULL, hip1.layers, p.kv_dtype)
    left = hip1.free_bytes - hip1.reserve_bytes - hip1.needed_bytes
    assert 0 <= left < 2 * page
    fixed = {"max_context": 262144, "prefill_chunk": p.prefill_chunk}
    more = configure(tmp_path, BOX, BOX_SPLIT, pages=p.pools.full_pages + 2, **fixed)
    assert [s.memory for s in refused(big, more, box()).shortages] == ["hip:1"]


def test_automatic_pages_leave_the_host_to_other_programs(demo, tmp_path):
    """Sequences of 16,384 tokens would fill all of it."""
    long = dataclasses.replace(demo, context_tokens=1 << 14)
    host = {"left": [cpu(3)], "right": [cpu(3)]}
    p = placed(long, configure(tmp_path, CPUS, max_sequences=64), host)
    page = demo.unit_bytes(KvGroup.FULL, LayerRange(0, demo.n_layers), p.kv_dtype)
    share = HOST_PAGES * (1 - HOST_RESERVE) * 3 * GIB
    assert share - 2 * page < p.pools.full_pages * page <= share
    [reason] = [r for r in p.reasons if r.startswith("pages ")]
    assert "25% of the host's usable memory or one sequence" in reason
    assert "engine.pages sets more" in reason
    longer = dataclasses.replace(demo, context_tokens=1 << 17)
    one = placed(longer, configure(tmp_path, CPUS, max_sequences=64), host)
    assert one.pools.full_pages == pages_of(one.max_context)
    more = placed(long, configure(tmp_path, CPUS, max_sequences=64, pages=p.pools.full_pages + 99), host)
    assert more.pools.full_pages == p.pools.full_pages + 99


def test_the_context_is_lowered_until_one_sequence_fits(big, tmp_path):
    p = placed(big, configure(tmp_path, BOX, BOX_SPLIT), box(third=10))
    assert 0 < p.max_context < 262144
    assert p.max_context % 64 == 0
    assert p.pools.full_pages == p.max_context // 64
    assert any(r.startswith(f"max_context {p.max_context}: the longest sequence that fits") for r in p.reasons)
    longer = configure(tmp_path, BOX, BOX_SPLIT, max_context=p.max_context + 128)
    refused(big, longer, box(third=10))


def test_pages_bound_an_automatic_context(demo, tmp_path):
    p = placed(demo, configure(tmp_path, CPUS, pages=5))
    assert (p.max_context, p.pools.full_pages, p.prefill_chunk) == (320, 5, 320)
    assert p.max_step_tokens == 328
    assert "engine.pages = 5 hold no more" in " ".join(p.reasons)
    assert "engine.max_sequences = 8: engine.pages = 5 holds no more than 5 of 64 tokens" in " ".join(p.notices)


def test_unknown_memory_promises_little(big, tmp_path):
    p = placed(big, configure(tmp_path, BOX, BOX_SPLIT))
    assert (p.pools.full_pages, p.max_context) == (512, 32768)
    assert [d.fits for d in p.devices] == [None, None, None]
    assert "it is unknown whether the shards fit cuda:0, hip:0, hip:1" in p.reasons[-1]
    asked = placed(big, configure(tmp_path, BOX, BOX_SPLIT, max_context=131072))
    assert (asked.pools.full_pages, asked.max_context) == (2048, 131072)  # one sequence, at least


def test_settings_that_do_less_than_they_say_are_named(demo, tmp_path):
    p = placed(demo, configure(tmp_path, CPUS, pages=10_000, max_context=8192, prefill_chunk=10_000))
    notices = "\n".join(p.notices)
    assert "engine.max_context = 8192 exceeds the 4096 tokens" in notices
    assert "engine.pages = 10000 is more than can be used: 8 sequences of 8192 tokens fill 1024" in notices
    assert "engine.prefill_chunk = 10000 is cut to max_context = 8192" in notices


# ---- one GPU seen by several groups


def test_groups_that_see_the_same_gpu_share_its_memory(big, tmp_path):
    config = configure(tmp_path, ["cuda:0", "hip:0"], [1, 1])
    apart, same = (
        placed(big, config, {"cuda": [replaced(gpu(0, 40), uuid="a")], "hip": [replaced(gpu(0, 40), uuid=uuid)]})
        for uuid in ("b", "a")
    )
    assert [d.memory for d in apart.devices] == ["cuda:0", "hip:0"]
    assert [d.memory for d in same.devices] == ["cuda:0", "cuda:0"]
    assert sum(d.needed_bytes for d in same.devices) <= 40 * GIB - same.devices[0].reserve_bytes
    assert same.devices[0].reserve_bytes == apart.devices[0].reserve_bytes + 768 * MIB
    assert any("cuda:0: 40.0 GiB are free for cuda:0, hip:0 together" in reason for reason in same.reasons)


def test_devices_of_one_group_are_never_the_same(big, tmp_path):
    """Some drivers report one uuid for all."""
    gpus = [replaced(gpu(i, 40), uuid="a") for i in range(2)]
    p = placed(big, configure(tmp_path, ["cuda:0", "cuda:1"]), {"cuda": gpus})
    assert [d.memory for d in p.devices] == ["cuda:0", "cuda:1"]


# ---- the prefill chunk


@pytest.mark.parametrize(("gib", "chunk"), [(20, 512), (20.5, 1024), (120, 2048)])
def test_chunks_do_not_take_much_of_the_context(big, tmp_path, gib, chunk):
    """Activations and masks of a longer chunk take memory from pages."""
    inventory = {"cuda": [gpu(0, gib)]}
    p = placed(big, configure(tmp_path, ["cuda:0"]), inventory)
    usual = placed(big, configure(tmp_path, ["cuda:0"], prefill_chunk=512), inventory)
    longer = placed(big, configure(tmp_path, ["cuda:0"], prefill_chunk=2 * chunk), inventory)
    assert p.prefill_chunk == chunk
    assert p.max_context >= 0.9 * usual.max_context
    assert p.pools.full_pages >= 0.9 * usual.pools.full_pages
    assert chunk == 2048 or longer.pools.full_pages < 0.9 * usual.pools.full_pages


# ---- refused, wrong


def test_more_devices_than_layers(demo, tmp_path):
    devices = [f"left:{i}" for i in range(9)]
    for split in ("auto", [1] * 9, [f"{i}-{i + 1}" for i in range(9)]):
        error = wrong(demo, configure(tmp_path, devices, split))
        assert error.key == "placement.target_devices"
        assert error.value == devices
        assert "9 devices for 8 layers" in error.why
        assert error.hint == "nearest: the first 8 of them"


def test_a_device_that_is_not_there(demo, tmp_path):
    config = configure(tmp_path, ["cuda:0", "cuda:2"])
    error = wrong(demo, config, {"cuda": [gpu(0), gpu(1, name="RTX 3090")]})
    assert (error.key, error.value) == ("placement.target_devices[1]", "cuda:2")
    assert "cuda:1 (RTX 3090)" in error.why
    assert error.hint == "nearest: cuda:1"
    assert "remove it" in wrong(demo, config, {"cuda": [gpu(0)]}).hint
    assert "has no device" in wrong(demo, config, {"cuda": []}).why
    placed(demo, configure(tmp_path, ["left:0", "left:7"]), {"left": [cpu()]})  # on a cpu every index is the host


def test_without_devices_named_all_of_all_groups_are_used(demo, tmp_path):
    (tmp_path / "plan.toml").write_text(
        '[model]\npath = "m"\n[groups.nv]\nbackend = "cuda"\n[groups.host]\nbackend = "cpu"\n'
    )
    config = load(tmp_path / "plan.toml")

    def devices(inventory):
        return [str(device) for device in with_target_devices(config, inventory).placement.devices]

    found = {"nv": [gpu(0), gpu(1)], "host": [cpu()]}
    assert devices(found) == ["nv:0", "nv:1", "host:0"]
    assert devices({}) == ["nv:0", "host:0"]
    assert [str(device.device) for device in placed(demo, with_target_devices(config, found), found).devices] == [
        "nv:0", "nv:1", "host:0",
    ]  # fmt: skip
    with pytest.raises(PlacementError, match="the group nv has no device"):
        devices({**found, "nv": []})


def test_deterministic_inference_needs_devices_of_one_kind(demo, tmp_path):
    two = configure(tmp_path, ["cuda:0", "hip:0"], deterministic=True)
    mixed = configure(tmp_path, ["cuda:0", "left:0"], deterministic=True)
    for config, inventory in ((two, box()), (mixed, {"cuda": [gpu()], "left": [cpu()]}), (mixed, None)):
        error = wrong(demo, config, inventory)
        assert (error.key, error.value) == ("engine.deterministic", True)
        assert "needs devices of one kind" in error.why
    cpus = configure(tmp_path, CPUS, deterministic=True)
    assert placed(demo, cpus, {"left": [cpu()], "right": [cpu()]}).deterministic
    error = wrong(demo, configure(tmp_path, CPUS, deterministic=True, dtype="float32"))
    assert "has no kernels for float32 on a cpu" in error.why
    assert "engine.dtype = bfloat16" in error.hint


def test_pages_that_hold_less_than_the_context(demo, tmp_path):
    error = wrong(demo, configure(tmp_path, CPUS, pages=10, max_context=4096))
    assert (error.key, error.value) == ("engine.pages", 10)
    assert "hold 640 tokens" in error.why
    assert error.hint == "nearest: 64, or engine.max_context = 640"
    assert wrong(demo, configure(tmp_path, CPUS, max_context=1)).hint == "nearest: 2"


# ---- memory beside the model's


def planned(spec: ModelSpec, folder: Path, devices: list[str], **recovery: float) -> Placement:
    config = configure(folder, devices)
    return placed(spec, replace(config, recovery=replace(config.recovery, **recovery)))  # type: ignore[arg-type]


def test_a_journal_takes_no_more_than_all_pages_at_all_boundaries(demo: ModelSpec, tmp_path: Path) -> None:
    found = planned(demo, tmp_path, ["left:0", "right:0"])
    row_bytes = found.arenas[0].region_bytes // found.max_step_tokens
    assert found.journal_bytes == found.pools.full_pages * PAGE_TOKENS * row_bytes
    assert f"{format_bytes(found.journal_bytes)}  recovery.journal" in plan_text(found)
    told = {use["owner"]: use["limit_bytes"] for use in plan_json(found)["host_memory"]}  # type: ignore[attr-defined]
    wanted = {"boundaries": found.arena_bytes, "journal": found.journal_bytes, "replays": found.journal_bytes}
    assert told == wanted | {"pools": 0, "prefixes": 0, "exports": None}


def test_a_journal_takes_what_cpu_devices_leave_of_the_host(demo: ModelSpec, tmp_path: Path) -> None:
    config = configure(tmp_path, ["left:0", "right:0"], pages=600, max_context=2048)
    roomy = placed(demo, config, {"left": [cpu(16)], "right": [cpu(16)]})
    needed = sum(device.needed_bytes for device in roomy.devices) + roomy.arena_bytes
    for n_bytes in (roomy.journal_bytes - 1, roomy.journal_bytes // 3, 0):
        host = cpu((needed + n_bytes) / 0.9 / GIB)
        found = placed(demo, config, {"left": [host], "right": [host]})
        assert n_bytes - 64 * 4 * 8192 - 100 < found.journal_bytes <= n_bytes + 100


def test_without_a_boundary_or_a_hold_there_is_none(demo: ModelSpec, tmp_path: Path) -> None:
    alone = planned(demo, tmp_path, ["left:0"])
    assert alone.journal_bytes == planned(demo, tmp_path, ["left:0", "right:0"], hold_s=0.0).journal_bytes == 0
    assert planned(demo, tmp_path, ["left:0", "right:0"], journal=0).journal_bytes == 0
    assert "journal" not in plan_text(alone)


@pytest.mark.parametrize(
    ("devices", "host", "n_bytes"),
    [
        (["cuda:0"], "auto", None),
        (["cuda:0", "left:0"], "auto", None),
        (["left:0"], "auto", 0),
        (["left:0"], 1 << 30, 1 << 30),
    ],
)
def test_host_memory_of_prefix_slots_is_for_what_other_devices_evict(
    demo: ModelSpec, tmp_path: Path, devices: list[str], host: int | Literal["auto"], n_bytes: int | None
) -> None:
    config = configure(tmp_path, devices)
    slots = replace(config, cache=replace(config.cache, prefix_slots=8, host=host))
    found = placed(demo, slots)
    assert found.host_cache_bytes == n_bytes
    said = {None: "half of what is free  cache.host", 0: "", 1 << 30: "1.00 GiB  cache.host"}[n_bytes]
    assert said in plan_text(found)
    assert ("cache.host" in plan_text(found)) == (n_bytes != 0)
    assert placed(demo, replace(config, cache=replace(config.cache, host=host))).host_cache_bytes == 0


@pytest.mark.parametrize(
    ("devices", "split", "each"), [(BOX, BOX_SPLIT, SPARE_DEVICE_BYTES), (CPUS, None, 2 * SPARE_HOST_BYTES)]
)
def test_their_memory_is_kept_free(
    demo: ModelSpec, tmp_path: Path, devices: list[str], split: list[float] | None, each: int
) -> None:
    config = configure(tmp_path, devices, split) if split else configure(tmp_path, devices)
    inventory = {group: [gpu(0), gpu(1)] for group in ("cuda", "hip")} | {group: [cpu()] for group in ("left", "right")}
    kept = []
    for n in (0, 1, 3):
        found = placed(demo, replace(config, recovery=replace(config.recovery, spares=n)), inventory)
        kept.append(found.devices[0].reserve_bytes)
        assert ("also for spares" in plan_text(found)) == (n > 0)
    assert (kept[1] - kept[0], kept[2] - kept[0]) == (each, 3 * each)


# ---- ``engine.kv_dtype``


PAGES = 20


def planned_with(spec, folder, kv_dtype: str) -> Placement:
    config = configure(folder, ["left:0"], dtype="float32", kv_dtype=kv_dtype, pages=PAGES)
    return placed(spec, config)


@pytest.mark.parametrize(("kv_dtype", "bits"), [("float16", 16), ("bfloat16", 16), ("q8_0", 8.5)])
def test_the_plan_counts_the_bits_of_keys_and_values(demo, tmp_path, kv_dtype, bits):
    exact, smaller = planned_with(demo, tmp_path, "float32"), planned_with(demo, tmp_path, kv_dtype)
    numbers = (
        sum(layer.unit_bytes(Dtype.FLOAT32) for layer in demo.layers if layer.kv_group is KvGroup.FULL) // 4 * PAGES
    )
    saved = exact.devices[0].state_bytes - smaller.devices[0].state_bytes
    assert saved == numbers * (32 - bits) / 8
    assert exact.devices[0].weight_bytes == smaller.devices[0].weight_bytes
    (reason,) = [r for r in smaller.reasons if r.startswith("keys and values of 64 tokens in all layers take")]
    assert f" as {kv_dtype}, " in reason
    assert reason in plan_text(smaller)
    assert not any(r.startswith("keys and values of") for r in exact.reasons)


def test_the_daemon_takes_what_the_plan_says_of_q8_0(demo, tmp_path):
    placement = planned_with(demo, tmp_path, "q8_0")
    load = load_message(placement, "left", LoadFiles([str(DEMO)]), threads=1)
    (use,) = LoadedStage.load(demo, load.stages[0], load, Backend.CPU, lambda _: None).usage()
    assert use.state_bytes == placement.devices[0].state_bytes


# ---- KV Flash


def flash(config: Config, pool_tokens: int | Literal["auto"]) -> Config:
    return dataclasses.replace(config, kvflash=KvFlashConfig(pool_tokens=pool_tokens))


def test_a_context_that_did_not_fit_does(big: ModelSpec, tmp_path) -> None:
    inventory = {"cuda": [gpu(0, 24)]}
    config = configure(tmp_path, ["cuda:0"], max_sequences=2)
    without, bounded = placed(big, config, inventory), placed(big, flash(config, 8192), inventory)
    assert without.max_context < bounded.max_context == big.context_tokens
    assert bounded.pools.full_pages == 2 * 128
    assert bounded.pool_pages == 128
    assert "at most 128 pages each on the devices" in plan_text(bounded)
    assert plan_json(bounded)["pages"]["resident"] == 128
    assert any("kvflash: 128 pages of a sequence stay" in reason for reason in bounded.reasons)


@pytest.mark.parametrize(("wanted", "pages"), [(1, 8), (512, 8), (513, 9), (8192, 128)])
def test_a_pool_is_whole_pages_and_leaves_room(demo: ModelSpec, tmp_path, wanted: int, pages: int) -> None:
    p = placed(demo, flash(configure(tmp_path, ["left:0"], prefill_chunk=2048), wanted), {"left": [cpu()]})
    assert p.pool_pages == pool_pages(wanted) == pages
    assert any(f"rounded to {64 * pages}" in notice for notice in p.notices) == (wanted != 64 * pages)
    assert p.prefill_chunk == min(2048, max_resident_chunk(pages))
    assert any("engine.prefill_chunk = 2048 is cut" in notice for notice in p.notices) == (p.prefill_chunk < 2048)
    assert pages_of(p.prefill_chunk) + HEAD_PAGES + TAIL_PAGES <= pages


def test_pages_for_less_than_one_pool_are_refused(demo: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["left:0"], pages=10, max_context=4096)
    error = wrong(demo, flash(config, 1024), {"left": [cpu()]})
    assert error.key == "engine.pages"
    assert "less than kvflash.pool_tokens of one sequence" in str(error)
    assert placed(demo, flash(config, 512), {"left": [cpu()]}).max_context == 4096


def test_a_pool_that_holds_the_context_says_so(demo: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["left:0"], max_context=1024)
    p = placed(demo, flash(config, 4096), {"left": [cpu()]})
    assert any("hold the whole context" in reason for reason in p.reasons)


def test_an_automatic_pool_gives_every_sequence_one(big: ModelSpec, tmp_path) -> None:
    pools = []
    for n, gib in ((1, 24), (8, 24), (32, 24), (8, 40)):
        config = flash(configure(tmp_path, ["cuda:0"], max_sequences=n), "auto")
        p = placed(big, config, {"cuda": [gpu(0, gib)]})
        assert p.pool_pages is not None
        assert p.pools.full_pages >= n * p.pool_pages
        assert p.max_context == big.context_tokens
        assert p.prefill_chunk <= max_resident_chunk(p.pool_pages)
        assert any(f"{n} sequences, up to 256: {p.pool_pages} pages" in reason for reason in p.reasons)
        pools.append(p.pool_pages)
    assert pools[0] == pools[3] == 256
    assert 256 > pools[2] >= 8


@pytest.mark.parametrize("policy", ["exact", "qk"])
def test_host_memory_for_what_is_paged_out_is_planned(big: ModelSpec, tmp_path, policy: ResidencyPolicy) -> None:
    config = configure(tmp_path, ["cuda:0", "cuda:1"], max_sequences=2, max_context=65536)
    flash_config = KvFlashConfig(pool_tokens=8192, policy=policy, host=64 << 30)
    gpus = {"cuda": [gpu(0, 24), gpu(1, 24)]}
    lru = placed(big, flash(config, 8192), gpus)
    p = placed(big, dataclasses.replace(config, kvflash=flash_config), gpus)
    assert p.pools.host_pages == 2 * (1024 - (128 if policy == "exact" else 0))
    every = LayerRange(0, big.n_layers)
    paged = p.host_state_bytes - lru.host_state_bytes
    assert paged == p.pools.host_pages * big.unit_bytes(KvGroup.FULL, every, p.kv_dtype)
    assert p.residency_policy == policy
    assert all(a.workspace_bytes > b.workspace_bytes for a, b in zip(p.devices, lru.devices, strict=True))
    few = placed(big, dataclasses.replace(config, kvflash=dataclasses.replace(flash_config, host=1 << 30)), gpus)
    assert few.pools.host_pages == (1 << 30) // big.unit_bytes(KvGroup.FULL, every, p.kv_dtype)


def test_an_automatic_context_is_no_longer_than_pool_and_host_memory_hold(big: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["cuda:0"], max_sequences=1)
    kvflash = KvFlashConfig(pool_tokens=8192, policy="exact", host=1 << 30)
    p = placed(big, dataclasses.replace(config, kvflash=kvflash), {"cuda": [gpu(0, 40)]})
    assert pages_of(p.max_context) == 128 + p.pools.host_pages
    assert p.max_context < big.context_tokens


# ---- bytes that the daemon's loader takes


@combinations(
    devices=[("left:0",), ("left:0", "right:0", "third:0")], states=["device", "host"], dtype=["float32", "bfloat16"]
)
def test_weights_and_pools_take_what_was_planned(demo, tmp_path, devices, states, dtype):
    draft = {"kind": "lookup", "width": 3}
    config = configure(tmp_path, devices, [1, 2, 1][: len(devices)], draft, dtype=dtype, pages=20)
    config = replace(config, cache=CacheConfig(prefix_slots=3, states=states))
    placement = placed(demo, config)
    assert placement.pools.draft_states
    taken = []
    for group in placement.groups:
        load = load_message(placement, group, LoadFiles([str(DEMO)]), threads=1)
        for stage in load.stages:
            taken += LoadedStage.load(demo, stage, load, Backend.CPU, lambda _: None).usage()
    assert [(use.layers, use.state_bytes, use.host_state_bytes) for use in taken] == [
        (d.layers, d.state_bytes, d.host_state_bytes) for d in placement.devices
    ]
    least = 1.0 if dtype == "float32" else 0.8  # C++ kernels keep quant blocks smaller than torch's forms
    for use, planned in zip(taken, placement.devices, strict=True):
        assert least * planned.weight_bytes <= use.weight_bytes <= planned.weight_bytes
    assert (sum(use.host_state_bytes for use in taken) > 0) == (states == "host")


# ---- temporaries of a step


def test_cpus_of_two_hosts_have_memories_of_their_own(demo: ModelSpec, tmp_path: Path) -> None:
    config = configure(tmp_path, CPUS)
    hosts = {"left": "", "right": "me@attic"}
    apart = replace(config, groups={name: replace(group, host=hosts[name]) for name, group in config.groups.items()})
    inventory = {"left": [cpu(16)], "right": [cpu(64)]}
    assert [device.free_bytes for device in placed(demo, config, inventory).devices] == [16 * GIB, 16 * GIB]
    assert [device.free_bytes for device in placed(demo, apart, inventory).devices] == [16 * GIB, 64 * GIB]
    short = {"left": [cpu(16)], "right": [cpu(1e-3)]}
    assert "host attic" in refused(demo, apart, short).message
