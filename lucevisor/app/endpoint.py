"""The endpoint of a supervisor: the sockets that clients and operators connect to."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from lucevisor.api import server
from lucevisor.app.admin import AdminPort, create_admin_app, serve_admin
from lucevisor.errors import unusable


class Endpoint:
    """Serves clients over HTTP, and operators on the admin socket."""

    def __init__(self, port: AdminPort, admin_socket: Path, tls: ssl.SSLContext | None = None) -> None:
        self.url = ""
        self.app: web.Application  # set before ``open``
        self._tls = tls
        self._port, self._admin_socket = port, admin_socket
        self._http: web.AppRunner | None = None
        self._admin: web.AppRunner | None = None
        self._sockets: list[socket.socket] = []

    async def open_admin(self) -> None:
        """Listen on the admin socket, also when it was removed; raises ConfigError."""
        if self._admin is not None:
            await self._admin.cleanup()
        try:
            self._admin = await serve_admin(create_admin_app(self._port), self._admin_socket)
        except OSError as error:
            raise unusable(self._admin_socket.parent, error) from error

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = [sock.dup() for sock in sockets]
        self._http, self.url = await server.serve(self.app, sockets, self._tls)

    @property
    def sockets(self) -> list[int]:
        return [sock.fileno() for sock in self._sockets]

    async def drain(self, deadline_s: float) -> bool:
        """Accept nothing more; return whether all requests ended in time."""
        self._stop_listening()
        return self._http is None or await server.drain(self._http, deadline_s)

    async def close(self) -> None:
        self._stop_listening()
        if self._http is not None:
            await self._http.cleanup()
        if self._admin is not None:
            await self._admin.cleanup()

    def _stop_listening(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []
