"""Files of API keys, the certificate and key of the endpoint, and the secret of a cluster. No message shows a key."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lucevisor.config.sections import ClusterConfig
from lucevisor.errors import ConfigError
from lucevisor.protocol.authentication import read_key
from lucevisor.protocol.tcp import Credentials

if TYPE_CHECKING:
    import ssl  # 10 ms, which commands without TLS need not spend

_LARGEST_FILE_BYTES: Final = 2**20
_MAX_KEYS: Final = 4096  # every request is compared with all of them
_MAX_NAMES: Final = 256  # each has metrics of its own
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_HINT: Final = "name a readable text file with one key per line"


def server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later.  Raises ConfigError if the files are not a certificate and its key."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for key, file in (("server.tls_cert_file", cert_file), ("server.tls_key_file", key_file)):
        if not file.is_file():  # OpenSSL would not say which
            raise ConfigError(key, str(file), "is not a file", "name a readable PEM file")
    try:
        context.load_cert_chain(cert_file, key_file, password=lambda: "")  # else OpenSSL asks on the terminal
    except ssl.SSLError as error:
        why = f"is no certificate in PEM, or {key_file} is not its key without a password: {error.reason or error}"
        raise ConfigError("server.tls_cert_file", str(cert_file), why, "name a certificate and its key") from None
    except OSError as error:
        why = f"or {key_file} cannot be read: {error.strerror}"
        raise ConfigError(
            "server.tls_cert_file", str(cert_file), why, "give the supervisor's user read access"
        ) from None
    return context


def read_secret(path: Path) -> bytes:
    """Return the key in the file with the cluster's secret.  Raises ConfigError."""
    setting = "cluster.secret_file"
    try:
        with path.open("rb") as file:
            shared = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            key = read_key(os.dup(file.fileno()))
    except OSError as error:
        hint = f"`lucevisor cluster secret {path}` writes one"
        raise ConfigError(setting, str(path), f"cannot be read: {error.strerror}", hint) from None
    except ValueError as error:
        hint = f"`lucevisor cluster secret {path}` writes a new one"
        raise ConfigError(setting, str(path), str(error), hint) from None
    if shared:
        raise ConfigError(setting, str(path), "can be used by other users of this machine", f"chmod 600 {path}")
    return key


def read_credentials(cluster: ClusterConfig) -> Credentials:
    """Return what connections of a cluster are authenticated and encrypted with.  Raises ConfigError."""
    key = read_secret(Path(cluster.secret_file))
    try:
        return Credentials.of(key, cluster.tls_cert_file, cluster.tls_key_file)
    except (OSError, ValueError) as error:
        why = f"is no certificate in PEM, or {cluster.tls_key_file} is not its key without a password: {error}"
        raise ConfigError(
            "cluster.tls_cert_file", cluster.tls_cert_file, why, "name a certificate and its key"
        ) from None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and the name of who has it, which may be empty.  Keys of one name are one client."""

    key: str = field(repr=False)
    name: str = ""


def read_api_keys(path: Path, setting: str = "server.api_keys_file") -> tuple[ApiKey, ...]:
    """Return the keys in a file: lines `KEY` or `KEY NAME`; empty ones and those that start with `#` are skipped.
    Raises ConfigError about the configuration key `setting`."""
    try:
        lines = _text_lines(path)
    except UnicodeDecodeError:
        raise ConfigError(setting, str(path), "is not UTF-8 text", _HINT) from None
    except (OSError, ValueError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(setting, str(path), why, _HINT) from None
    keys = []
    for number, line in enumerate(lines, 1):
        key, *names = line.split()[:3] or ["#"]
        if key.startswith("#"):
            continue
        if not all(33 <= ord(character) <= 126 for character in key):
            why = f"has a key on line {number} that is not ASCII"
            raise ConfigError(setting, str(path), why, "write one key per line")
        if len(names) > 1 or not all(map(_NAME.fullmatch, names)):
            why = f"has more than a key and a name on line {number}"
            hint = "write KEY or KEY NAME; names have up to 64 letters, digits and any of . _ - @"
            raise ConfigError(setting, str(path), why, hint)
        keys.append(ApiKey(key, *names))
    _check_counts(keys, path, setting)
    return tuple(keys)


def _check_counts(keys: list[ApiKey], path: Path, setting: str) -> None:
    if len(keys) > _MAX_KEYS:
        raise ConfigError(setting, str(path), f"has {len(keys)} keys, more than {_MAX_KEYS}", "remove unused ones")
    if (n_names := len({key.name for key in keys} - {""})) > _MAX_NAMES:
        why = f"has {n_names} names, more than {_MAX_NAMES}"
        raise ConfigError(setting, str(path), why, "leave the names of some keys out, or give several keys one name")
    if not keys:
        raise ConfigError(setting, str(path), "has no key", "write one key per line, or remove the setting")


def _text_lines(path: Path) -> list[str]:
    """Return the lines of a small regular file; devices and pipes could block.  Raises OSError, ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE_BYTES + 1)
    if len(content) > _LARGEST_FILE_BYTES:
        raise ValueError("it is larger than 1 MiB")
    return content.decode("utf-8").splitlines()
