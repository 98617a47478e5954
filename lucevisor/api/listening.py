"""Listening sockets: bound here, opened by systemd, or handed over by the supervisor that this one replaces.

Invariant: every socket is bound to the configured address, whose reach was checked against the API keys.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Final

from lucevisor.errors import ConfigError, LucevisorError

BACKLOG: Final = 1024
"""Connections that wait to be accepted; the kernel caps it at net.core.somaxconn."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`; `port` 0 is any free one.

    Raises ConfigError when the address is wrong or taken.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        for sock in sockets:
            sock.close()
        raise _cannot_bind(host, port, error) from None
    return sockets


def adopt(sockets: Sequence[socket.socket], host: str, port: int) -> list[socket.socket]:
    """Return `sockets`, listening.  Raises ConfigError when one is bound elsewhere than `host`:`port`."""
    for sock in sockets:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise ConfigError("server.host", host, "the socket that was handed over is not a TCP socket")
        bound_host, bound_port = sock.getsockname()[:2]
        if bound_host not in [address for _, address in _addresses(host)] or port not in (0, bound_port):
            where = f"{host}:{port}"
            raise ConfigError(
                "server.port", port,
                f"the socket that was handed over listens on {bound_host}:{bound_port}, the configuration says {where}",
                "use the same address at both, or stop the other one first",
            )  # fmt: skip
        sock.listen(BACKLOG)
    return list(sockets)


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which a socket can be asked."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _addresses(host: str) -> list[tuple[int, str]]:
    """Return families and addresses of `host`.  Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _cannot_bind(host: str, port: int, error: Exception) -> LucevisorError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(
            "server.port",
            port,
            f"is taken on {host}",
            "stop the process that listens there, or use another port, or 0 for any free one",
        )
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError("server.port", port, "cannot be bound by this user", "use a port above 1023")
    if isinstance(error, OverflowError):
        return ConfigError("server.port", port, "is not a port", "use 0 to 65535")
    return ConfigError(
        "server.host", host, f"cannot be bound: {error}", "use an address of this machine, such as 127.0.0.1"
    )
