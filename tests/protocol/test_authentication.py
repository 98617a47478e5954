"""Mutual authentication: who has no secret learns nothing, gets nothing, and costs little."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.protocol import tcp
from lucevisor.protocol.authentication import (
    CHALLENGE_BYTES,
    MAC_BYTES,
    NO_CHANNEL,
    RESPONSE_BYTES,
    AuthenticationError,
    ClientHandshake,
    Purpose,
    ServerHandshake,
    key_of,
)
from lucevisor.protocol.tcp import (
    AUTHENTICATE_S,
    LOOPBACK,
    Accepted,
    Acceptor,
    Credentials,
    Refusals,
    connect,
    local_address,
)
from lucevisor.protocol.tls import TlsStream, relay
from tests.certificates import make_certificate
from tests.combinations import slow
from tests.waiting import wait_until

KEY, OTHER = bytes(range(32)), bytes(32)
OURS, THEIRS = Credentials(KEY), Credentials(OTHER)
CHANNEL = b"c" * 16


class Listening:
    """An acceptor that serves in a thread."""

    def __init__(self, wanted: set[bytes], credentials: Credentials = OURS) -> None:
        self.accepted: list[Accepted] = []
        self.refused: list[str] = []
        self.wanted = wanted
        self.acceptor = Acceptor(
            LOOPBACK, 0, credentials, lambda _, channel: channel in self.wanted, self.refused.append
        )
        self.thread = threading.Thread(target=self.acceptor.serve, args=(self.accepted.append,))
        self.thread.start()

    @property
    def address(self) -> str:
        return self.acceptor.address

    def raw(self) -> socket.socket:
        host, _, port = self.address.partition(":")
        sock = socket.create_connection((host, int(port)))
        sock.settimeout(100)
        return sock


@contextmanager
def listening(*wanted: bytes, credentials: Credentials = OURS) -> Iterator[Listening]:
    one = Listening(set(wanted), credentials)
    try:
        yield one
    finally:
        one.acceptor.stop()
        one.thread.join(100)
        assert not one.thread.is_alive()
        for accepted in one.accepted:
            accepted.sock.close()


def ended(sock: socket.socket) -> bool:
    """Whether the other end sends nothing more but the end."""
    with suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def receive(sock: socket.socket, n_bytes: int) -> bytes:
    return sock.recv(n_bytes, socket.MSG_WAITALL)


def test_both_ends_get_a_connection_for_one_purpose() -> None:
    with listening(CHANNEL) as server:
        client = connect(server.address, OURS, Purpose.HEARTBEAT, CHANNEL)
        wait_until(lambda: server.accepted)
        [accepted] = server.accepted
        assert (accepted.purpose, accepted.channel) == (Purpose.HEARTBEAT, CHANNEL)
        client.sendall(b"frames")
        wait_until(lambda: accepted.sock.recv(10, socket.MSG_PEEK) == b"frames")
        assert not server.refused
        for sock in (client, accepted.sock):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        client.close()


def test_addresses_of_ipv6() -> None:
    accepted: list[Accepted] = []
    try:
        acceptor = Acceptor("::1", 0, OURS, lambda *_: True, lambda _: None)
    except OSError as error:
        pytest.skip(f"no loopback interface with IPv6: {error}")
    thread = threading.Thread(target=acceptor.serve, args=(accepted.append,))
    thread.start()
    assert local_address(acceptor.address) == "::1"
    connect(acceptor.address, OURS, Purpose.ROWS).close()
    wait_until(lambda: accepted)
    accepted[0].sock.close()
    acceptor.stop()
    thread.join(100)


def test_a_wrong_secret_is_refused_by_the_server_and_an_impostor_by_the_client() -> None:
    with listening(NO_CHANNEL) as server:
        with pytest.raises(AuthenticationError, match="refused this end"):
            connect(server.address, THEIRS, Purpose.ROWS)
        wait_until(lambda: server.refused)
        assert "127.0.0.1: it does not have the same secret" in server.refused[0]
        assert not server.accepted
    client = ClientHandshake(KEY, Purpose.LINK)
    impostor = ServerHandshake(OTHER)
    response = client.respond(impostor.challenge)
    with pytest.raises(AuthenticationError, match="same secret"):
        client.check(impostor.confirm(response))


def test_a_recorded_exchange_is_no_answer_to_another_challenge() -> None:
    with listening(CHANNEL) as server:
        with server.raw() as sock:
            client = ClientHandshake(KEY, Purpose.LINK, CHANNEL)
            response = client.respond(receive(sock, CHALLENGE_BYTES))
            sock.sendall(response)
            confirmation = receive(sock, MAC_BYTES)
            client.check(confirmation)
        with server.raw() as sock:
            receive(sock, CHALLENGE_BYTES)
            sock.sendall(response)
            assert ended(sock)
        assert len(server.accepted) == 1
        later = ClientHandshake(KEY, Purpose.LINK, CHANNEL)
        later.respond(ServerHandshake(KEY).challenge)
        with pytest.raises(AuthenticationError):
            later.check(confirmation)


def test_a_reflected_challenge_is_no_answer() -> None:
    """Neither what the server sent, nor what a client with the secret makes of it for another purpose or end."""
    with listening(CHANNEL) as server:
        with server.raw() as sock:
            challenge = receive(sock, CHALLENGE_BYTES)
            sock.sendall(challenge + challenge + challenge[: RESPONSE_BYTES - 2 * CHALLENGE_BYTES])
            assert ended(sock)
        with server.raw() as first, server.raw() as second:
            theirs = receive(first, CHALLENGE_BYTES)
            receive(second, CHALLENGE_BYTES)
            second.sendall(ClientHandshake(KEY, Purpose.LINK, CHANNEL).respond(theirs))  # answers the first
            assert ended(second)
        assert not server.accepted
    handshake = ServerHandshake(KEY)
    response = ClientHandshake(KEY, Purpose.LINK, CHANNEL).respond(handshake.challenge)
    for at in range(RESPONSE_BYTES):  # every byte counts, the purpose and the channel among them
        changed = bytearray(response)
        changed[at] ^= 1
        with pytest.raises(AuthenticationError):
            handshake.request(bytes(changed))
    assert handshake.confirm(response) != response[-MAC_BYTES:]  # a MAC is for one role
    with pytest.raises(AuthenticationError):
        ServerHandshake(KEY, binding=b"another certificate").request(response)


def test_another_version_is_refused_by_both_ends_with_its_number() -> None:
    with listening(CHANNEL) as server:
        with server.raw() as sock:
            receive(sock, CHALLENGE_BYTES)
            sock.sendall(b"LVAU" + struct.pack("<H", 7))
            assert ended(sock)
        wait_until(lambda: server.refused)
        assert "version 7 of this authentication, not 1" in server.refused[0]
    with pytest.raises(AuthenticationError, match="version 9"):
        ClientHandshake(KEY, Purpose.LINK).respond(b"LVAU" + struct.pack("<H", 9) + bytes(34))


def test_an_authentic_connection_that_nothing_awaits_is_refused() -> None:
    with listening(CHANNEL) as server:
        with pytest.raises(AuthenticationError, match="refused this end"):
            connect(server.address, OURS, Purpose.LINK, b"x" * 16)
        wait_until(lambda: server.refused)
        assert "nothing expects its connection for link" in server.refused[0]


def test_who_only_waits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "AUTHENTICATE_S", 0.5)
    with listening(CHANNEL) as server, server.raw() as silent:
        receive(silent, CHALLENGE_BYTES)
        assert ended(silent)
        wait_until(lambda: server.refused)
        assert server.refused == ["127.0.0.1: it has not authenticated within 0.5 s"]


def test_who_holds_all_places_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections of the daemon's own address, and always another one for each that is closed."""
    monkeypatch.setattr(tcp, "MAX_PENDING", 32)
    with listening(CHANNEL) as server:
        silent = [server.raw() for _ in range(32)]
        wait_until(lambda: all(len(sock.recv(100, socket.MSG_PEEK)) == CHALLENGE_BYTES for sock in silent))
        stopping = threading.Event()

        def hold() -> None:
            while not stopping.is_set():
                for i, sock in enumerate(silent):
                    sock.setblocking(False)
                    with suppress(BlockingIOError, ConnectionError):
                        while sock.recv(100):
                            pass
                        sock.close()
                        silent[i] = server.raw()
                stopping.wait(0.01)

        holder = threading.Thread(target=hold)
        holder.start()
        started_at = time.monotonic()
        try:
            connect(server.address, OURS, Purpose.LINK, CHANNEL).close()
            assert time.monotonic() - started_at < AUTHENTICATE_S / 2
        finally:
            stopping.set()
            holder.join()
            for sock in silent:
                sock.close()
        wait_until(lambda: server.refused)
        assert server.refused == ["127.0.0.1: too many of its connections have not authenticated"]


