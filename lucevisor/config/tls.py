"""The certificate and key of the endpoint, as a context for TLS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lucevisor.errors import ConfigError

if TYPE_CHECKING:
    import ssl  # 10 ms, which commands without TLS need not spend


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
