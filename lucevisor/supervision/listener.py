"""The supervisor's TCP port: every link and heartbeat that is no socketpair is an authentic connection to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import structlog

from lucevisor.protocol.authentication import CHANNEL_BYTES, Purpose
from lucevisor.protocol.tcp import LOOPBACK, Acceptor, Credentials
from lucevisor.protocol.transport import AwaitedConnection

_log = structlog.get_logger("lucevisor.supervision")


class Channels(NamedTuple):
    """Our ends of links, heartbeat and, over TCP, files of each link; ``options``: of the daemon, for its own ends."""

    links: Sequence[socket.socket | AwaitedConnection]
    heartbeat: socket.socket | AwaitedConnection
    files: Sequence[AwaitedConnection]
    options: list[str]


class Listener:
    """Listens at ``host``; without arguments for daemons of this host, with a key of its own.  Raises OSError."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, credentials: Credentials | None = None) -> None:
        self.host = host
        # Text, as white space at either end is no part of a key.
        self.credentials = credentials or Credentials(secrets.token_hex(32).encode())
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[bytes, tuple[Purpose, AwaitedConnection]] = {}  # by channel
        self._acceptor = Acceptor(host, port, self.credentials, self._expects, self._on_refused)
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._acceptor.fileno(), self._process)

    @property
    def address(self) -> str:
        return self._acceptor.address

    @property
    def n_refused(self) -> int:
        return self._acceptor.refusals.n_refused

    def expect(self, n_links: int, on_failure: ExitStack) -> Channels:
        """Await so many links of a daemon, a heartbeat, and files of each link, until ``on_failure``."""
        options: list[str] = []

        def awaited(purpose: Purpose, option: str) -> AwaitedConnection:
            channel = os.urandom(CHANNEL_BYTES)
            connection = AwaitedConnection(partial(self._awaited.pop, channel, None))
            self._awaited[channel] = purpose, connection
            on_failure.callback(connection.forget)
            options.append(f"--{option}=tcp:{self.address}/{channel.hex()}")
            return connection

        links = [awaited(Purpose.LINK, "link") for _ in range(n_links)]
        heartbeat = awaited(Purpose.HEARTBEAT, "heartbeat")
        return Channels(links, heartbeat, [awaited(Purpose.FILES, "files") for _ in range(n_links)], options)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._acceptor.closed:
            self._loop.remove_reader(self._acceptor.fileno())
            self._acceptor.close()

    def key_descriptor(self) -> int:
        """Return a pipe from which a child reads the key."""
        reading, writing = os.pipe()
        try:
            os.write(writing, self.credentials.key)
        finally:
            os.close(writing)
        return reading

    def _expects(self, purpose: Purpose, channel: bytes) -> bool:
        return channel in self._awaited and self._awaited[channel][0] is purpose

    def _process(self) -> None:
        for accepted in self._acceptor.process():
            _, connection = self._awaited.pop(accepted.channel)
            connection.tcp, connection.error = accepted.tcp, accepted.error
            connection.take(accepted.sock)
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self._acceptor.wait_s
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._process)

    def _on_refused(self, text: str) -> None:
        _log.warning("connection refused", address=self.address, reason=text)
