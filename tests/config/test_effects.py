"""Options without effect are rejected or named in a notice."""

import ast
from pathlib import Path

import pytest

from lucevisor.config import load, not_yet_effective
from lucevisor.config.effects import INERT, field_key
from lucevisor.config.schema import SECTIONS, keys_of
from lucevisor.errors import ConfigError

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


@pytest.fixture
def box(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(GPU_AND_CPU)
    return path


def test_pages_ranked_by_a_small_model_need_one(box):
    with pytest.raises(ConfigError) as caught:
        load(box, ["kvflash.policy=drafter", "kvflash.pool_tokens=8192"])
    (error,) = caught.value.errors
    assert error.key == "pflash.path"
    assert "kvflash.policy = drafter needs a scoring model" in error.why
    assert "nearest: kvflash.policy = qk" in error.hint
    config = load(
        box, ["kvflash.policy=drafter", "kvflash.pool_tokens=8192", "pflash.path=s.gguf", "pflash.device=host:0"]
    )
    assert config.scores
    assert config.notices == ()
    (notice,) = load(box, ["kvflash.policy=drafter", "kvflash.pool_tokens=0"]).notices
    assert notice.key == "kvflash.policy"


def test_everything_wrong_with_a_drafter_is_told_at_once(box):
    with pytest.raises(ConfigError) as caught:
        load(box, ["draft.kind=dflash", "draft.device=gone:0"])
    assert [error.key for error in caught.value.errors] == ["draft.device", "draft.path"]
    assert "nearest: draft.kind = auto" in caught.value.errors[1].hint


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["draft.kind=off", "draft.path=d.gguf", "draft.width=3"], ["draft.path", "draft.width"]),
        (["draft.kind=off", "draft.device=gpu:0"], ["draft.device"]),
        (
            ["draft.kind=lookup", "draft.path=d.gguf", "draft.device=gpu:0", "draft.width=3"],
            ["draft.path", "draft.device"],
        ),
    ],
)
def test_a_drafter_without_effect_is_told_of(box, overrides, keys):
    notices = load(box, overrides).notices
    assert [notice.key for notice in notices] == keys
    assert all("no effect" in notice.why for notice in notices)


def test_switches_at_off_say_nothing(box):
    off = [
        "draft.kind=off",
        "kvflash.pool_tokens=0",
        "pflash.mode=off",
        "cache.dir=",
        "recovery.spares=0",
        "cache.prefix_slots=0",
        "recovery.hold_s=0",
        "recovery.journal=0",
    ]
    assert load(box, off).notices == ()


@pytest.mark.parametrize(
    "override",
    [
        "cache.disk=1GiB",
        "kvflash.tau=32",
        "kvflash.host=1GiB",
        "pflash.threshold=1",
        "pflash.keep_ratio=0.5",
        "pflash.path=scorer.gguf",
        "pflash.device=gpu:0",
        "pflash.curve=9:0.5",
        "pflash.window=1024",
        "server.allow_open=true",
        "groups.gpu.threads=2",
        "groups.host.visible_devices=0",
    ],
)
def test_other_options_without_effect_are_told_of_by_name(box, override):
    config = load(box, [override])
    (notice,) = config.notices
    assert notice.key == override.partition("=")[0]
    assert "no effect" in notice.why
    assert notice.hint
    assert notice.key in str(notice)
    assert not_yet_effective(config) == [notice]


def test_options_with_effect_say_nothing(box):
    used = [
        "groups.host.threads=2",
        "groups.host.cores=0",
        "groups.gpu.cores=1",
        "groups.gpu.visible_devices=0",
        "server.max_queue=3",
        "engine.pages=9",
        "log.level=debug",
        "recovery.restart_limit=1/9s",
        "placement.target_layer_split=1,2",
        "engine.kv_dtype=q8_0",
        "model.yarn_attn_factor=file",
        "cache.prefix_slots=5",
        "cache.dir=snapshots",
        "cache.memory=2GiB",
        "cache.states=host",
        "cache.min_tokens=9",
        "cache.checkpoint_pages=1",
        "cache.normalise=fix",
        "draft.kind=dflash",
        "draft.path=drafter.gguf",
        "draft.device=gpu:0",
        "draft.width=4",
        "pflash.mode=auto",
        "pflash.path=scorer.gguf",
        "pflash.device=gpu:0",
        "pflash.threshold=1",
        "pflash.keep_ratio=0.5",
        "pflash.window=1024",
    ]
    assert load(box, used).notices == ()


def test_what_slots_may_take_is_told_of_when_there_are_none(box):
    settings = {"memory": "2GiB", "states": "host", "min_tokens": 9, "checkpoint_pages": 1}
    config = load(box, ["cache.prefix_slots=0", *(f"cache.{key}={value}" for key, value in settings.items())])
    assert [notice.key for notice in config.notices] == [f"cache.{key}" for key in settings]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["pflash.mode=always", "pflash.threshold=1"], "pflash.threshold"),
        (["pflash.mode=auto", "pflash.curve=9:0.5,10:0.4", "pflash.keep_ratio=0.5"], "pflash.keep_ratio"),
    ],
)
def test_what_another_key_of_pflash_replaces_is_told_of(box, more, key):
    assert [notice.key for notice in load(box, ["pflash.path=s.gguf", *more]).notices] == [key]


def test_a_weight_for_the_only_device_is_told_of(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(
        '[model]\npath="m"\n[groups.a]\nbackend="cpu"\n[placement]\ntarget_devices=["a:0"]\ntarget_layer_split=[0.5]\n'
    )
    assert [notice.key for notice in load(path).notices] == ["placement.target_layer_split"]
    assert load(path, ["placement.target_layer_split=0-9"]).notices == ()


def test_allow_open_beside_keys_is_told_of(box, tmp_path):
    (tmp_path / "keys").write_text("k\n")
    (tmp_path / "keys").chmod(0o600)
    config = load(box, ["server.host=0.0.0.0", "server.allow_open=true", "server.api_keys_file=keys"])
    assert [notice.key for notice in config.notices] == ["server.allow_open"]


def test_notices_come_in_the_order_of_the_file_once_each(box):
    config = load(box, ["recovery.hold_s=0", "recovery.journal=1GiB", "cache.disk=1GiB", "groups.gpu.threads=2"])
    keys = [notice.key for notice in config.notices]
    assert keys == ["groups.gpu.threads", "cache.disk", "recovery.journal"]


def test_the_tables_name_keys_that_exist_and_are_off_or_harmless_by_default():
    for inert in INERT:
        for key in inert.keys:
            assert not field_key(key).required


def attributes_read_outside_config() -> set[tuple[str, str]]:
    """Every `owner.name` in the supervisor's code, `config.engine.pages` as ("engine", "pages")."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "config" and path.name not in ("schema.py", "sections.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                found.add((name, node.attr))
    return found


def test_all_keys_are_read_by_code():
    read = attributes_read_outside_config()
    keys = {
        f"{name}.{key}": (name, each.field) for name, kind in SECTIONS.items() for key, each in keys_of(kind).items()
    }
    assert not {key for key, place in keys.items() if place not in read}
