"""Plans of real and full-size models: exact bytes, what fits and what is chosen."""

from __future__ import annotations

import dataclasses

import pytest

from lucevisor.config import load
from lucevisor.model.families import open_spec
from lucevisor.model.pages import pages_of
from lucevisor.model.quant_types import padded_rows
from lucevisor.model.values import LayerRange, Space
from lucevisor.placement.devices import HOST_PAGES, HOST_RESERVE, with_target_devices
from lucevisor.placement.result import PlacementError
from tests.model.qwen35_file import Shape, write
from tests.placement.made import BOX, BOX_SPLIT, CPUS, GIB, box, configure, cpu, gpu, placed, refused, wrong

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
    page = big.unit_bytes(Space.FULL, hip1.layers, p.kv_dtype)
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
    page = demo.unit_bytes(Space.FULL, LayerRange(0, demo.n_layers), p.kv_dtype)
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
    p = placed(big, configure(tmp_path, BOX, BOX_SPLIT), box(third=12))
    assert 0 < p.max_context < 262144
    assert p.max_context % 64 == 0
    assert p.pools.full_pages == p.max_context // 64
    assert any(r.startswith(f"max_context {p.max_context}: the longest sequence that fits") for r in p.reasons)
    longer = configure(tmp_path, BOX, BOX_SPLIT, max_context=p.max_context + 128)
    refused(big, longer, box(third=12))


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


# ---- the prefill chunk


@pytest.mark.parametrize(("gib", "chunk"), [(20, 512), (28, 1024), (120, 2048)])
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


def test_ranges_of_another_model(demo, tmp_path):
    error = wrong(demo, configure(tmp_path, CPUS, ["0-4", "4-7"]))
    assert (error.key, error.value) == ("placement.target_layer_split", "0-4,4-7")
    assert "layer 7 is in no range: the model has 8" in error.why
    assert error.hint == 'nearest: ["0-4", "4-8"]'


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


def test_pages_that_hold_less_than_the_context(demo, tmp_path):
    error = wrong(demo, configure(tmp_path, CPUS, pages=10, max_context=4096))
    assert (error.key, error.value) == ("engine.pages", 10)
    assert "hold 640 tokens" in error.why
    assert error.hint == "nearest: 64, or engine.max_context = 640"
    assert wrong(demo, configure(tmp_path, CPUS, max_context=1)).hint == "nearest: 2"
