"""Keys without effect are named in a notice."""

import ast
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.config.schema import keys_of
from lucevisor.config.sections import SECTIONS

PACKAGE = Path(__file__).parents[2] / "lucevisor"

GPU_AND_CPU = """
[model]
path = "m.gguf"
[groups.gpu]
backend = "cuda"
[groups.host]
backend = "cpu"
[placement]
target_devices = ["gpu:0", "host:0"]
"""
RANKED = ["kvflash.policy=drafter", "kvflash.pool_tokens=8192", "pflash.path=s.gguf", "pflash.device=host:0"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["draft.kind=off", "draft.path=d.gguf", "draft.width=3"], ["draft.path", "draft.width"]),
        (["draft.kind=off", "draft.device=gpu:0"], ["draft.device"]),
        (["draft.kind=lookup", "draft.path=d", "draft.device=gpu:0", "draft.width=3"], ["draft.path", "draft.device"]),
        (["kvflash.policy=drafter", "kvflash.pool_tokens=0"], ["kvflash.policy"]),
        (["pflash.path=s.gguf", "pflash.mode=always", "pflash.threshold=1"], ["pflash.threshold"]),
        (["pflash.path=s.gguf", "pflash.mode=auto", "pflash.curve=9:0.5", "pflash.keep_ratio=0.5"],
         ["pflash.keep_ratio"]),
        (["cache.prefix_slots=0", "cache.memory=2GiB", "cache.states=host", "cache.min_tokens=9",
          "cache.checkpoint_pages=1", "engine.swap_space=1GiB"],
         ["engine.swap_space", "cache.memory", "cache.states", "cache.min_tokens", "cache.checkpoint_pages"]),
        (["recovery.hold_s=0", "recovery.journal=1GiB", "cache.disk=1GiB", "groups.gpu.threads=2"],
         ["groups.gpu.threads", "cache.disk", "recovery.journal"]),
        (["placement.target_layer_split=1,2", "placement.goal=throughput"], ["placement.goal"]),
        *(([override], [override.partition("=")[0]]) for override in (
            "cache.disk=1GiB", "kvflash.tau=32", "kvflash.host=1GiB", "pflash.threshold=1", "pflash.keep_ratio=0.5",
            "pflash.path=scorer.gguf", "pflash.device=gpu:0", "pflash.curve=9:0.5", "pflash.window=1024",
            "server.allow_open=true", "groups.gpu.threads=2", "groups.host.visible_devices=0",
        )),
        (RANKED, []),
        (["draft.kind=off", "kvflash.pool_tokens=0", "pflash.mode=off", "cache.dir=", "recovery.spares=0",
          "cache.prefix_slots=0", "recovery.hold_s=0", "recovery.journal=0"], []),
        (["groups.host.threads=2", "groups.gpu.cores=1", "groups.gpu.visible_devices=0", "engine.kv_dtype=q8_0",
          "placement.target_layer_split=1,2", "cache.dir=snapshots", "cache.memory=2GiB", "cache.states=host",
          "cache.min_tokens=9", "cache.checkpoint_pages=1", "draft.kind=dflash", "draft.path=d.gguf",
          "draft.device=gpu:0", "draft.width=4", "pflash.mode=auto", "pflash.path=s.gguf", "pflash.device=gpu:0",
          "pflash.threshold=1", "pflash.keep_ratio=0.5", "pflash.window=1024"], []),
    ],
)  # fmt: skip
def test_keys_without_effect_are_named_in_the_order_of_the_file(file, overrides, keys):
    notices = load(file(GPU_AND_CPU), overrides).notices
    assert [notice.key for notice in notices] == keys
    for notice in notices:
        assert notice.why.startswith("has no effect: ")
        assert notice.hint
        assert notice.key in str(notice)


def test_a_weight_for_the_only_device(file):
    text = (
        '[model]\npath="m"\n[groups.a]\nbackend="cpu"\n[placement]\ntarget_devices=["a:0"]\ntarget_layer_split=[0.5]\n'
    )
    assert [notice.key for notice in load(file(text)).notices] == ["placement.target_layer_split"]
    assert load(file(text), ["placement.target_layer_split=0-9"]).notices == ()


def test_allow_open_beside_keys(file, tmp_path):
    (tmp_path / "keys").write_text("k\n")
    (tmp_path / "keys").chmod(0o600)
    overrides = ["server.host=0.0.0.0", "server.allow_open=true", "server.api_keys_file=keys"]
    assert [notice.key for notice in load(file(GPU_AND_CPU), overrides).notices] == ["server.allow_open"]


def test_all_keys_are_read_by_code():
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config" or path.name == "sections.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    read.add((getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr))
    fields = {(name, key.field) for name, section in SECTIONS.items() for key in keys_of(section).values()}
    assert not fields - read
