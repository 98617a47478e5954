"""Loading a wrong configuration: one clear error for each thing that can be wrong.  More of them: tests/mistakes."""

import subprocess
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.errors import (
    NO_VALUE,
    ConfigError,
    ConfigErrors,
)
from tests.certificates import make_certificate
from tests.config.boxes import SMALLEST, TWO_VENDORS, error_of, errors_of

DEVICES = '["left:0", "right:0"]'
"""The devices of the smallest file."""


def assert_told(error, key: str, why: str, hint: str) -> None:
    assert error.key == key
    assert why in error.why
    assert hint in error.hint


# --- what is refused, one error each


@pytest.mark.parametrize(
    ("more", "key", "value", "why", "hint"),
    [
        (
            "[server]\nprefill_chunk = 1",
            "server.prefill_chunk",
            1,
            "is not a key of [server]",
            "nearest: engine.prefill_chunk",
        ),
        ("[engine]\nthreads = 1", "engine.threads", 1, "is not a key of [engine]", "nearest: groups.NAME.threads"),
        ("[server.tls]\ncert = 1", "server.tls", {"cert": 1}, "is not a key", "keys: host, port"),
        (
            "[server]\nhost = 'box.lan'",
            "server.host",
            "box.lan",
            "can be reached from other machines",
            "server.api_keys_file",
        ),
        ("[server]\napi_keys_file = 'absent'", "server.api_keys_file", None, "cannot be read", "one key per line"),
        ("[draft]\ndevice = 'gone:0'", "draft.device", "gone:0", "no group is named gone", "left:0, right:0"),
        ("[pflash]\nkeep_ratio = 1e400", "pflash.keep_ratio", None, "is not ", "number > 0 and <= 1"),
        ("[pflash]\nmode = 'auto'", "pflash.path", "", "is empty", "Qwen3-0.6B"),
        ("[pflash]\ndevice = 'gone:0'", "pflash.device", "gone:0", "no group is named gone", "left:0, right:0"),
        ("[vision]\ndevice = 'gone:0'", "vision.device", "gone:0", "no group is named gone", "left:0, right:0"),
        (
            "[vision]\nmin_tokens = 9\nmax_tokens = 8",
            "vision.min_tokens",
            9,
            "more than vision.max_tokens",
            "nearest: 8",
        ),
        ("[pflash]\ncurve = ['9:0.5', '9:0.4']", "pflash.curve", None, "has 9 tokens after 9", "order the points"),
        (
            "[engine]\ndeterministic = true\n[kvflash]\npool_tokens = 1024",
            "engine.deterministic",
            True,
            "does not hold with KV Flash",
            "nearest: kvflash.pool_tokens = 0",
        ),
        (
            "[engine]\ndeterministic = true\n[pflash]\nmode = 'auto'\npath = 's.gguf'",
            "engine.deterministic",
            True,
            "does not hold with PFlash",
            "nearest: pflash.mode = off",
        ),
        ("log = 5", "log", 5, "is an integer, not a table", "write [log]"),
        ("[[log]]\nlevel = 'info'", "log", [{"level": "info"}], "is a list, not a table", "write [log]"),
        (
            "[groups.'Left side']\nbackend = 'cpu'",
            "groups.Left side",
            None,
            "is not a group name",
            "nearest: leftside",
        ),
        ("[groups.third]\nbackend = 'cpu'", "groups.third", None, "would have nothing to do", "add third:0"),
        ("[groups]\nthird = 3", "groups.third", 3, "is an integer, not a table", "write [groups.third]"),
    ],
)
def test_one_wrong_setting(file, more, key, value, why, hint):
    text = f"{more}\n{SMALLEST}" if more.startswith("log") else f"{SMALLEST}\n{more}\n"
    errors = errors_of(file(text))
    error = errors[0]
    assert len(errors) == 1 or more.startswith("[groups]"), [str(each) for each in errors]
    assert value is None or error.value == value
    assert_told(error, key, why, hint)


@pytest.mark.parametrize(
    ("old", "new", "key", "why", "hint"),
    [
        ('path = "m.gguf"', 'path = ""', "model.path", "is empty", "write a value"),
        ('path = "m.gguf"', 'path = " m.gguf"', "model.path", "has surrounding spaces", "m.gguf"),
        ('path = "m.gguf"', 'path = "hf:owner"', "model.path", "is not a file of the hub", "hf:owner/repo/file.gguf"),
        ('backend = "cpu"\n[placement]', "\n[placement]", "groups.right.backend", "is missing", "cpu, cuda, hip"),
    ],
)
def test_one_wrong_line_of_the_smallest_file(file, old, new, key, why, hint):
    assert old in SMALLEST
    assert_told(error_of(file(SMALLEST.replace(old, new))), key, why, hint)


