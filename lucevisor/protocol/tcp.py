"""Connections over TCP: listening, connecting, and how the loss of a peer is noticed. All are authenticated first.

The kernel asks a peer that sends nothing (keepalive), which works also where its process is busy or stopped, and ends
the connection after LOST_AFTER_S; for what is not acknowledged a heartbeat connection has the same limit, others a
longer one. Invariants of :class:`Acceptor`: who has not proved to have the secret costs a descriptor and some hundred
bytes (with TLS some 100 KiB) for a limited time; there are at most MAX_PENDING of them, and where more come, one of the
address that has most makes room, by lot."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lucevisor.protocol.authentication import (
    CHALLENGE_BYTES,
    MAC_BYTES,
    NO_CHANNEL,
    RESPONSE_BYTES,
    AuthenticationError,
    ClientHandshake,
    Purpose,
    ServerHandshake,
)

if TYPE_CHECKING:
    from lucevisor.protocol.tls import Tls, TlsStream  # which needs 10 ms

LOOPBACK: Final = "127.0.0.1"
CONNECT_S: Final = 10.0
"""Time to connect and to authenticate."""
AUTHENTICATE_S: Final = 5.0
"""Time that an accepted connection has to authenticate."""
MAX_PENDING: Final = 128
_AT_ONCE: Final = 4
"""Connections that ``process`` reads from before it returns: TLS handshakes of strangers cost milliseconds each."""
_TRIES: Final = 4  # of a client whose connection is closed during its authentication: maybe by lot
LOST_AFTER_S: Final = 8
"""Time after which a peer that answers nothing is lost."""
BLOCKED_S: Final = 30
"""Time after which a peer that takes no rows is lost: as long as a busy daemon may be silent, and longer than what ends
links, as only the loss of a daemon brings another connection for rows."""

_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: LOST_AFTER_S}
_TCP_INFO_BYTES: Final = 168  # of struct tcp_info, to the end of tcpi_delivery_rate
_REPORT_EVERY_S: Final = 60.0
_MAX_REPORTS: Final = 10  # in that time
_MAX_ADDRESSES: Final = 256


def watch_peer(sock: socket.socket, purpose: Purpose) -> None:
    """Have the kernel end a connection whose peer is lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    limit_s = {Purpose.HEARTBEAT: LOST_AFTER_S, Purpose.ROWS: BLOCKED_S}.get(purpose)
    if limit_s is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * limit_s)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What both ends of a connection have: the secret, and TLS if that is configured."""

    key: bytes = field(repr=False)
    tls: Tls | None = None

    @classmethod
    def of(cls, key: bytes, cert_file: str = "", key_file: str = "") -> Credentials:
        """Raises OSError, ValueError."""
        if not cert_file:
            return cls(key)
        from lucevisor.protocol.tls import Tls

        return cls(key, Tls(cert_file, key_file))


def local_address(address: str) -> str:
    """Return the own address by which HOST:PORT is reached.  Raises OSError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))  # sends nothing
        return str(sock.getsockname()[0])


def connect(
    address: str, credentials: Credentials, purpose: Purpose, channel: bytes = NO_CHANNEL, *, retry_s: float = 0.0
) -> socket.socket:
    """Connect to HOST:PORT, and authenticate each other.  ``retry_s``: how long to try again while it is not reached.

    Raises OSError, AuthenticationError.
    """
    give_up_at = time.monotonic() + retry_s
    while True:
        try:
            return _connect(address, credentials, purpose, channel)
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.5)


