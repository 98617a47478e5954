"""Reads the configuration again and applies what needs no new deployment.  SIGHUP does only that, `lucevisor reload`
has the service apply the rest first.

Invariant: a configuration with an error changes nothing; a valid one is applied whole, except for the keys that wait.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lucevisor.api.app_context import AppContext
from lucevisor.app import logs
from lucevisor.config import (
    ApiKey,
    Config,
    ServerConfig,
    changed_keys,
    load,
    merge_overrides,
    read_api_keys,
    server_context,
    values_in_file,
)

_KEYS: Final = {"log.level", "server.api_keys_file", "server.admin_keys_file", "server.cors_origins"}
_TLS_KEYS: Final = {"server.tls_cert_file", "server.tls_key_file"}
"""Applied only with HTTPS on: a listening socket cannot begin to speak TLS, or cease to."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """``config``: what is in force now.  ``changed``: keys with a new value in force; ``waiting``: keys whose new value
    is not.
    """

    config: Config
    changed: Sequence[str]
    waiting: Sequence[str]


@dataclass(frozen=True, slots=True)
class Overrides:
    """`KEY=VALUE` overrides of `start`, and those of the last `lucevisor reload`, which replace those of the same key
    until the next one.
    """

    file: Path
    of_start: Sequence[str]
    of_reload: Sequence[str] = ()

    @property
    def in_force(self) -> list[str]:
        return merge_overrides(self.of_start, self.of_reload)

    def described(self) -> list[dict[str, object]]:
        """Return key, value and source of each, with what the file says, which it hides; None: the file does not set
        it.  Values of the environment may be secrets, and are left out.  Raises ConfigError.
        """
        pairs = [override.partition("=")[::2] for override in self.in_force]
        of_reload = {override.partition("=")[0] for override in self.of_reload}
        hidden = values_in_file(self.file, [key for key, _ in pairs])
        return [
            {
                "key": key,
                "value": None if ".env." in key else value,
                "source": "reload" if key in of_reload else "start",
                "hides": None if ".env." in key else hidden[key],
            }
            for key, value in pairs
        ]


def read_again(overrides: Overrides) -> Config:
    """Return what the file says now, with the overrides.  Raises ConfigError."""
    return load(overrides.file, overrides.in_force)


def keys_at_once(after: Config, tls: ssl.SSLContext | None) -> set[str]:
    """Return the keys that ``apply`` applies."""
    return _KEYS | _TLS_KEYS if tls is not None and after.server.tls_cert_file else set(_KEYS)


def apply(config: Config, after: Config, context: AppContext, tls: ssl.SSLContext | None) -> Reloaded:
    """Apply what needs no new deployment of ``after``, and read the files of keys and TLS again.

    Raises ConfigError, and then changes nothing.
    """
    client_keys, admin_keys = keys_of(after.server)
    at_once = keys_at_once(after, tls)
    if tls is not None and after.server.tls_cert_file:
        files = Path(after.server.tls_cert_file), Path(after.server.tls_key_file)
        server_context(*files)  # a pair that does not fit would leave the context without a key
        tls.load_cert_chain(*files)
    context.keys.replace(client_keys)
    context.admin_keys.replace(admin_keys)
    context.settings = replace(context.settings, cors_origins=after.server.cors_origins)
    logs.set_level(after.log.level)
    changed = changed_keys(config, after)
    names = [key.partition(".")[2] for key in at_once if key.startswith("server.")]
    in_force = replace(
        config,
        log=replace(config.log, level=after.log.level),
        server=replace(config.server, **{name: getattr(after.server, name) for name in names}),
    )
    return Reloaded(in_force, [k for k in changed if k in at_once], [k for k in changed if k not in at_once])


def tls_of(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of HTTPS, None for HTTP.  Raises ConfigError."""
    return server_context(Path(server.tls_cert_file), Path(server.tls_key_file)) if server.tls_cert_file else None


def keys_of(server: ServerConfig) -> tuple[Sequence[ApiKey], Sequence[ApiKey]]:
    """Return the keys of clients and of operators.  Raises ConfigError."""
    clients = read_api_keys(Path(server.api_keys_file)) if server.api_keys_file else ()
    admins = read_api_keys(Path(server.admin_keys_file), "server.admin_keys_file") if server.admin_keys_file else ()
    return clients, admins