@pytest.mark.parametrize(
    ("devices", "key", "why", "hint"),
    [
        ('["left:0", "right:0", "left:0"]', "placement.target_devices[2]", "is the same device", "nearest: left:1"),
        ('["left:0", "hip:0"]', "placement.target_devices[1]", "no group has the backend hip", "left:0, right:0"),
        ('["left:0", "cpu:1"]', "placement.target_devices[1]", "is ambiguous: 2 groups", "left:1, right:1"),
        ('["left:0"]', "groups.right", "would have nothing to do", "add right:0"),
    ],
)
def test_one_wrong_list_of_devices(file, devices, key, why, hint):
    assert_told(error_of(file(SMALLEST.replace(DEVICES, devices))), key, why, hint)


@pytest.mark.parametrize(
    ("split", "key", "why", "hint"),
    [
        ('["0-8"]', "placement.target_layer_split", "has 1 ranges for 2 devices", "left:0, right:0"),
        ("[0.5, nan]", "placement.target_layer_split[1]", "not a finite number above 0", ""),
        ('"atuo"', "placement.target_layer_split", "is not auto", "nearest: auto"),
    ],
)
def test_one_wrong_split(file, split, key, why, hint):
    assert_told(error_of(file(f"{SMALLEST}target_layer_split = {split}\n")), key, why, hint)


@pytest.mark.parametrize("split", ["[0.5, 0.5]", '["0-4", "4-8"]'])
def test_a_split_needs_named_devices(file, split):
    text = SMALLEST.replace(f"target_devices = {DEVICES}", f"target_layer_split = {split}")
    why = "for devices that are not named"
    assert_told(error_of(file(text)), "placement.target_layer_split", why, "placement.target_devices")


def test_the_same_device_under_two_names(file):
    error = error_of(file(TWO_VENDORS.replace('"hip:1"', '"amd:0"')))
    assert (error.key, error.value) == ("placement.target_devices[2]", "amd:0")
    assert error.hint == "nearest: amd:1, if there is one"


def test_no_group_at_all(file):
    text = "[model]\npath = 'm'\n[placement]\ntarget_devices = ['cuda:0']\n"
    errors = errors_of(file(text))
    assert [error.key for error in errors] == ["groups", "placement.target_devices[0]"]


def test_a_group_that_is_named_after_another_backend(file):
    text = TWO_VENDORS.replace("[groups.nv]", "[groups.hip]")
    error = next(error for error in errors_of(file(text)) if error.key == "groups.hip.backend")
    assert error.value == "cuda"


def test_visible_devices_bound_the_index_and_stand_once(file):
    text = TWO_VENDORS.replace('backend = "hip"', 'backend = "hip"\nvisible_devices = [3]')
    error = error_of(file(text))
    assert (error.key, error.hint) == ("placement.target_devices[2]", "nearest: amd:0")
    text = TWO_VENDORS.replace(
        'backend = "cuda"', 'backend = "cuda"\nvisible_devices = [0]\nenv = { CUDA_VISIBLE_DEVICES = "1" }'
    )
    error = error_of(file(text))
    assert (error.key, error.value) == ("groups.nv.visible_devices", ["0"])
    assert "env.CUDA_VISIBLE_DEVICES" in error.why


def test_all_errors_are_told_at_once(file):
    text = SMALLEST.replace(DEVICES, '["left:0", "rite:0"]') + "[server]\nport = 'x'\nhots = 1\n[lgo]\n"
    with pytest.raises(ConfigErrors) as caught:
        load(file(text), ["engine.pages=0"])
    assert [error.key for error in caught.value.errors] == [
        "lgo",
        "engine.pages",
        "server.hots",
        "server.port",
        "placement.target_devices[1]",
    ]
    assert len(str(caught.value).splitlines()) == 5
    assert caught.value.exit_code == 2


# ---- exit codes and one-line messages


def test_message_says_where_what_and_what_to_do():
    error = ConfigError("server.port", 70000, "is not in 0..65535", "nearest: 65535", file="box.toml")
    assert str(error) == "box.toml: server.port = 70000: is not in 0..65535; nearest: 65535"
    assert str(ConfigError("model.path", NO_VALUE, "is missing")) == "model.path: is missing"
    assert str(ConfigError("", NO_VALUE, "is not TOML", file="x.toml")) == "x.toml: is not TOML"


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "‮", "\x00", "\ud800"])
def test_a_message_is_one_printable_line(value):
    text = str(ConfigError(value, value, f"is {value}", f"not {value}", file=value))
    assert text.isprintable()
    assert text.encode("utf-8")


