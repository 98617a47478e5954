"""Loading: values, overrides, files and API keys."""

import os
from pathlib import Path

import pytest

from lucevisor.config import (
    ApiKey,
    Auto,
    DeviceRef,
    HubFile,
    Ranges,
    RestartLimit,
    WeightedSplit,
    changed_keys,
    load,
    read_api_keys,
)
from lucevisor.errors import ConfigError
from tests.config.boxes import SMALLEST, TWO_VENDORS, error_of

# --- what is taken


def test_the_smallest_file_gets_every_default(file, tmp_path):
    config = load(file(SMALLEST))
    assert config.file == tmp_path / "box.toml"
    assert config.model.path == str(tmp_path / "m.gguf")
    assert config.model.source == tmp_path / "m.gguf"
    assert list(config.groups) == ["left", "right"]
    assert config.groups["left"].backend == "cpu"
    assert config.placement.devices == (DeviceRef("left", 0), DeviceRef("right", 0))
    assert config.placement.split == Auto()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert config.recovery.restart_limit == RestartLimit(10, 60)
    assert config.set_keys == {"model.path", "groups.left.backend", "groups.right.backend", "placement.target_devices"}
    assert config.notices == ()


def test_backends_stand_for_the_only_group_that_has_them(file):
    config = load(file(TWO_VENDORS))
    assert [str(device) for device in config.placement.devices] == ["nv:0", "amd:0", "amd:1"]
    assert config.placement.split == WeightedSplit((0.08, 0.46, 0.46))
    assert config.placement.split_text() == "0.08,0.46,0.46"


def test_one_cpu_group_may_hold_several_shards(file):
    text = SMALLEST.replace('"left:0", "right:0"', '"left:0", "right:0", "left:1"')
    assert [str(device) for device in load(file(text)).placement.devices] == ["left:0", "right:0", "left:1"]


@pytest.mark.parametrize("kind", ["auto", "mtp", "dflash"])
@pytest.mark.parametrize("device", ["aside:1", "cuda:1"])
def test_a_group_may_run_the_drafter_alone(file, kind, device):
    text = f"""{SMALLEST}
[groups.aside]
backend = "cuda"
[draft]
kind = "{kind}"
path = "d.gguf"
device = "{device}"
"""
    config = load(file(text))
    assert config.draft.device == DeviceRef("aside", 1)
    assert config.notices == ()


def test_a_group_may_run_the_scoring_model_alone(file):
    text = f"""{SMALLEST}
[groups.aside]
backend = "cuda"
[pflash]
mode = "always"
path = "s.gguf"
device = "cuda:0"
curve = ["100:0.5", "200:0.25"]
"""
    config = load(file(text))
    assert config.pflash.device == DeviceRef("aside", 0)
    assert config.pflash.curve == ((100, 0.5), (200, 0.25))
    assert config.notices == ()
    error = error_of(file(text.replace("always", "off")))
    assert error.key == "groups.aside"
    assert "nothing to do" in error.why


@pytest.mark.parametrize("kind", ["off", "lookup"])
def test_a_group_for_a_drafter_that_does_not_run_has_nothing_to_do(file, kind):
    path = file(f'{SMALLEST}[groups.aside]\nbackend = "cuda"\n[draft]\nkind = "{kind}"\ndevice = "aside:0"\n')
    error = error_of(path)
    assert error.key == "groups.aside"
    assert "nothing to do" in error.why


def test_hub_files_and_interpreters(file, tmp_path):
    text = SMALLEST.replace('"m.gguf"', '"hf:o/r/m.gguf"').replace(
        'backend = "cpu"', 'backend = "cpu"\npython = "v/bin/python"', 1
    )
    config = load(file(text))
    assert config.model.source == HubFile("o", "r", "m.gguf")
    assert config.groups["left"].python == str(tmp_path / "v/bin/python")
    assert config.groups["right"].python == ""


def test_a_relative_file_gives_absolute_paths(file, tmp_path, monkeypatch):
    file(SMALLEST)
    monkeypatch.chdir(tmp_path)
    config = load(Path("box.toml"))
    assert config.model.path == str(tmp_path / "m.gguf")
    assert config.file == tmp_path / "box.toml"


