"""`[models.NAME]`: each model is read as if it were the only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.config import DeviceRef, changed_keys, load, single_model
from lucevisor.config.load import from_tree
from lucevisor.errors import ConfigError

TEXT = """
[models.large]
path = "large.gguf"
[models.large.placement]
target_devices = ["left:0", "right:0"]
[models.small]
path = "small.gguf"
name = "Small-1B"
memory_share = 0.25
[models.small.engine]
max_context = 4096
[models.small.placement]
target_devices = ["cuda:0"]
[engine]
max_sequences = 3
max_context = 8192
[cache]
dir = "slots"
[groups.left]
backend = "cpu"
[groups.right]
backend = "cuda"
[recovery]
journal = "1GiB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "box.toml").write_text(TEXT)
    return tmp_path / "box.toml"


def refusal(file: Path, text: str, *overrides: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, overrides)
    return [f"{error.key}: {error.why}" for error in refused.value.errors]


def test_a_model_has_its_own_keys_before_those_for_all(file: Path) -> None:
    config = load(file, ["models.large.engine.max_context=1000", "engine.max_sequences=5"])
    large, small = config.each_model
    assert [*config.models] == ["large", "small"]
    assert (large.model.name, small.model.name, small.model.memory_share) == ("large", "Small-1B", 0.25)
    assert (large.engine.max_context, small.engine.max_context) == (1000, 4096)
    assert (large.engine.max_sequences, small.engine.max_sequences) == (5, 5)
    assert small.placement.devices == (DeviceRef("right", 0),)
    assert ([*large.groups], [*small.groups], [*config.groups]) == (["left", "right"], ["right"], ["left", "right"])
    assert [Path(model.cache.dir).parts[-2:] for model in (large, small)] == [("slots", "large"), ("slots", "small")]
    assert {model.recovery.journal for model in (config, large, small)} == {2**30}


def test_what_it_writes_means_the_same(file: Path) -> None:
    config = load(file)
    again = from_tree(config.as_dict(), file)
    assert again == config
    assert changed_keys(config, again) == []
    after = load(file, ["models.small.engine.max_context=2048", "server.drain_s=9"])
    assert set(changed_keys(config, after)) == {"models.small.engine.max_context", "server.drain_s"}


def test_a_lone_model_is_each_model() -> None:
    config = load(Path(__file__).parents[2] / "etc" / "demo.toml")
    assert (config.each_model, config.models, single_model(config, "bench")) == ([config], {}, config)


def test_commands_for_one_model_name_the_others(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"models = \[.*large.*small.*`lucevisor bench` runs one"):
        single_model(load(file), "bench")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("[models.small]", "[model]\npath = 'x.gguf'\n[models.small]"), "model: is beside [models.NAME]"),
        (('path = "small.gguf"', ""), "models.small.path: is missing"),
        (("max_context = 4096", "max_context = 0"), "models.small.engine.max_context: is not in 1..1073741824"),
        (("max_sequences = 3", "max_sequences = 0"), "engine.max_sequences: is not in 1..4096"),
        (('target_devices = ["cuda:0"]', 'target_devices = ["hip:0"]'),
         "models.small.placement.target_devices[0]: no group has the backend hip"),
        (('name = "Small-1B"', 'name = "large"'), "models.small.name: is the id of [models.large], too"),
        (("[models.small.engine]", "[models.small.server]"), "models.small.server: is not a key of [models.small]"),
        (("[models.large]", "[models.Large]"),
         "models.Large: is not the name of a section: use 1 to 32 of a-z 0-9 _ -"),
        (('target_devices = ["left:0", "right:0"]', 'target_devices = ["right:0"]'),
         "groups.left: has no device in placement.target_devices of any model: its daemon would have nothing to do"),
    ],
)  # fmt: skip
def test_a_fault_is_told_once_with_the_key_of_the_file(file: Path, change: tuple[str, str], expected: str) -> None:
    assert expected in refusal(file, TEXT.replace(*change))
    assert refusal(file, TEXT.replace(*change)).count(expected) == 1


