"""The supervisor's TCP port on its event loop, which strangers must not stall."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lucevisor.protocol.authentication import Purpose
from lucevisor.protocol.tcp import MAX_PENDING, Credentials, connect
from lucevisor.supervision.listener import Listener
from tests.certificates import make_certificate

MAX_STALL_S = 0.05
"""Of the loop's thread, in time of the processor: that does not depend on what else runs."""


def client_hello() -> bytes:
    context, received, sent = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(received, sent, server_hostname="box")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


async def longest_stall_s(over: asyncio.Event) -> float:
    longest, last = 0.0, time.thread_time()
    while not over.is_set():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("said", [b"", client_hello()[:100], client_hello()], ids=["nothing", "half", "hello"])
async def test_strangers_do_not_stall_the_event_loop_with_tls(tmp_path: Path, said: bytes) -> None:
    """An RSA key of 3,072 bits signs in 1 to 2 ms: all handshakes in one go would take a fifth of a second."""
    files = make_certificate(tmp_path, key_type="rsa:3072")
    credentials = Credentials.of(b"k" * 32, *map(str, files))
    listener, over = Listener("127.0.0.1", 0, credentials), asyncio.Event()
    host, _, port = listener.address.partition(":")
    with ExitStack() as strangers, ExitStack() as on_failure:

        def come() -> None:
            socks = [
                strangers.enter_context(socket.create_connection((host, int(port)))) for _ in range(MAX_PENDING - 1)
            ]
            for sock in socks:
                sock.sendall(said)

        watching = asyncio.create_task(longest_stall_s(over))
        await asyncio.to_thread(come)
        channels = listener.expect(1, on_failure)
        channel = bytes.fromhex(channels.options[0].partition("/")[2])
        link = await asyncio.to_thread(connect, listener.address, credentials, Purpose.LINK, channel)
        link.close()
        over.set()
        assert await watching < MAX_STALL_S
    listener.close()
