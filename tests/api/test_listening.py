"""Sockets that were opened elsewhere, and where they may be bound."""

from __future__ import annotations

import socket

import pytest

from lucevisor.api.server import adopt, listen, url_of
from lucevisor.errors import ConfigError


def test_a_socket_that_is_bound_as_configured_is_adopted():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert adopt([sock], "127.0.0.1", port) == adopt([sock], "localhost", 0) == [sock]
        assert url_of(sock) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(("host", "more"), [("127.0.0.2", 0), ("::1", 0), ("127.0.0.1", 1)])
def test_a_socket_that_is_bound_elsewhere_is_refused(host, more):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1] + more
        with pytest.raises(ConfigError, match=r"server\.port.*listens on 127\.0\.0\.1:"):
            adopt([sock], host, port)


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)]
)
def test_one_of_another_kind_is_refused(family, kind):
    with socket.socket(family, kind) as sock, pytest.raises(ConfigError, match="not a TCP socket"):
        adopt([sock], "127.0.0.1", 0)


def test_every_address_of_a_name_is_listened_on():
    sockets = listen("localhost", 0)
    try:
        assert {sock.getsockname()[0] for sock in sockets} <= {"127.0.0.1", "::1"}
        assert all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for sock in sockets)
    finally:
        for sock in sockets:
            sock.close()
