"""HTTPS: streams, a certificate that is loaded again, clients that speak no TLS."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from lucevisor.api.server import create_app, listen, serve
from lucevisor.config import server_context
from tests.api.scripted_model import Rig
from tests.certificates import make_certificate

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.fixture
async def server(tmp_path: Path):
    """(URL, context of the server, directory with its pair)"""
    context = server_context(*make_certificate(tmp_path))
    runner, url = await serve(create_app(Rig().context), listen("127.0.0.1", 0), context)
    yield url, context, tmp_path
    await runner.cleanup()


async def shown(url: str) -> str:
    """Digest of the certificate that a new connection is shown."""
    plain = ssl.create_default_context()
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port, ssl=plain)
    digest = hashlib.sha256(writer.get_extra_info("ssl_object").getpeercert(True)).hexdigest()
    writer.close()
    await writer.wait_closed()
    return digest


def digest_of(cert: Path) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert.read_text())).hexdigest()


async def test_a_stream_over_tls(server) -> None:
    url, _, directory = server
    assert url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(directory / "box.crt"))
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=BODY, ssl=trusting) as answer,
    ):
        assert answer.status == 200
        assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_a_certificate_loaded_again_is_shown_to_new_connections_only(server) -> None:
    url, context, directory = server
    trusting = ssl.create_default_context(cafile=str(directory / "box.crt"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        async with session.get(f"{url}/health", ssl=trusting) as answer:
            assert answer.status == 200
        assert await shown(url) == digest_of(directory / "box.crt")
        other = make_certificate(directory, "other")
        context.load_cert_chain(*other)
        assert await shown(url) == digest_of(other[0])
        async with session.get(f"{url}/health", ssl=trusting) as answer:  # the connection of before
            assert answer.status == 200


async def test_a_client_without_tls_gets_no_answer_and_others_theirs(server, caplog) -> None:
    url, _, _ = server
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert not (await reader.read()).startswith(b"HTTP/")
    writer.close()
    assert await shown(url)
    assert caplog.records == []