def test_where_all_places_are_held_the_address_that_has_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_PENDING", 4)
    acceptor = Acceptor(LOOPBACK, 0, OURS, lambda *_: True, lambda _: None)
    host, _, port = acceptor.address.partition(":")
    sources = ["127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4", "127.0.0.5"]
    with ExitStack() as stack:
        stack.callback(acceptor.close)
        for source in sources:
            stack.enter_context(socket.create_connection((host, int(port)), source_address=(source, 0)))
            list(acceptor.process())
        assert sorted(pending.host for pending in acceptor._pending.values()) == sorted({*sources})


def test_without_descriptors_the_acceptor_waits_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    acceptor = Acceptor(LOOPBACK, 0, OURS, lambda *_: True, lambda _: None)
    host, _, port = acceptor.address.partition(":")
    with socket.create_connection((host, int(port))) as client:
        real = acceptor._server

        class Short:
            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

            def accept(self) -> None:
                raise OSError(24, "too many open files")

        acceptor._server = Short()  # type: ignore[assignment]
        assert [*acceptor.process()] == []
        wait_s = acceptor.wait_s
        assert wait_s is not None
        assert 0.0 < wait_s < 1.1
        assert acceptor._epoll.poll(0) == []  # though somebody waits
        acceptor._server = real
        acceptor._paused_until = 0.0
        assert [*acceptor.process()] == []
        wait_until(lambda: [*acceptor.process()] or len(client.recv(100, socket.MSG_PEEK)) == CHALLENGE_BYTES)
    acceptor.close()
    acceptor.close()


