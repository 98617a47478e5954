"""Handing a supervisor's sockets and name over to another one (`lucevisor start --take-over`).

The one that runs listens on a Unix socket of the run directory.  What is said there, in this order:

    new to old   Request: who asks, and for how long the old one may finish requests
    old to new   Offer, with descriptors (SCM_RIGHTS): the lock of the run directory, the listening sockets
    new to old   SERVING: it accepts connections
    old to new   GIVEN: the name is the new one's, and systemd knows (its reports would be the old one's before that)
    old to new   SAVED: prefix slots are in cache.dir; then the end of file when it has ended

Invariant: until SERVING the old one goes on as if nothing had been asked, so a new one that fails costs nothing; both
accept connections for a moment, so no client is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from lucevisor.errors import LucevisorError
from lucevisor.protocol import transport as descriptors

log = structlog.get_logger("lucevisor.handover")

SERVING: Final = b"serving"
GIVEN: Final = b"given"
SAVED: Final = b"saved"
ANSWER_S: Final = 5.0
SERVING_S: Final = 60.0
_MAX_BYTES: Final = 1 << 16
_MAX_SOCKETS: Final = 16


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """``drain_s``: how long running requests have."""

    pid: int
    drain_s: float


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """``refused``: why there is none.  The rest is systemd's (`lucevisor.app.systemd`)."""

    pid: int
    refused: str = ""
    notify_socket: str = ""
    watchdog_usec: str = ""


class Giver(Protocol):
    """The supervisor that runs."""

    def offer(self) -> tuple[Offer, list[int]]:
        """Return what to offer, and the descriptors: lock first, then sockets."""

    def keep(self) -> None:
        """The other supervisor failed: continue as before."""

    def give_up(self, request: Request) -> None:
        """The other one serves: leave the name to it, and accept nothing more."""

    async def save(self) -> None:
        """Save prefix slots for the other one."""


class HandoverServer:
    """Listens on ``path`` from ``open`` to ``close``."""

    def __init__(self, path: Path, giver: Giver) -> None:
        self._path, self._giver = path, giver
        self._sock: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._taken: socket.socket | None = None  # its end tells the new one that this process has ended

    def open(self) -> None:
        """Listen, in place of a supervisor that listens there already."""
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        sock.bind(str(new))
        sock.listen(4)
        new.replace(self._path)
        self._task = asyncio.create_task(self._serve(sock), name="handover")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while self._taken is None:
            connection, _ = await loop.sock_accept(sock)
            try:
                if await self._hand_over(connection):
                    self._taken = connection
                    return
            except (TimeoutError, OSError, msgspec.MsgspecError) as error:
                log.warning("not handed over", reason=f"{type(error).__name__}: {error}")
                self._giver.keep()
            connection.close()

    async def _hand_over(self, connection: socket.socket) -> bool:
        """Return whether the other one serves."""
        loop = asyncio.get_running_loop()
        uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in (os.geteuid(), 0):
            log.warning("not handed over", reason=f"uid {uid} asked for it")
            return False
        async with asyncio.timeout(ANSWER_S):
            request = msgspec.json.decode(await loop.sock_recv(connection, _MAX_BYTES), type=Request)
        offer, fds = self._giver.offer()
        connection.sendmsg([msgspec.json.encode(offer)], descriptors.pack([] if offer.refused else fds))
        if offer.refused:
            return False
        log.info("handing over", to_pid=request.pid)
        async with asyncio.timeout(SERVING_S):
            if await loop.sock_recv(connection, _MAX_BYTES) != SERVING:
                raise OSError("the other supervisor ended before it served")
        self._giver.give_up(request)
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, GIVEN)
        await self._giver.save()
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, SAVED)
        return True


class Taken:
    """What the supervisor that runs has offered; ``decline`` it, or accept it by ``serving``."""

    def __init__(self, connection: socket.socket, offer: Offer, fds: list[int]) -> None:
        self.offer = offer
        self._connection = connection
        self.lock, *sockets = fds
        self.sockets = [socket.socket(fileno=fd) for fd in sockets]

    def decline(self) -> None:
        """Close everything; the running supervisor continues."""
        descriptors.close_all([self.lock])
        for sock in (*self.sockets, self._connection):
            sock.close()

    async def serving(self) -> None:
        """Tell the other one that connections are accepted; return when it has given up the name, or has ended."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, SERVING)
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_recv(self._connection, len(GIVEN))
        except (TimeoutError, OSError) as error:  # clients are served here already: there is no way back
            log.warning(
                "the other supervisor did not say that it gave up: what systemd hears of it may come late",
                pid=self.offer.pid,
                reason=repr(error),
            )

    async def saves(self) -> AsyncIterator[None]:
        """Yield when the other one has saved prefix slots, for the last time when it has ended."""
        loop, more = asyncio.get_running_loop(), True
        with self._connection, contextlib.suppress(OSError):
            while more:
                more = bool(await loop.sock_recv(self._connection, _MAX_BYTES))
                yield


async def take(path: Path, request: Request) -> Taken | None:
    """Ask the supervisor that listens on ``path`` for its sockets; None when there is none any more.

    Raises LucevisorError when it refuses.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_connect(connection, str(path))
            await loop.sock_sendall(connection, msgspec.json.encode(request))
            data, fds = await _receive(connection)
        if not data:
            raise ConnectionResetError
        offer = msgspec.json.decode(data, type=Offer)
        if offer.refused or len(fds) < 2:
            descriptors.close_all(fds)
            raise LucevisorError(f"not taken over: {offer.refused or 'no socket was handed over'}")
    except (FileNotFoundError, ConnectionError):
        connection.close()
        return None
    except (TimeoutError, msgspec.MsgspecError) as error:
        connection.close()
        raise LucevisorError(
            f"{path}: not taken over, the other supervisor does not answer as it should ({error!r})"
        ) from None
    except LucevisorError:
        connection.close()
        raise
    return Taken(connection, offer, fds)


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message and its descriptors, close-on-exec."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    space = socket.CMSG_SPACE((1 + _MAX_SOCKETS) * struct.calcsize("i"))
    data, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, space, descriptors.RECEIVE_FLAGS)
    return data, descriptors.unpack(ancillary)