def test_an_override_of_one_model_is_named_as_it_was_given(file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(file, ["models.small.engine.max_context=many"])
    assert (refused.value.key, refused.value.file) == ("models.small.engine.max_context", "--set")
    assert refusal(file, TEXT, "models.small=1")[0] == "models.small: is not a key"


def test_a_setting_without_effect_is_named_as_in_the_file(file: Path) -> None:
    file.write_text(TEXT + "[models.small.draft]\nkind = 'off'\nwidth = 3\n")
    assert [str(notice).partition(": has no")[0] for notice in load(file).notices] == ["models.small.draft.width = 3"]


FOLDER = """
[server]
models_dir = "models"
[groups.left]
backend = "cpu"
"""


def test_each_file_of_a_folder_is_a_model_that_is_loaded_on_demand(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    names = [
        "A B.gguf",
        "a-b.gguf",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "notes.txt",
    ]
    for name in [*names, "deep/inner.gguf"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    file = tmp_path / "box.toml"
    file.write_text(FOLDER)
    config = load(file)
    assert {name: (own.model.name, own.model.preload) for name, own in config.models.items()} == {
        "a-b": ("A B", False), "a-b-2": ("a-b", False), "big": ("big", False), "inner": ("inner", False),
    }  # fmt: skip
    assert config.found == {*config.models}
    assert from_tree(config.as_dict(), file) == config
    assert [*config.without_models(["big"]).models] == ["a-b", "a-b-2", "inner"]

    file.write_text(FOLDER + '[models.mine]\npath = "models/a-b.gguf"\nname = "mine"\n')
    config = load(file)
    assert [*config.models] == ["mine", "a-b", "big", "inner"]
    assert config.models["mine"].model.preload
    assert config.found == {"a-b", "big", "inner"}


def test_files_of_one_name_have_the_names_of_their_folders(tmp_path: Path) -> None:
    for name in ["a.gguf", "x/a.gguf", "y/a.gguf", "y/small.gguf", "y/b.gguf"]:
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_bytes(b"")
    file = tmp_path / "box.toml"
    file.write_text(FOLDER + '[models.small]\npath = "s.gguf"\n')
    ids = {own.model.name: Path(own.model.path).parent.name for own in load(file).models.values()}
    own = {"small": tmp_path.name, "a": "models"}
    assert ids == {**own, "x/a": "x", "y/a": "y", "b": "y", "y/small": "y"}


@pytest.mark.parametrize(
    ("name", "shown", "why"),
    [
        ("new\nline.gguf", '"new\\nline.gguf"', "holds a control character"),
        ("\udcff.gguf", '"\\udcff.gguf"', "holds a control character"),
        (" a.gguf", '" a.gguf"', "has surrounding spaces"),
        ("mine.gguf", '"mine.gguf"', 'has the id of another model, "mine"'),
    ],
)
def test_a_file_that_cannot_be_a_model_is_left_out_with_a_warning(tmp_path: Path, name, shown, why) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / name).write_bytes(b"")
    file = tmp_path / "box.toml"
    file.write_text(FOLDER + '[models.mine]\npath = "s.gguf"\n')
    config = load(file)
    assert [*config.models] == ["mine"]
    said = f'server.models_dir = "models": has a file that is left out, as its name {why}: {shown}; rename the file'
    assert [str(notice) for notice in config.notices] == [said]


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "box.toml"
    assert refusal(file, FOLDER)[0] == "server.models_dir: is no folder"
    (tmp_path / "models").mkdir()
    assert refusal(file, FOLDER)[0] == "server.models_dir: has no GGUF files"
    assert refusal(file, '[model]\npath = "x.gguf"\n' + FOLDER)[0] == "server.models_dir: has no GGUF files"
