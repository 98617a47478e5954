"""docs/configuration.md, the files in etc/ and the promised keys all say what the types say."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from docs.generate import stale, texts_of
from lucevisor.config import DeviceRef, Ranges, WeightedSplit, load
from lucevisor.config.load import from_tree
from lucevisor.config.schema import keys_of
from lucevisor.config.sections import GROUPS, SECTIONS, GroupConfig

ROOT = Path(__file__).parents[2]
ETC = ROOT / "etc"
ALL_KEYS = {(name, key) for name, section in {**SECTIONS, GROUPS: GroupConfig}.items() for key in keys_of(section)}


def uncommented(path):
    """Return a file's tables with every key that stands behind a "# " set."""
    text = re.sub(r"^# (?=[a-z_]+ = )", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return tomllib.loads(text), text


def test_generated_pages_are_up_to_date():
    assert not stale(), "run python -m docs.generate"


def test_the_sample_file_has_every_key_at_its_default():
    tables, _ = uncommented(ETC / "lucevisor.toml")
    groups = tables.pop(GROUPS)
    found = {(name, key) for name, table in tables.items() for key in table} | {(GROUPS, key) for key in groups["left"]}
    assert found == ALL_KEYS
    for name, table in [*tables.items(), (GROUPS, groups["left"])]:
        for key, each in keys_of(SECTIONS.get(name, GroupConfig)).items():
            assert each.required or each.read(table[key], ETC) == each.default, f"{name}.{key}"


def test_the_sample_file_loads_as_it_is_and_with_every_key_set(tmp_path):
    assert load(ETC / "lucevisor.toml").notices == ()
    _, text = uncommented(ETC / "lucevisor.toml")
    (tmp_path / "lucevisor.toml").write_text(text)
    config = load(tmp_path / "lucevisor.toml")
    assert config.notices == ()
    assert from_tree(json.loads(json.dumps(config.as_dict())), config.file) == config


def test_the_demo():
    config = load(ETC / "demo.toml")
    assert config.model.path == str(ETC / "demo" / "demo-qwen35-22m-q4_k_m.gguf")
    assert {name: (group.backend, group.threads) for name, group in config.groups.items()} == {
        "left": ("cpu", 1),
        "right": ("cpu", 1),
    }
    assert config.placement.split == WeightedSplit((0.5, 0.5))
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert config.notices == ()


def test_the_box_with_two_vendors():
    config = load(ETC / "lucebox3.toml")
    assert config.placement.devices == (DeviceRef("cuda", 0), DeviceRef("hip", 0))
    assert config.placement.split == Ranges(((0, 20), (20, 40)))
    assert config.groups["cuda"].python != config.groups["hip"].python
    assert config.notices == ()


@pytest.mark.parametrize("section", [*SECTIONS.values(), GroupConfig])
def test_every_key_is_documented_and_its_default_is_taken_by_its_kind(section):
    assert section.__doc__
    for name, each in keys_of(section).items():
        assert texts_of(section)[each.field].endswith("."), name
        assert each.allowed, name
        if not each.required:
            assert each.read(each.write(each.default), ETC) == each.default, name
