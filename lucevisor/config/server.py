"""The `[server]` section: the HTTP endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lucevisor.config.names import FilePath, Host, Origin
from lucevisor.config.sections import Key
from lucevisor.config.strict import Flag, Real, Several, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP endpoint."""

    host: Annotated[
        str, Key(Host(), "Address to listen on. Any address but loopback needs `api_keys_file` or `allow_open = true`.")
    ] = "127.0.0.1"
    port: Annotated[int, Key(Whole(0, 65535), "Port to listen on; 0: any free one, see `lucevisor status`.")] = 8080
    api_keys_file: Annotated[
        str,
        Key(
            FilePath(),
            "File of accepted keys, one per line, with a name behind it or without: `KEY NAME`. Empty lines and lines "
            "that start with `#` are skipped. Empty: no key is required.",
        ),
    ] = ""
    admin_keys_file: Annotated[
        str, Key(FilePath(), "Like `api_keys_file`: keys that may also restart groups over HTTP. Empty: nobody may.")
    ] = ""
    tls_cert_file: Annotated[
        str,
        Key(
            FilePath(),
            "Certificate in PEM, its chain behind it: serves HTTPS instead of HTTP. Needs `tls_key_file`.",
        ),
    ] = ""
    tls_key_file: Annotated[str, Key(FilePath(), "Private key of `tls_cert_file` in PEM, without a password.")] = ""
    allow_open: Annotated[bool, Key(Flag(), "Serve other machines without an API key.")] = False
    max_queue: Annotated[
        int,
        Key(
            Whole(1, 2**20),
            "Requests that may wait in the queue, shared equally by the clients that wait; further ones get 429.",
            "requests",
        ),
    ] = 256
    max_connections: Annotated[
        int,
        Key(
            Whole(1, 2**16),
            "Open connections; a further one replaces the longest idle one, or gets 503.",
            "connections",
        ),
    ] = 1024
    drain_s: Annotated[
        float,
        Key(Real(0.01, 86400.0), "How long a stop waits for running requests; then they end with an error.", "seconds"),
    ] = 2.0
    cors_origins: Annotated[
        tuple[str, ...],
        Key(Several(Origin()), "Origins whose pages may call the endpoint from a browser. Empty: none."),
    ] = ()