def test_the_environment_of_a_group(file):
    text = TWO_VENDORS.replace('backend = "hip"', 'backend = "hip"\nvisible_devices = [1, 2]\nenv = { A = "1" }')
    groups = load(file(text)).groups
    assert groups["amd"].environment() == {"A": "1", "HIP_VISIBLE_DEVICES": "1,2"}
    assert groups["nv"].environment() == {}


def test_threads_of_a_group(file):
    text = SMALLEST.replace('backend = "cpu"', 'backend = "cpu"\ncores = [0, 1, 2]', 1)
    config = load(file(text))
    assert config.threads_of("left", usable_cores=8) == 3
    assert config.threads_of("right", usable_cores=8) == 4
    assert config.threads_of("right", usable_cores=1) == 1
    assert load(file(text), ["groups.right.threads=7"]).threads_of("right", usable_cores=8) == 7


TWO = """
[model]
path = "m.gguf"
[groups.{0}]
backend = "cpu"
[groups.{1}]
backend = "cpu"
[placement]
target_devices = ["{0}:0", "{1}:0"]
"""


def test_keys_that_differ_are_named_and_a_group_that_comes_or_goes_is_one_change(file):
    before = load(file(TWO.format("left", "right")))
    assert changed_keys(before, load(file(TWO.format("left", "right")))) == []
    after = load(before.file, ["log.level=debug", "groups.left.threads=2", "server.port=0"])
    assert changed_keys(before, after) == ["server.port", "log.level", "groups.left.threads"]
    after = load(file(TWO.format("left", "c")))
    assert changed_keys(before, after) == ["placement.target_devices", "groups.c", "groups.right"]


# --- overrides


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("placement.target_layer_split=0.3,0.7", lambda config: config.placement.split == WeightedSplit((0.3, 0.7))),
        ("placement.target_layer_split=0-3,3-8", lambda config: config.placement.split == Ranges(((0, 3), (3, 8)))),
        (
            "placement.target_devices=right:0,left:3",
            lambda config: [str(d) for d in config.placement.devices] == ["right:0", "left:3"],
        ),
        (
            "server.cors_origins=http://a,http://b",
            lambda config: config.server.cors_origins == ("http://a", "http://b"),
        ),
        ("server.cors_origins=[]", lambda config: config.server.cors_origins == ()),
        ("groups.left.env.X_1=a=b", lambda config: dict(config.groups["left"].env) == {"X_1": "a=b"}),
        ("model.name=my model", lambda config: config.model.name == "my model"),
        ("model.name=", lambda config: config.model.name == ""),
    ],
)
def test_overrides(file, override, found):
    config = load(file(SMALLEST), [override])
    assert found(config)
    key = override.partition("=")[0]
    assert (key if ".env." not in key else "groups.left.env") in config.set_keys


def test_an_override_can_add_a_group(file):
    config = load(file(SMALLEST), ["groups.mid.backend=cpu", "placement.target_devices=left:0,mid:0,right:0"])
    assert list(config.groups) == ["left", "right", "mid"]


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("server.port", "--set", "server.port=8081"),
        ("", "--set", "server.port=8081"),
        ("port=1", "port", "server.port"),
        ("server=1", "server", "server.port"),
        ("serve.port=1", "serve.port", "nearest: server"),
        ("server.port.x=1", "server.port.x", "server.port"),
        ("groups.left=cpu", "groups.left", "groups.NAME"),
        ("groups.left.env=A", "groups.left.env", "groups.NAME.env.VARIABLE=VALUE"),
        ("groups.left.env.1=A", "groups.left.env.1", "no digit first"),
        ("server.cors_origins=", "server.cors_origins", "[] is the empty list"),
        ("placement.target_layer_split=0.3,   -1", "placement.target_layer_split[1]", "write"),
        ("placement.target_layer_split=0.3,", "placement.target_layer_split", "single commas"),
        ("placement.target_devices=left:0, right:0", "placement.target_devices[1]", "nearest: right:0"),
        ("=1", "", "such as server.port"),
    ],
)
def test_overrides_that_are_refused(file, override, key, hint):
    error = error_of(file(SMALLEST), override)
    assert error.key == key
    assert error.file in ("--set", "")
    assert hint in error.hint


