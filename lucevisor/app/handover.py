"""Handover of a supervisor's sockets and name to a new process (`lucevisor start --take-over`).

The old supervisor listens on a Unix socket in the run directory.  Messages in order:

    new to old   HandoverRequest: pid, and the time that running requests may take to finish
    old to new   HandoverReply with descriptors (SCM_RIGHTS): lock of the run directory, listening sockets
    new to old   SERVING: the new one accepts connections; until then the old one continues unchanged
    old to new   GIVEN: the new one owns the name, and systemd is notified
    old to new   SAVED: prefix slots are in cache.dir; end of file when the old process has exited
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from lucevisor.api.server import adopt
from lucevisor.api.server import listen as listen_on
from lucevisor.app.endpoint import Endpoint
from lucevisor.app.rundir import RunDirectory
from lucevisor.app.systemd import Notifier, SystemdReport, watchdog_s
from lucevisor.config import ServerConfig
from lucevisor.deployment.service import SAVE_S, Service
from lucevisor.errors import LucevisorError, unusable
from lucevisor.protocol import transport as descriptors

log = structlog.get_logger("lucevisor.app")

SERVING: Final = b"serving"
GIVEN: Final = b"given"
SAVED: Final = b"saved"
ANSWER_S: Final = 5.0
_MAX_BYTES: Final = 1 << 16


class HandoverRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``drain_s``: seconds that running requests may take to finish."""

    pid: int
    drain_s: float


class HandoverReply(msgspec.Struct, forbid_unknown_fields=True):
    """``refused``: why nothing is handed over, or empty; the rest is the connection to systemd."""

    pid: int
    refused: str = ""
    notify_socket: str = ""
    watchdog_usec: str = ""


class HandoverServer:
    def __init__(self, path: Path, source: Handover) -> None:
        self._path, self._source = path, source
        self._sock: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.successor: socket.socket | None = None  # closed by the end of this process, which the new one waits for

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
        while self.successor is None:
            connection, _ = await loop.sock_accept(sock)
            try:
                if await self._hand_over(connection):
                    self.successor = connection
                    return
            except (TimeoutError, OSError, msgspec.MsgspecError) as error:
                log.warning("handover refused", reason=f"{type(error).__name__}: {error}")
                self._source.on_failed()
            connection.close()

    async def _hand_over(self, connection: socket.socket) -> bool:
        """Run one handover; return whether the new supervisor serves."""
        loop = asyncio.get_running_loop()
        uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in (os.geteuid(), 0):
            log.warning("handover refused", reason=f"uid {uid} asked for it")
            return False
        async with asyncio.timeout(ANSWER_S):
            request = msgspec.json.decode(await loop.sock_recv(connection, _MAX_BYTES), type=HandoverRequest)
        reply, fds = self._source.offer()
        connection.sendmsg([msgspec.json.encode(reply)], descriptors.pack([] if reply.refused else fds))
        if reply.refused:
            return False
        log.info("handing over", to_pid=request.pid)
        async with asyncio.timeout(60.0):
            if await loop.sock_recv(connection, _MAX_BYTES) != SERVING:
                raise OSError("the other supervisor ended before it served")
        self._source.on_served(request)
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, GIVEN)
        await self._source.save()
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, SAVED)
        return True


