"""TLS around TCP connections, for networks that others can read or change.

Nobody has to trust the certificate's issuer, or its names: both ends bind its hash into their authentication. A thread
passes bytes between the connection and a socketpair, whose other end is what links use: an SSL object may not be read
and written by two threads at once. Imported where TLS is configured only."""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from lucevisor.protocol.threads import StartedThread

_CHUNK_BYTES: Final = 64 * 1024
_QUEUE_BYTES: Final = 4 * _CHUNK_BYTES  # in each direction, before the sender has to wait
_LINGER_S: Final = 8.0
"""Time that a peer has to take the last bytes."""


class Tls:
    """The certificate of who accepts connections, and what who connects needs.  Raises OSError, ValueError."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.load_cert_chain(cert_file, key_file, password=lambda: "")  # else OpenSSL asks on the terminal
        self._server.num_tickets = 0  # nothing is resumed
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.check_hostname, self._client.verify_mode = False, ssl.CERT_NONE
        for context in (self._server, self._client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        text = Path(cert_file).read_text(encoding="ascii")
        start, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        self.binding: Final = sha256(ssl.PEM_cert_to_DER_cert(text[start:end])).digest()
        """The hash of the own certificate."""

    def accept(self, sock: socket.socket) -> TlsStream:
        return TlsStream(self._server, sock, server_side=True)

    def connect(self, sock: socket.socket) -> TlsStream:
        return TlsStream(self._client, sock, server_side=False)


class TlsStream:
    """One end of a connection, with a socket's methods that are used before frames are sent. They raise OSError."""

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> None:
        self.sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side)
        self._unsent = b""
        self.error: OSError | None = None  # which ended the connection, once it has

    def handshake(self) -> None:
        """Do the handshake; call it again after a BlockingIOError, when ``sock`` is readable."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._receive()
            else:
                self.flush()
                return

    @property
    def peer_binding(self) -> bytes:
        """The hash of the peer's certificate, after the handshake."""
        return sha256(self._tls.getpeercert(binary_form=True) or b"").digest()

    def recv(self, n_bytes: int) -> bytes:
        """Return up to so many bytes; none at the end of the stream."""
        while True:
            try:
                return self._tls.read(n_bytes)
            except ssl.SSLWantReadError:
                self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    def send(self, data: bytes) -> int:
        """Take all of the bytes, and send what the socket takes now."""
        if data:
            self._tls.write(data)
        self.flush()
        return len(data)

    sendall = send

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) or self._out.pending > 0

    @property
    def is_full(self) -> bool:
        """True while so much waits to be sent that no more should be taken."""
        return len(self._unsent) + self._out.pending > _QUEUE_BYTES

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.has_unsent:
            self._unsent = self._unsent or self._out.read(_CHUNK_BYTES)
            try:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except BlockingIOError:
                return

    def drop(self) -> None:
        """Forget what is not sent yet."""
        self._unsent = b""
        self._out.read()

    def _receive(self) -> None:
        self.flush()
        if data := self.sock.recv(_CHUNK_BYTES):
            self._in.write(data)
        else:
            self._in.write_eof()


def relay(stream: TlsStream) -> socket.socket:
    """Return a socket for the frames of a connection; a thread passes them on until either side ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stream.sock.setblocking(False)
    StartedThread("tls", partial(_relay, stream, ours))
    return theirs


def _relay(stream: TlsStream, inner: socket.socket) -> None:
    received, ended = bytearray(), False
    with suppress(OSError), stream.sock, inner:  # the end of either is that of the other
        while not ended or received:
            outer_events = select.POLLIN if len(received) < _QUEUE_BYTES and not ended else 0
            inner_events = select.POLLIN if not stream.is_full else 0
            ready = _wait(
                (stream.sock, outer_events | (select.POLLOUT if stream.has_unsent else 0)),
                (inner, inner_events | (select.POLLOUT if received else 0)),
            )
            data = b""
            if ready.get(inner.fileno(), 0) & (select.POLLIN | select.POLLHUP) and inner_events:
                data = inner.recv(_CHUNK_BYTES)
                if not data:
                    stream.sock.settimeout(_LINGER_S)
                    stream.flush()
                    return
            try:
                stream.send(data)
            except OSError as error:  # it is gone; what it sent before comes first
                stream.error = error
                stream.drop()
            with suppress(BlockingIOError):
                while len(received) < _QUEUE_BYTES and not ended:
                    data = _receive(stream)
                    received += data
                    ended = not data
            with suppress(BlockingIOError):
                if received:
                    del received[: _send(inner, received)]


def _wait(*wanted: tuple[socket.socket, int]) -> dict[int, int]:
    """Wait for events of sockets; one of which nothing is wanted, not even its end, would wake at once."""
    poll = select.poll()
    for sock, events in wanted:
        if events:
            poll.register(sock, events)
    return dict(poll.poll())


def _receive(stream: TlsStream) -> bytes:
    """Receive; an error is the end, and kept.  Raises BlockingIOError."""
    try:
        return stream.recv(_CHUNK_BYTES)
    except BlockingIOError:
        raise
    except OSError as error:
        stream.error = stream.error or error
        return b""


def _send(inner: socket.socket, data: bytearray) -> int:
    """Send to who may read no more, but still write its last frames."""
    try:
        return inner.send(data)
    except BrokenPipeError:
        return len(data)