def test_reports_of_refused_peers_are_few_and_cost_no_memory() -> None:
    refusals, now = Refusals(), 0.0
    texts = [text for _ in range(1000) if (text := refusals.report("10.0.0.9", "no secret", now))]
    assert texts == ["10.0.0.9: no secret"]
    assert refusals.report("10.0.0.9", "no secret", 61.0) == "10.0.0.9: no secret; 999 more were refused before"
    lines = 0
    for i in range(100_000):
        now = 100.0 + i / 1000
        lines += bool(refusals.report(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", "no secret", now))
    assert lines <= 30  # ten a minute, of 100 s
    assert refusals.n_refused == 101_001
    assert len(refusals._next) <= 256
    assert len(refusals._reports) <= 10


@given(st.binary(max_size=200))
def test_no_bytes_are_a_response_or_a_challenge(noise: bytes) -> None:
    handshake = ServerHandshake(KEY)
    with pytest.raises(AuthenticationError):
        handshake.request(noise)
    client = ClientHandshake(KEY, Purpose.LINK)
    with pytest.raises(AuthenticationError):
        client.respond(noise.ljust(CHALLENGE_BYTES, b"\0"))


def test_keys_have_a_least_length_and_white_space_around_them_is_none() -> None:
    assert key_of(b" " + KEY.hex().encode() + b"\n") == KEY.hex().encode()
    with pytest.raises(ValueError, match="holds 31 bytes, not 32 to 4096"):
        key_of(b"x" * 31 + b"\n")
    with pytest.raises(ValueError, match="holds 4097"):
        key_of(b"x" * 4097)


@pytest.mark.parametrize("n_connections", [2_000, slow(100_000)], ids=str)
def test_noise_on_the_port_is_refused_in_flat_memory(n_connections: int) -> None:
    rng = random.Random(5)
    before = 0
    with listening(CHANNEL) as server:
        for i in range(n_connections):
            if i == n_connections // 4:
                before = psutil.Process().memory_info().rss
            noise = rng.randbytes(rng.randrange(200))
            if i % 3 == 0:  # frames that begin as they should
                noise = b"LVAU\1\0"[: rng.randrange(7)] + noise
            elif i % 3 == 1:
                noise = b"LVSR\1\0" + noise
            with server.raw() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
                with suppress(OSError):  # it was closed before the end
                    sock.sendall(noise)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
        wait_until(lambda: server.acceptor.refusals.n_refused >= n_connections * 0.99)
        client = connect(server.address, OURS, Purpose.LINK, CHANNEL)
        client.close()
        wait_until(lambda: len(server.accepted) == 1)
        assert psutil.Process().memory_info().rss - before < 8 << 20
        assert len(server.refused) < 20
        assert len(os.listdir("/proc/self/fd")) < 200


# ---- TLS


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.of(KEY, *map(str, make_certificate(tmp_path_factory.mktemp("tls"))))


def test_over_tls_frames_pass_in_both_directions_and_ends_are_seen(encrypted: Credentials) -> None:
    data = random.Random(1).randbytes(3 << 20)
    with listening(CHANNEL, credentials=encrypted) as server:
        client = connect(server.address, encrypted, Purpose.LINK, CHANNEL)
        wait_until(lambda: server.accepted)
        [accepted] = server.accepted
        assert accepted.tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for one, other in ((client, accepted.sock), (accepted.sock, client)):
            sender = threading.Thread(target=one.sendall, args=(data,))
            sender.start()
            assert receive(other, len(data)) == data
            sender.join()
        client.shutdown(socket.SHUT_RD)  # as a daemon that ends in order: what it still writes arrives
        accepted.sock.sendall(b"too late")
        client.sendall(b"last words")
        assert receive(accepted.sock, 10) == b"last words"
        client.close()
        assert ended(accepted.sock)
        assert not server.refused


def test_over_tls_an_acceptor_without_descriptors_for_a_connection_goes_on(encrypted: Credentials) -> None:
    with listening(CHANNEL, credentials=encrypted) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        tls = encrypted.tls
        assert tls is not None
        with server.raw() as sock:
            stream = tls.connect(sock)
            handshake = ClientHandshake(KEY, Purpose.LINK, CHANNEL, tls.binding)
            response = handshake.respond(stream.recv(CHALLENGE_BYTES))
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                stream.send(response)
                wait_until(lambda: server.refused)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in server.refused[0]
        connect(server.address, encrypted, Purpose.LINK, CHANNEL).close()


def test_over_tls_a_peer_that_is_gone_once_it_has_authenticated_ends_no_acceptor(
    encrypted: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relayed_to_the_end(stream: TlsStream) -> socket.socket:
        inner = relay(stream)
        wait_until(lambda: stream.sock.fileno() == -1)
        return inner

    monkeypatch.setattr("lucevisor.protocol.tls.relay", relayed_to_the_end)
    with listening(CHANNEL, credentials=encrypted) as server:
        tls = encrypted.tls
        assert tls is not None
        with server.raw() as sock:
            stream = tls.connect(sock)
            handshake = ClientHandshake(KEY, Purpose.LINK, CHANNEL, tls.binding)
            stream.send(handshake.respond(stream.recv(CHALLENGE_BYTES)))
        wait_until(lambda: server.accepted)
        monkeypatch.undo()
        connect(server.address, encrypted, Purpose.LINK, CHANNEL).close()


def test_over_tls_all_arrives_that_a_peer_sent_before_it_was_lost(encrypted: Credentials) -> None:
    """Also what was not read by then, and without a loop that waits for nothing."""
    data = random.Random(2).randbytes(500_000)
    with relayed(encrypted) as (peer, inner):
        peer.sock.setblocking(False)
        peer.send(data)
        wait_until(lambda: peer.flush() or (not peer.has_unsent and not unacknowledged(peer.sock)))
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sock.close()  # a reset
        assert_idle()
        inner.sendall(b"to nobody")
        assert receive(inner, len(data)) == data
        assert ended(inner)


def test_over_tls_the_end_of_a_connection_whose_peer_reads_nothing_costs_nothing(encrypted: Credentials) -> None:
    with relayed(encrypted) as (_, inner):
        inner.setblocking(False)
        sent_at = time.monotonic()
        while time.monotonic() - sent_at < 0.5:
            with suppress(BlockingIOError):
                inner.send(bytes(1 << 16))
                sent_at = time.monotonic()
            time.sleep(0.001)
        inner.close()
        assert_idle()


@contextmanager
def relayed(credentials: Credentials) -> Iterator[tuple[TlsStream, socket.socket]]:
    """A peer, and the inner socket of the connection to it."""
    tls = credentials.tls
    assert tls is not None
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as sock:
        peer, accepted = tls.connect(sock), tls.accept(server.accept()[0])
        greeting = threading.Thread(target=lambda: peer.send(b"x") if peer.handshake() is None else None)
        greeting.start()
        assert accepted.recv(1) == b"x"
        greeting.join()
        with relay(accepted) as inner:
            yield peer, inner


def unacknowledged(sock: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def assert_idle() -> None:
    """This process comes to rest, as it would not with a loop that waits for nothing."""

    def cpu_share(seconds: float) -> float:
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds

    assert any(cpu_share(0.3) < 0.3 for _ in range(20))


def test_plain_and_encrypted_ends_refuse_each_other_and_so_does_another_certificate(
    encrypted: Credentials, tmp_path: Path
) -> None:
    with listening(CHANNEL, credentials=encrypted) as server:
        with server.raw() as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while not ended(sock):
                pass
        wait_until(lambda: server.refused)
        assert "it went away: [SSL" in server.refused[0]
    with listening(CHANNEL) as plain, pytest.raises(OSError, match="SSL"):
        connect(plain.address, encrypted, Purpose.LINK, CHANNEL)
    # Who relays between two ends shows each a certificate of his own, or none that he can use.
    impostor = Credentials.of(OTHER, *map(str, make_certificate(tmp_path)))
    with listening(CHANNEL, credentials=impostor) as relay, pytest.raises(AuthenticationError):
        connect(relay.address, encrypted, Purpose.LINK, CHANNEL)
    assert impostor.tls is not None
    assert encrypted.tls is not None
    assert impostor.tls.binding != encrypted.tls.binding
    handshake = ServerHandshake(KEY, encrypted.tls.binding)
    with pytest.raises(AuthenticationError):
        handshake.request(
            ClientHandshake(KEY, Purpose.LINK, CHANNEL, impostor.tls.binding).respond(handshake.challenge)
        )
