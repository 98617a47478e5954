"""Two supervisors' ends of a hand-over, in one process, over a real socket with real descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from lucevisor.app.handover import HandoverOffer, HandoverReply, HandoverRequest, HandoverServer, request_handover
from lucevisor.errors import LucevisorError
from tests.another_user import connect_as_nobody, needs_root, open_directory

ASK = HandoverRequest(pid=7, drain_s=3.0)


class Source:
    """A supervisor without a service."""

    def __init__(self) -> None:
        self.lock = os.open("/dev/null", os.O_RDONLY)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.said: list[object] = []
        self.refuses = ""
        self.may_save = asyncio.Event()

    def offer(self) -> tuple[HandoverReply, list[int]]:
        self.said.append("offer")
        return HandoverReply(os.getpid(), self.refuses, notify_socket="/n"), [self.lock, self.listening.fileno()]

    def on_failed(self) -> None:
        self.said.append("keep")

    def on_served(self, request: HandoverRequest) -> None:
        self.said.append(request)

    async def save(self) -> None:
        await self.may_save.wait()
        self.said.append("save")


@pytest.fixture
async def source(short_path: Path) -> AsyncIterator[Source]:
    n_before = psutil.Process().num_fds()
    one = Source()
    server = HandoverServer(short_path / "handover.sock", one)
    server.open()
    yield one
    await server.close()
    if server.successor is not None:  # the end of its process would close it
        server.successor.close()
    os.close(one.lock)
    one.listening.close()
    assert psutil.Process().num_fds() <= n_before  # garbage of other tests may go meanwhile


async def taken_from(path: Path) -> HandoverOffer:
    taken = await request_handover(path / "handover.sock", ASK)
    assert taken is not None
    return taken


async def test_sockets_lock_and_what_was_saved(source: Source, short_path: Path) -> None:
    taken = await taken_from(short_path)
    assert (taken.reply.pid, taken.reply.notify_socket) == (os.getpid(), "/n")
    assert os.path.samestat(os.fstat(taken.lock), os.fstat(source.lock))
    assert [sock.getsockname() for sock in taken.sockets] == [source.listening.getsockname()]
    assert not any(os.get_inheritable(fd) for fd in (taken.lock, taken.sockets[0].fileno()))
    assert source.said == ["offer"]
    await taken.announce_serving()
    assert source.said == ["offer", ASK]  # the name was given up before what the new one does next
    source.may_save.set()
    saves = taken.wait_for_saves()
    await anext(saves)  # it has saved what it had
    assert source.said == ["offer", ASK, "save"]
    await saves.aclose()
    taken.decline()


async def test_one_that_serves_goes_on_when_the_other_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lucevisor.app.handover.ANSWER_S", 0.05)
    mine, other = socket.socketpair()
    mine.setblocking(False)
    taken = HandoverOffer(mine, HandoverReply(1), [os.open("/dev/null", os.O_RDONLY)])
    with other, capture_logs() as said:
        await taken.announce_serving()
        assert other.recv(16) == b"serving"
    assert "did not confirm that it gave up" in said[0]["event"]
    taken.decline()


async def test_a_successor_that_ends_before_it_serves_changes_nothing(source: Source, short_path: Path) -> None:
    (await taken_from(short_path)).decline()
    taken = await taken_from(short_path)
    assert source.said == ["offer", "keep", "offer"]
    taken.decline()


async def test_a_refusal_is_said(source: Source, short_path: Path) -> None:
    source.refuses = "it is stopping"
    with pytest.raises(LucevisorError, match="not taken over: it is stopping"):
        await taken_from(short_path)
    source.refuses = ""
    (await taken_from(short_path)).decline()


async def test_something_else_than_a_request_gets_no_descriptor(source: Source, short_path: Path) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"pid": 1}', b""):
        reader, writer = await asyncio.open_unix_connection(str(short_path / "handover.sock"))
        writer.write(said)
        if not said:
            writer.close()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert "offer" not in source.said
    (await taken_from(short_path)).decline()


async def test_nobody_is_there(short_path: Path) -> None:
    assert await request_handover(short_path / "handover.sock", ASK) is None
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(short_path / "handover.sock"))
    assert await request_handover(short_path / "handover.sock", ASK) is None


@needs_root
async def test_another_user_gets_no_descriptor() -> None:
    with open_directory() as directory:
        source = Source()
        server = HandoverServer(directory / "handover.sock", source)
        server.open()
        with connect_as_nobody(directory / "handover.sock") as sock:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b'{"pid": 1, "drain_s": 1.0}')
            with contextlib.suppress(ConnectionResetError):  # it does not even read the request
                assert await loop.sock_recv(sock, 4096) == b""
        assert source.said == []
        await server.close()
        os.close(source.lock)
        source.listening.close()
