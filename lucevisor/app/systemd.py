"""systemd: readiness, status and watchdog (sd_notify), and socket activation (LISTEN_FDS)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog

log = structlog.get_logger("lucevisor.app")

_REPEATED: Final = {"WATCHDOG", "STATUS", "EXTEND_TIMEOUT_USEC"}
_POLL_S: Final = 0.25
EXTEND_S: Final = 30.0
"""EXTEND_TIMEOUT_USEC while the supervisor starts or stops, sent repeatedly.  The supervisor's own deadlines bound
both, and a hung event loop sends no extension."""


class Notifier:
    """Sends assignments to the socket that ``NOTIFY_SOCKET`` names; does nothing if it names none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.name = address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if address and address[0] not in "/@":
            log.warning("no reports to systemd", reason=f"NOTIFY_SOCKET={address} is not a Unix socket")
            self._address = ""

    def __bool__(self) -> bool:
        return bool(self._address)

    def send(self, **values: object) -> None:
        if not self._address:
            return
        lines = (f"{name}={str(value).replace(chr(10), ' ')}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(0.0 if values.keys() <= _REPEATED else 1.0)  # the queue is full: systemd is busy
                sock.connect(self._address)
                sock.send("\n".join(lines).encode())
        except OSError as error:
            log.warning("report to systemd failed", what=", ".join(values), reason=str(error))


def watchdog_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float:
    if environ.get("WATCHDOG_PID", str(pid or os.getpid())) != str(pid or os.getpid()):
        return 0.0
    interval = environ.get("WATCHDOG_USEC", "")
    return int(interval) / 1e6 if interval.isdecimal() else 0.0


class SystemdReport:
    """Sends start, state, watchdog and stop to systemd."""

    def __init__(self, read_state: Callable[[], tuple[str, str]]) -> None:
        """``read_state`` returns the ``state`` of the status and the line that `systemctl status` shows."""
        self._read_state = read_state
        self._used = asyncio.Event()
        self.notifier, self.watchdog_s = Notifier({}), 0.0
        self._status = ""
        self._ready = self._stopping = False

    def use(self, notifier: Notifier, watchdog: float) -> None:
        self.notifier, self.watchdog_s = notifier, watchdog
        self._status, self._ready = "", False
        if notifier:
            self._used.set()

    async def run(self) -> None:
        extended_s = -EXTEND_S
        while await self._used.wait():
            state, status = self._read_state()
            now = time.monotonic()
            if state == "draining" and not self._stopping:
                self._stopping = True
                self.notifier.send(STOPPING=1)
                extended_s = -EXTEND_S  # extensions of the start do not count
            if (state == "starting" or self._stopping) and now - extended_s > EXTEND_S / 4:
                extended_s = now
                self.notifier.send(EXTEND_TIMEOUT_USEC=int(EXTEND_S * 1e6))
            if status != self._status:
                self._status = status
                self.notifier.send(STATUS=status)
            if state == "ready" and not self._ready:
                self.ready()
            if self.watchdog_s:
                self.notifier.send(WATCHDOG=1)
            await asyncio.sleep(min(_POLL_S, self.watchdog_s / 4 or _POLL_S))

    def ready(self) -> None:
        """Report READY, at the start or after :meth:`reloading`."""
        self._ready = True
        self.notifier.send(READY=1)

    def reloading(self) -> None:
        self.notifier.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    @contextmanager
    def reload(self) -> Iterator[None]:
        """Report begin and end of a reload, if the service was ready."""
        was_ready = self._ready
        if was_ready:
            self.reloading()
        try:
            yield
        finally:
            if was_ready:
                self.ready()

    def report_handed_over(self, main_pid: int) -> None:
        """Name another process as the main one, which reports from now on."""
        self.notifier.send(MAINPID=main_pid)
        self.notifier = Notifier({})
        self._used.clear()


def listen_sockets(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> list[socket.socket]:
    """Return the stream sockets that systemd opened for this process, close-on-exec."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid or os.getpid()) or not count.isdecimal():
        return []
    sockets = []
    for fd in range(3, 3 + int(count)):
        os.set_inheritable(fd, False)
        sockets.append(socket.socket(fileno=fd))
    return sockets