def test_a_value_nested_too_deep_can_be_shown():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert str(ConfigError("k", deep, "is odd")) == "k = a list: is odd"


# ---- certificate and key of the endpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two pairs, box and other, a key with a password, and a text."""
    directory = tmp_path_factory.mktemp("tls")
    _, key = make_certificate(directory)
    make_certificate(directory, "other")
    locked = str(directory / "locked.key")
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    (directory / "text").write_text("no certificate\n")
    return directory


@pytest.mark.parametrize(
    ("cert", "key", "wrong", "why"),
    [
        ("box.crt", "", "tls_key_file", "is empty, and server.tls_cert_file is set"),
        ("", "box.key", "tls_cert_file", "is empty, and server.tls_key_file is set"),
        ("absent", "box.key", "tls_cert_file", "is not a file"),
        ("box.crt", "absent", "tls_key_file", "is not a file"),
        ("box.crt", "other.key", "tls_cert_file", "is not its key"),
        ("text", "box.key", "tls_cert_file", "is no certificate"),
        ("box.crt", "locked.key", "tls_cert_file", "without a password"),
    ],
)
def test_what_is_no_pair_is_refused(file, files: Path, cert: str, key: str, wrong: str, why: str) -> None:
    named = {"tls_cert_file": cert, "tls_key_file": key}
    lines = [f"{setting} = '{files / name}'" for setting, name in named.items() if name]
    with pytest.raises(ConfigError, match=why) as caught:
        load(file(f"{SMALLEST}[server]\n" + "\n".join(lines) + "\n"))
    assert caught.value.key == f"server.{wrong}"


def test_a_key_that_others_can_read_is_warned_about(file, files: Path, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    key.chmod(0o644)
    notices = load(file(f"{SMALLEST}[server]\ntls_cert_file = '{cert}'\ntls_key_file = '{key}'\n")).notices
    assert [notice.key for notice in notices] == ["server.tls_key_file"]


# ---- keys without effect


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
          "cache.checkpoint_pages=1"],
         ["cache.memory", "cache.states", "cache.min_tokens", "cache.checkpoint_pages"]),
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


CLUSTER = SMALLEST.replace('[groups.right]\nbackend = "cpu"', '[groups.right]\nbackend = "cpu"\nhost = "attic"')


def test_a_host_needs_a_cluster_with_an_address_and_a_secret_of_its_owner(file, tmp_path):
    error = error_of(file(CLUSTER))
    assert (error.key, error.value) == ("groups.right.host", "attic")
    assert "[cluster]" in error.hint
    listen = CLUSTER + '[cluster]\nlisten = "10.0.0.1"\n'
    assert error_of(file(listen)).key == "cluster.secret_file"
    named, secret = listen + 'secret_file = "secret"\n', tmp_path / "secret"
    assert "No such file" in error_of(file(named)).why
    secret.write_text("x" * 31 + "\n")
    secret.chmod(0o600)
    assert "holds 31 bytes, not 32 to 4096" in error_of(file(named)).why
    secret.write_text("x" * 32)
    secret.chmod(0o640)
    assert (error_of(file(named)).why, error_of(file(named)).hint[:9]) == (
        "can be used by other users of this machine", "chmod 600"
    )  # fmt: skip
    secret.chmod(0o600)
    config = load(file(named))
    assert config.groups["right"].host == "attic"
    assert not config.groups["right"].shares_memory
    assert config.cluster.secret_file == str(secret)
    everywhere = named.replace("10.0.0.1", "0.0.0.0")
    assert "no address that others can connect to" in error_of(file(everywhere)).why


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "at tic", "a;b", "$(x)", "`x`", "a'b"])
def test_a_host_is_no_option_and_no_shell_text(file, host):
    assert error_of(file(CLUSTER.replace('"attic"', f'"""{host}"""'))).key == "groups.right.host"


def test_words_of_the_ssh_command_may_be_repeated(file, tmp_path):
    (tmp_path / "secret").write_text("x" * 32)
    (tmp_path / "secret").chmod(0o600)
    text = CLUSTER + '[cluster]\nlisten = "10.0.0.1"\nsecret_file = "secret"\nssh = ["ssh", "-o", "a=b", "-o", "c=d"]\n'
    assert load(file(text)).cluster.ssh == ("ssh", "-o", "a=b", "-o", "c=d")
    error = error_of(file(text.replace('["ssh", "-o", "a=b", "-o", "c=d"]', "[]")))
    assert (error.key, error.why) == ("cluster.ssh", "is empty")
