"""`[replicas.NAME]`: each is read as if its groups were the only ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.config import Auto, DeviceRef, Ranges, WeightedSplit, changed_keys, load, single_model
from lucevisor.config.load import from_tree
from lucevisor.errors import ConfigError

TEXT = """
[model]
path = "model.gguf"
[placement]
target_devices = ["a0:0", "b0:0", "a1:0", "b1:0"]
target_layer_split = ["0-4", "4-8"]
[replicas.a]
groups = ["a0", "a1"]
[replicas.b]
groups = ["b0", "b1"]
""" + "".join(f'[groups.{name}]\nbackend = "cpu"\n' for name in ("a0", "a1", "b0", "b1"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "box.toml").write_text(TEXT)
    return tmp_path / "box.toml"


def refusal(file: Path, *changes: tuple[str, str], overrides: tuple[str, ...] = ()) -> list[str]:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, overrides)
    return [f"{error.key}: {error.why}" for error in refused.value.errors]


def test_a_replica_has_its_groups_their_devices_and_the_split(file: Path) -> None:
    config = load(file)
    a, b = config.each_replica
    assert [own.replica for own in (a, b)] == ["a", "b"]
    assert [[*own.groups] for own in (a, b)] == [["a0", "a1"], ["b0", "b1"]]
    assert a.placement.devices == (DeviceRef("a0", 0), DeviceRef("a1", 0))
    assert a.placement.split == b.placement.split == Ranges(((0, 4), (4, 8)))
    assert config.each_model == [config]
    assert from_tree(config.as_dict(), file) == config


def test_weights_of_all_devices_are_dealt_by_device(file: Path) -> None:
    config = load(file, ["placement.target_layer_split=1,2,3,4"])
    assert [own.placement.split for own in config.each_replica] == [
        WeightedSplit((1.0, 3.0)),
        WeightedSplit((2.0, 4.0)),
    ]
    assert load(file, ["placement.target_layer_split=1,2"]).each_replica[1].placement.split == WeightedSplit((1, 2))
    file.write_text(TEXT.replace("target_", "# target_"))
    config = load(file)
    assert {own.placement for own in config.each_replica} == {config.placement}
    assert config.placement.split == Auto()


def test_without_replicas_the_configuration_is_the_only_one(file: Path) -> None:
    file.write_text(TEXT[: TEXT.index("[placement]")] + TEXT[TEXT.index("[groups") :])
    config = load(file)
    assert config.each_replica == [config]
    assert "replicas" not in config.as_dict()


def test_each_group_is_in_one_replica(file: Path) -> None:
    assert refusal(file, ('["a0", "a1"]', '["a0"]')) == [
        "placement.target_layer_split: has 2 ranges, and replicas have a 1, b 2 devices",
        "groups.a1: is in no replica: its daemon would have nothing to do",
    ]
    assert refusal(file, ('["a0", "a1"]', '["a0", "a1", "b0"]'))[-1] == ("replicas.b.groups[0]: is in replicas.a, too")
    assert refusal(file, ('["a0", "a1"]', '["a0", "a1", "c"]')) == ["replicas.a.groups[2]: is not a group"]
    assert refusal(file, ('["b0", "b1"]', "[]")) == ["replicas.b.groups: is empty"]


def test_what_is_not_a_replica_is_refused_by_name(file: Path) -> None:
    assert refusal(file, ("[replicas.b]", "[replicas.B]"))[0].startswith("replicas.B: is not a replica name")
    assert refusal(file, ('groups = ["b0", "b1"]', "")) == ["replicas.b.groups: is missing"]
    assert refusal(file, overrides=("draft.device=b0:0",)) == ["draft.device: is a device of one replica"]
    assert refusal(file, overrides=("replicas.b.group=b0",))[0].startswith("replicas.b.group: is not a key")
    text = "replicas: is beside [models.NAME], and replicas are of one model"
    assert refusal(file, ("[model]", "[models.x]"))[0] == text


def test_replicas_are_keys_like_others(file: Path) -> None:
    before, after = load(file), load(file, ["replicas.a.groups=a1,a0"])
    assert changed_keys(before, after) == ["replicas.a.groups"]
    with pytest.raises(ConfigError, match="are replicas, and `lucevisor bench` runs one"):
        single_model(before, "bench")
