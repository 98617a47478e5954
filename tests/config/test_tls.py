"""The certificate and key of the endpoint: refused before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.errors import ConfigError
from tests.certificates import make_certificate
from tests.config.boxes import SMALLEST


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
