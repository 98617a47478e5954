"""`[lora.NAME]`, and `[models.NAME.lora.ADAPTER]`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.config import changed_keys, load
from lucevisor.config.load import from_tree
from lucevisor.errors import ConfigError

GROUP = '[groups.cpu]\nbackend = "cpu"\n'
ONE = '[model]\npath = "m.gguf"\n[lora.sql]\npath = "sql.gguf"\n[lora.poet]\npath = "poet.gguf"\nscale = 0.5\n' + GROUP
SEVERAL = (
    '[models.large]\npath = "l.gguf"\n[models.large.lora.sql]\npath = "sql.gguf"\n[models.small]\npath = "s.gguf"\n'
    '[models.small.lora.poet]\npath = "poet.gguf"\nscale = -2\n' + GROUP
)


def written(folder: Path, text: str) -> Path:
    (folder / "box.toml").write_text(text)
    return folder / "box.toml"


def refusal(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(written(folder, text), overrides)
    return [f"{error.key}: {error.why}" for error in refused.value.errors]


def test_adapters_of_a_model(tmp_path: Path) -> None:
    config = load(written(tmp_path, ONE), ["lora.sql.scale=3"])
    assert {name: (one.name, one.path, one.scale) for name, one in config.lora.items()} == {
        "sql": ("sql", str(tmp_path / "sql.gguf"), 3.0),
        "poet": ("poet", str(tmp_path / "poet.gguf"), 0.5),
    }
    assert from_tree(config.as_dict(), config.file) == config
    assert changed_keys(load(config.file), config) == ["lora.sql.scale"]


def test_each_of_several_models_has_its_own(tmp_path: Path) -> None:
    config = load(written(tmp_path, SEVERAL), ["models.large.lora.sql.scale=1.5"])
    assert {name: {one.name: one.scale for one in own.lora.values()} for name, own in config.models.items()} == {
        "large": {"sql": 1.5},
        "small": {"poet": -2.0},
    }
    assert from_tree(config.as_dict(), config.file) == config
    assert changed_keys(load(config.file), config) == ["models.large.lora.sql.scale"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ONE.replace("scale", "scal"), "lora.poet.scal: is not a key of [lora.poet]"),
        (ONE.replace("0.5", "1000"), "lora.poet.scale: is not <= 100"),
        (ONE.replace('path = "sql.gguf"\n', ""), "lora.sql.path: is missing"),
        (ONE.replace("lora.sql", "lora.SQL"), "lora.SQL: is not an adapter name: use 1 to 32 of a-z 0-9 _ -"),
        ("lora = 1\n" + ONE[: ONE.index("[lora")] + GROUP, "lora: is an integer, not a table"),
        (SEVERAL.replace("models.small.lora", "lora"), "lora: is beside [models.NAME]"),
        (SEVERAL.replace("scale = -2", "scale = 1000"), "models.small.lora.poet.scale: is not <= 100"),
        (SEVERAL.replace("lora.poet", "lora.sql"), "models.small.lora.sql: is an id of [models.large], too"),
        (SEVERAL.replace("lora.poet", "lora.large"), "models.small.lora.large: is an id of [models.large], too"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, text: str, found: str) -> None:
    assert found in refusal(tmp_path, text)
