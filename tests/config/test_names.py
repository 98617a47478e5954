"""Names of files, hosts, origins, visible devices and environment variables."""

import re
from pathlib import Path

import pytest

from lucevisor.config.names import Environment, FilePath, Host, Origin, VisibleDevice
from lucevisor.config.strict import Refused, Text

FOLDER = Path("/etc/box")


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("demo/x.gguf", "/etc/box/demo/x.gguf"),
        ("../x.gguf", "/etc/box/../x.gguf"),
        ("/models/x.gguf", "/models/x.gguf"),
        ("hf:owner/repo/x.gguf", "hf:owner/repo/x.gguf"),
        ("./hf:odd", "/etc/box/hf:odd"),
    ],
)
def test_model_paths(written, resolved):
    kind = FilePath(hub=True, may_be_empty=False)
    assert kind.resolve(kind.read(written), FOLDER) == resolved


def test_a_path_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    assert FilePath().resolve("~/keys", FOLDER) == "/home/ann/keys"


def test_commands_and_empty_paths():
    command = FilePath(command=True)
    assert command.resolve("python3.12", FOLDER) == "python3.12"
    assert command.resolve("venv/bin/python", FOLDER) == "/etc/box/venv/bin/python"
    assert command.resolve("", FOLDER) == ""
    assert FilePath().resolve("python3.12", FOLDER) == "/etc/box/python3.12"


def test_a_hub_path_is_only_taken_where_the_hub_is():
    with pytest.raises(Refused, match="not a file of the hub"):
        FilePath(hub=True).read("hf:owner")
    assert FilePath().read("hf:owner") == "hf:owner"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "::", "0.0.0.0", "localhost", "box-1.example.org", "a_b", "fe80::1%eth0", "x.local."]
)
def test_hosts(host):
    assert Host().read(host) == Host().read(Text(host)) == host


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "[::1]",
        "127.0.0.1:80",
        "127.1",
        "0",
        "2130706433",
        "0x7f000001",
        "1.2.3.256",
        "01.2.3.4",
        "a..b",
        "-a",
        "a-",
        "a b",
        "http://x",
        "x/y",
        "é.org",
        "a" * 64,
        "a." * 130 + "a",
        0,
        None,
    ],
)
def test_hosts_that_are_refused(host):
    with pytest.raises(Refused):
        Host().read(host)


def test_a_bracketed_address_is_told_without_brackets():
    with pytest.raises(Refused) as refused:
        Host().read("[::1]")
    assert refused.value.hint == "nearest: ::1"


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://example.org", "tauri://localhost"])
def test_origins(origin):
    assert Origin().read(origin) == origin


@pytest.mark.parametrize(
    ("origin", "near"),
    [
        ("https://example.org/", "https://example.org"),
        ("HTTPS://Example.org", "https://example.org"),
        ("http://x/path", "http://x"),
        ("example.org", ""),
        ("", ""),
        ("http://", ""),
        ("http://u@x", ""),
    ],
)
def test_origins_that_are_refused(origin, near):
    with pytest.raises(Refused) as refused:
        Origin().read(origin)
    assert near in refused.value.hint


def test_visible_devices():
    assert VisibleDevice().read(0) == VisibleDevice().read("0") == "0"
    assert VisibleDevice().read("GPU-4f1b2c3d-0000-1111") == "GPU-4f1b2c3d-0000-1111"
    assert VisibleDevice().read("MIG-GPU-4f1b/1/0") == "MIG-GPU-4f1b/1/0"
    for value in ("0,1", "-1", "", "01", " 0", -1, True, 1.0, 10**5000):
        with pytest.raises(Refused):
            VisibleDevice().read(value)


def test_environment_variables():
    assert dict(Environment().read({"A": "1", "_b2": " x "})) == {"A": "1", "_b2": " x "}
    for table, inside in [
        ({"1A": "x"}, ".1A"),
        ({"A-B": "x"}, ".A-B"),
        ({"A": 1}, ".A"),
        ({"A": "x\0"}, ".A"),
        ({"PYTHONPATH": "x"}, ".PYTHONPATH"),
    ]:
        with pytest.raises(Refused) as refused:
            Environment().read(table)
        assert refused.value.inside == inside
    with pytest.raises(Refused, match="is a table"):
        Environment().read(Text("A=1"))


def test_an_environment_cannot_be_changed():
    environment = Environment().read({"A": "1"})
    with pytest.raises(TypeError, match=re.escape("does not support item assignment")):
        environment["B"] = "2"