def test_a_key_is_set_once(file):
    error = error_of(file(SMALLEST), "server.port=1", "server.port=1")
    assert (error.key, error.why) == ("server.port", "is set twice")


# --- files


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b"x = " + b"[" * 50_000, "is not TOML"),
        (b"x = " + b"9" * 10_000, "is not TOML"),
        (b"#" * (2**16 + 1), "is larger than 64 KiB"),
        (b'"\\' * 30_000, "is not TOML"),
    ],
    ids=["utf-8", "nested", "digits", "large", "escaped quotes"],
)
def test_files_that_are_no_configuration(tmp_path, content, why):
    path = tmp_path / "box.toml"
    path.write_bytes(content)
    error = error_of(path)
    assert why in error.why
    assert error.hint


def test_a_list_and_the_errors_told_are_bounded(file):
    with pytest.raises(ConfigError, match=r"target_devices = .*: has 10000 items, more than 1024"):
        load(file("[placement]\ntarget_devices = [" + "'a:x'," * 10_000 + "]"))
    with pytest.raises(ConfigError) as caught:
        load(file("[server]\n" + "".join(f"k{i} = 1\n" for i in range(900))))
    assert len(caught.value.errors) > 900
    lines = str(caught.value).splitlines()
    assert len(lines) == 51
    assert lines[-1] == f"and {len(caught.value.errors) - 50} more"


@pytest.mark.parametrize("name", ["absent.toml", ".", "a\0b", "x" * 5000])
def test_files_that_cannot_be_read(tmp_path, name):
    error = error_of(tmp_path / name)
    assert "cannot be read" in error.why


# --- API keys


def test_api_keys(file, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# operators\nalpha-1\n\n  beta-2 \t ann@box \n#gamma\n")
    keys.chmod(0o600)
    assert read_api_keys(keys) == (ApiKey("alpha-1"), ApiKey("beta-2", "ann@box"))
    config = load(file(SMALLEST + "[server]\nhost = '0.0.0.0'\napi_keys_file = 'keys'\n"))
    assert config.server.api_keys_file == str(keys)
    assert config.notices == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no key"),
        (b"# none\n\n", "has no key"),
        (b"good\nsecret one more\n", "line 2"),
        (b"good\nsecret \xc3\xa9\n", "line 2"),
        (b"".join(b"secret n%d\n" % i for i in range(257)), "has 257 names, more than 256"),
        ("geh\u00e9im\n".encode(), "line 1"),
        (b"\xff\n", "not UTF-8"),
        (b"k\n" * 2**20, "larger than 1 MiB"),
        (b"k\n" * 4097, "has 4097 keys, more than 4096"),
    ],
    ids=["empty", "comments", "words", "name", "names", "accent", "latin-1", "large", "many"],
)
def test_key_files_that_are_refused_without_showing_a_key(file, tmp_path, content, why):
    (tmp_path / "keys").write_bytes(content)
    error = error_of(file(SMALLEST + "[server]\napi_keys_file = 'keys'\n"))
    assert error.key == "server.api_keys_file"
    assert why in error.why
    assert "secret" not in str(error)


def test_a_pipe_is_no_key_file(tmp_path):
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_api_keys(tmp_path / "keys")


def test_a_key_file_that_others_can_read_is_warned_about(file, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    keys.chmod(0o644)
    notices = load(file(SMALLEST + "[server]\napi_keys_file = 'keys'\n")).notices
    assert [notice.key for notice in notices] == ["server.api_keys_file"]
    assert notices[0].hint == f"chmod 600 {keys}"


def test_an_open_server_is_a_choice(file):
    config = load(file(SMALLEST + "[server]\nhost = '0.0.0.0'\nallow_open = true\n"))
    assert config.server.allow_open
    assert config.notices == ()