def _connect(address: str, credentials: Credentials, purpose: Purpose, channel: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline, n_tries = time.monotonic() + CONNECT_S, 0
    while True:
        sock = socket.create_connection((host, int(port)), max(0.1, deadline - time.monotonic()))
        try:
            stream = sock if credentials.tls is None else credentials.tls.connect(sock)
            challenge = _receive(stream, CHALLENGE_BYTES)
            if challenge or time.monotonic() > deadline:
                binding = b"" if isinstance(stream, socket.socket) else stream.peer_binding
                n_tries += 1
                handshake = ClientHandshake(credentials.key, purpose, channel, binding)
                if _authenticate(stream, challenge, handshake):
                    sock.settimeout(None)
                    watch_peer(sock, purpose)
                    return _for_frames(stream)
                if n_tries == _TRIES:
                    raise AuthenticationError("it refused this end; its log says why")
        except BaseException:
            sock.close()
            raise
        sock.close()  # too many are waiting there
        time.sleep(0.1)


def _for_frames(stream: socket.socket | TlsStream) -> socket.socket:
    if isinstance(stream, socket.socket):
        return stream
    from lucevisor.protocol.tls import relay

    return relay(stream)


def _authenticate(sock: socket.socket | TlsStream, challenge: bytes, handshake: ClientHandshake) -> bool:
    """Return False where the server closes the connection."""
    if len(challenge) < CHALLENGE_BYTES:
        raise ConnectionAbortedError("it closed the connection before a challenge")
    response = handshake.respond(challenge)
    with suppress(ConnectionError):
        sock.sendall(response)
    confirmation = _receive(sock, MAC_BYTES)
    if len(confirmation) < MAC_BYTES:
        return False
    handshake.check(confirmation)
    return True


def _receive(sock: socket.socket | TlsStream, n_bytes: int) -> bytes:
    """Receive so many bytes; fewer at the end of the stream."""
    data = b""
    with suppress(ConnectionError):
        while len(data) < n_bytes and (more := sock.recv(n_bytes - len(data))):
            data += more
    return data


@dataclass(frozen=True, slots=True)
class TcpPath:
    """What the kernel has measured of the way to a peer: round trips, and the rate at which it took what was sent.

    The least round trip is that of the way; the usual one counts acknowledgements that wait for something to
    go with."""

    round_trip_s: float
    bytes_per_s: int
    least_round_trip_s: float = 0.0


def measured_path(sock: socket.socket) -> TcpPath:
    """Raises OSError."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    round_trip_us = least_us = struct.unpack_from("<I", info, 68)[0]
    rate = 0
    if len(info) >= _TCP_INFO_BYTES:  # else an old kernel
        (least_us,) = struct.unpack_from("<I", info, 148)
        (rate,) = struct.unpack_from("<Q", info, 160)
    return TcpPath(round_trip_us / 1e6, rate, min(least_us, round_trip_us) / 1e6)


@dataclass(frozen=True, slots=True)
class Accepted:
    """An authentic connection: ``sock`` for frames, and the ``stream`` below it, which is the same without TLS."""

    sock: socket.socket
    stream: socket.socket | TlsStream
    purpose: Purpose
    channel: bytes

    @property
    def tcp(self) -> socket.socket:
        return self.stream if isinstance(self.stream, socket.socket) else self.stream.sock

    def error(self) -> OSError | None:
        """What ended the connection, where ``sock`` shows an end only."""
        return None if isinstance(self.stream, socket.socket) else self.stream.error


@dataclass(slots=True)
class _Pending:
    """A connection that has not authenticated yet."""

    sock: socket.socket
    stream: socket.socket | TlsStream
    host: str
    handshake: ServerHandshake
    deadline: float
    response: bytes = b""
    is_open: bool = False  # the challenge is sent

    def open(self) -> None:
        """Send the challenge, with TLS after its handshake.  Raises OSError, BlockingIOError if it is not done yet."""
        if not isinstance(self.stream, socket.socket):
            self.stream.handshake()
        self.stream.send(self.handshake.challenge)
        self.is_open = True


@dataclass(slots=True)
class Refusals:
    """Counts refused peers; decides what is worth a report: an address once, then once in a while with the number."""

    n_refused: int = 0
    _next: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by address: when it is reported again
    _n_silent: int = 0  # since the last report
    _reports: list[float] = field(default_factory=list)  # times of the last ones

    def report(self, host: str, reason: str, now: float) -> str:
        """Count a refused peer; return what to report, or ""."""
        self.n_refused += 1
        self._reports = [at for at in self._reports if at > now - _REPORT_EVERY_S]
        if now < self._next.get(host, now) or len(self._reports) >= _MAX_REPORTS:
            self._n_silent += 1
            return ""
        self._reports.append(now)
        self._next[host] = now + _REPORT_EVERY_S
        self._next.move_to_end(host)
        if len(self._next) > _MAX_ADDRESSES:
            self._next.popitem(last=False)
        others, self._n_silent = self._n_silent, 0
        return f"{host}: {reason}" + (f"; {others} more were refused before" if others else "")


class Acceptor:
    """Listens at an address and authenticates who connects; nothing here blocks but ``serve``. ``expects``: whether an
    authentic connection is wanted; ``on_refused`` gets what to report of refused ones. Raises OSError."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        expects: Callable[[Purpose, bytes], bool],
        on_refused: Callable[[str], None],
    ) -> None:
        self._credentials, self._expects, self._on_refused = credentials, expects, on_refused
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, port), family=family, backlog=MAX_PENDING)
        self._server.setblocking(False)
        self.address = "{}:{}".format(*self._server.getsockname()[:2])
        self.refusals = Refusals()
        self._pending: dict[int, _Pending] = {}
        self._paused_until: float | None = None
        self._stopped = False
        self._epoll = select.epoll()
        self._epoll.register(self._server.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when ``process`` has something to do."""
        return self._epoll.fileno()

    @property
    def wait_s(self) -> float | None:
        """Time after which ``process`` is due without anything to read; None if never."""
        times = [pending.deadline for pending in self._pending.values()]
        times += [] if self._paused_until is None else [self._paused_until]
        return max(0.0, min(times) - time.monotonic()) + 0.01 if times else None

    def process(self) -> Iterator[Accepted]:
        """Accept and authenticate; yield the connections that are authentic, and expected when they are yielded.

        What is left for the next call keeps the descriptor readable."""
        yield from self._process(self._epoll.poll(0, _AT_ONCE))

    def serve(self, on_accepted: Callable[[Accepted], None]) -> None:
        """Accept and authenticate until ``stop``, in this thread."""
        while not self._stopped:
            wait_s = self.wait_s
            for accepted in self._process(self._epoll.poll(-1 if wait_s is None else wait_s)):
                on_accepted(accepted)
        self.close()

    def stop(self) -> None:
        """End ``serve`` in another thread; nobody can connect from now on."""
        self._stopped = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which epoll reports

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def close(self) -> None:
        """Close all; idempotent."""
        self._stopped = True
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        self._server.close()
        self._epoll.close()

    def _process(self, events: list[tuple[int, int]]) -> Iterator[Accepted]:
        now = time.monotonic()
        for fd, _ in events:
            if fd in self._pending:
                yield from self._advance(self._pending[fd], now)
            elif fd == self._server.fileno() and not self._stopped:
                self._accept(now)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._epoll.modify(self._server.fileno(), select.EPOLLIN)
        for pending in [pending for pending in self._pending.values() if now >= pending.deadline]:
            self._refuse(pending, f"it has not authenticated within {AUTHENTICATE_S:g} s", now)

    def _accept(self, now: float) -> None:
        for _ in range(MAX_PENDING):
            try:
                sock, address = self._server.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptors or memory: the kernel keeps who is waiting
                self._paused_until = now + 1.0
                self._epoll.modify(self._server.fileno(), 0)
                return
            sock.setblocking(False)
            tls = self._credentials.tls
            handshake = ServerHandshake(self._credentials.key, b"" if tls is None else tls.binding)
            stream = sock if tls is None else tls.accept(sock)
            pending = _Pending(sock, stream, address[0], handshake, now + AUTHENTICATE_S)
            if len(self._pending) >= MAX_PENDING:
                self._make_room(now)
            try:
                if tls is None:
                    pending.open()
            except OSError:  # it is gone
                sock.close()
                continue
            self._pending[sock.fileno()] = pending
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _make_room(self, now: float) -> None:
        """Close a connection, by lot, of the address that has most."""
        [(host, _)] = Counter(pending.host for pending in self._pending.values()).most_common(1)
        crowd = [pending for pending in self._pending.values() if pending.host == host]
        self._refuse(random.choice(crowd), "too many of its connections have not authenticated", now)

    def _advance(self, pending: _Pending, now: float) -> Iterator[Accepted]:
        try:
            if not pending.is_open:
                pending.open()
            while len(pending.response) < RESPONSE_BYTES:
                data = pending.stream.recv(RESPONSE_BYTES - len(pending.response))
                if not data:
                    raise AuthenticationError("it went away without a response")
                pending.response += data
                pending.handshake.check_start(pending.response)
            purpose, channel = pending.handshake.request(pending.response)
            if not self._expects(purpose, channel):
                raise AuthenticationError(f"nothing expects its connection for {purpose.name.lower()} (any more)")
            pending.stream.send(pending.handshake.confirm(pending.response))
            watch_peer(pending.sock, purpose)
            fd = pending.sock.fileno()
            self._epoll.unregister(fd)
            del self._pending[fd]  # first: a relay closes the socket as soon as the peer goes
            sock = _for_frames(pending.stream)
        except BlockingIOError:
            return
        except AuthenticationError as error:
            self._refuse(pending, error.what, now)
        except (OSError, MemoryError) as error:  # with TLS, also no descriptor or thread for it
            self._refuse(pending, f"it went away: {error}", now)
        else:
            yield Accepted(sock, pending.stream, purpose, channel)

    def _refuse(self, pending: _Pending, reason: str, now: float) -> None:
        self._pending.pop(pending.sock.fileno(), None)
        pending.sock.close()  # epoll forgets it
        if text := self.refusals.report(pending.host, reason, now):
            self._on_refused(text)