class HandoverOffer:
    """Sockets and lock of the running supervisor.  Call `decline`, or `announce_serving` to accept."""

    def __init__(self, connection: socket.socket, reply: HandoverReply, fds: list[int]) -> None:
        self.reply = reply
        self._connection = connection
        self.lock, *sockets = fds
        self.sockets = [socket.socket(fileno=fd) for fd in sockets]

    def decline(self) -> None:
        descriptors.close_all([self.lock])
        for sock in (*self.sockets, self._connection):
            sock.close()

    async def announce_serving(self) -> None:
        """Confirm that connections are accepted; return when the old supervisor has released the name."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, SERVING)
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_recv(self._connection, len(GIVEN))
        except (TimeoutError, OSError) as error:  # clients are served here already, so this is final
            log.warning(
                "the other supervisor did not confirm that it gave up its name: systemd may be notified late",
                pid=self.reply.pid,
                reason=repr(error),
            )

    async def wait_for_saves(self) -> AsyncIterator[None]:
        """Yield when the old supervisor has saved prefix slots, and when it has exited."""
        loop, more = asyncio.get_running_loop(), True
        with self._connection, contextlib.suppress(OSError):
            while more:
                more = bool(await loop.sock_recv(self._connection, _MAX_BYTES))
                yield


async def request_handover(path: Path, request: HandoverRequest) -> HandoverOffer | None:
    """Ask the supervisor on ``path`` for its sockets; None without one.  Raises LucevisorError."""
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
        reply = msgspec.json.decode(data, type=HandoverReply)
        if reply.refused or len(fds) < 2:
            descriptors.close_all(fds)
            raise LucevisorError(f"not taken over: {reply.refused or 'no socket was handed over'}")
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
    return HandoverOffer(connection, reply, fds)


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    space = socket.CMSG_SPACE((1 + 16) * struct.calcsize("i"))  # the lock, and sockets
    data, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, space, descriptors.RECEIVE_FLAGS)
    return data, descriptors.unpack(ancillary)


class Handover:
    """Both sides of a handover.  ``drain_s``: seconds for the old supervisor's requests; None: no take-over."""

    def __init__(
        self,
        service: Service,
        endpoint: Endpoint,
        run_dir: RunDirectory,
        report: SystemdReport,
        drain_s: float | None,
        on_drained: Callable[[], None],
    ) -> None:
        self.pending = drain_s is not None
        self._service, self._endpoint, self._run_dir, self._report = service, endpoint, run_dir, report
        self._drain_s = drain_s or 0.0
        self._on_drained = on_drained
        self._server = HandoverServer(run_dir.handover, self)
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self) -> None:
        try:
            self._server.open()
        except OSError as error:
            raise unusable(self._run_dir.path, error) from error

    async def listen_again(self) -> None:
        await self._server.close()
        self.listen()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()

    # ---- in the new supervisor

    async def take_over(self, server: ServerConfig) -> None:
        """Take over the sockets and the name.  Raises LucevisorError, and then nothing has changed."""
        offer = await request_handover(self._run_dir.handover, HandoverRequest(os.getpid(), self._drain_s))
        if offer is None:
            log.info("the other supervisor has ended", name=self._run_dir.name)
            self._run_dir.claim()
            await self._endpoint.open_admin()
            await self._endpoint.open(listen_on(server.host, server.port))
        else:
            try:
                sockets = adopt(offer.sockets, server.host, server.port)
            except LucevisorError:
                offer.decline()
                raise
            await self._endpoint.open(sockets)
            await self._endpoint.open_admin()
            await offer.announce_serving()
            self._run_dir.adopt(offer.lock)
            if offer.reply.notify_socket:
                environ = {"NOTIFY_SOCKET": offer.reply.notify_socket, "WATCHDOG_USEC": offer.reply.watchdog_usec}
                self._report.use(Notifier(environ), watchdog_s(environ))
            log.info("taken over", name=self._run_dir.name, from_pid=offer.reply.pid)
            self._tasks.append(asyncio.create_task(self._scan_saved(offer), name="saves of the other supervisor"))
        self.pending = False
        self.listen()

    async def _scan_saved(self, offer: HandoverOffer) -> None:
        async for _ in offer.wait_for_saves():
            for model in self._service.models.values():
                if model.snapshot_store is not None:
                    await asyncio.to_thread(model.snapshot_store.scan)
        log.info("the other supervisor has ended", pid=offer.reply.pid)

    # ---- in the old supervisor, called by HandoverServer

    def offer(self) -> tuple[HandoverReply, list[int]]:
        if self._service.state == "draining":
            return HandoverReply(os.getpid(), refused="the running supervisor is stopping"), []
        self._report.reloading()
        notifier = self._report.notifier
        reply = HandoverReply(
            os.getpid(), notify_socket=notifier.name, watchdog_usec=str(int(1e6 * self._report.watchdog_s))
        )
        return reply, [self._run_dir.lock, *self._endpoint.sockets]

    def on_failed(self) -> None:
        self._report.ready()

    def on_served(self, request: HandoverRequest) -> None:
        """Release the name, and stop when the running requests have ended."""
        self._report.report_handed_over(request.pid)
        self._run_dir.release()
        log.info("handed over", to_pid=request.pid, drain_s=request.drain_s)
        self._tasks.append(asyncio.create_task(self._finish(request.drain_s), name="finish requests"))

    async def save(self) -> None:
        await self._service.save_prefixes(SAVE_S)

    async def _finish(self, drain_s: float) -> None:
        ended = await self._endpoint.drain(drain_s)
        log.info("drained", all_ended=ended)
        self._on_drained()


def no_room_error(service: Service) -> LucevisorError:
    return LucevisorError(
        f"not taken over, the running supervisor goes on: {service.reason()}; both must fit at once, else stop it first"
    )
