"""Requests as bytes on a real socket: whatever they are, whole answers below 500 in the promised shape, no traceback.

Heads that are right with bodies that are not; heads that are broken; pipelines, chunks, and what proxies smuggle with.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import socket
from collections import deque

import pytest
import structlog
from aiohttp.http_exceptions import HttpProcessingError

from tests.api.conftest import Live
from tests.api.scripted_model import Rig, dice
from tests.fuzz.http_requests import (
    CHAT,
    HEAD,
    HEADERS,
    METHODS,
    PATHS,
    raw_request,
    with_body,
)
from tests.fuzz.steady import amounts, run

STATUS = re.compile(rb"HTTP/\d\.\d (\d{3}) [ -~]*\r\n")  # aiohttp says the version that it was asked in
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\t -~\x80-\xff]*)\r\n")


class Cut(Exception):
    """The bytes end inside an answer."""


def answer(data, at, *, bodiless=False):
    """(status, headers, body, end) of the answer that begins there; AssertionError when it is not well-formed HTTP."""
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        raise Cut
    line = STATUS.match(data, at)
    assert line, data[at : at + 200]
    headers, place = {}, line.end()
    while place < end + 2:
        field = FIELD.match(data, place)
        assert field, data[place : place + 200]
        assert field[1].lower() not in headers or field[1].lower() == b"vary", field[1]
        headers[field[1].lower()] = field[2]
        place = field.end()
    start, status = end + 4, int(line[1])
    if status in (100, 204, 304) or bodiless:
        return status, headers, b"", start
    if headers.get(b"transfer-encoding") == b"chunked":
        body = b""
        while True:
            stop = data.find(b"\r\n", start)
            if stop < 0:
                raise Cut
            n = int(data[start:stop], 16)
            if len(data) < stop + n + 4:
                raise Cut
            body, start = body + data[stop + 2 : stop + 2 + n], stop + n + 4
            if n == 0:
                return status, headers, body, start
    assert b"content-length" in headers, headers
    n = int(headers[b"content-length"])
    if len(data) < start + n:
        raise Cut
    return status, headers, data[start : start + n], start + n


def check(status, headers, body):
    """An answer is one of those that the contract names."""
    assert status < 500, (status, body)
    kind = headers.get(b"content-type", b"")
    if status >= 400 and body:
        assert kind.startswith(b"application/json"), (status, headers, body)
        assert len(body) < 12_000
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert b"Traceback" not in body
    elif kind.startswith(b"application/json"):
        json.loads(body, parse_constant=pytest.fail)
    elif kind.startswith(b"text/event-stream"):
        assert body.endswith(b"data: [DONE]\n\n") or b'"error"' in body


LOGGERS = [logging.getLogger(name) for name in ("aiohttp", "asyncio", "lucevisor")]


class Server:
    """A server in this process, whose errors in the log are gathered."""

    def __init__(self):
        self.faults: list[str] = []
        self._configuration = structlog.get_config()
        self._handler = logging.Handler(logging.ERROR)
        self._handler.emit = self._record
        for logger in LOGGERS:  # pytest keeps every record that gets to the root, with the frames of its traceback
            logger.addHandler(self._handler)
            logger.propagate = False
        structlog.configure(processors=[self._note], cache_logger_on_first_use=False)
        self.live = Live(Rig)
        self.live.do(lambda rig: setattr(rig.stage, "script", dice))
        self.live.do(lambda rig: setattr(rig.stage, "opened", deque(maxlen=1)))  # else the rig keeps every prompt
        host, _, port = self.live.url.removeprefix("http://").partition(":")
        self.address = (host, int(port))
        self.kept: socket.socket | None = None

    def _record(self, record):
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):  # of bytes that are no HTTP: tested elsewhere
            self.faults.append(f"{record.getMessage()} {error!r}"[:500])

    def _note(self, logger, method, event):
        if method in ("error", "exception", "critical"):
            self.faults.append(str(event)[:500])
        raise structlog.DropEvent

    def connect(self, timeout_s):
        sock = socket.create_connection(self.address, timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def close(self):
        if self.kept is not None:
            self.kept.close()
        self.live.close()
        for logger in LOGGERS:
            logger.removeHandler(self._handler)
            logger.propagate = True
        structlog.configure(**self._configuration)


@pytest.fixture(scope="module")
def server():
    one = Server()
    yield one
    one.close()


def good_head(server, rng):
    """A request that is whole, on a connection that is kept: it must be answered, and the connection stay in step."""
    data, got = with_body(rng), b""
    sock = server.kept or server.connect(20)
    server.kept = None
    sock.sendall(data)
    while True:
        piece = sock.recv(1 << 16)
        assert piece or got, "closed without an answer"
        got += piece
        try:
            status, headers, body, end = answer(got, 0)
        except Cut:
            assert piece, f"closed inside an answer: {got[-200:]}"
            continue
        break
    check(status, headers, body)
    assert end == len(got), "more than one answer"
    if headers.get(b"connection") == b"close":
        sock.close()
    else:
        server.kept = sock
    return str(status)


def broken_head(server, data):
    """A request that may be anything: what answers come are well-formed."""
    got = b""
    with server.connect(0.04) as sock, contextlib.suppress(TimeoutError, ConnectionError):
        sock.sendall(data)
        while piece := sock.recv(1 << 16):
            got += piece
            with contextlib.suppress(Cut):
                if not data.startswith(b"HEAD ") and answer(got, 0)[3] == len(got):
                    sock.settimeout(0.005)
    at, outcome = 0, ""
    bodiless = b"HEAD " in data
    while at < len(got):
        try:
            status, headers, body, at = answer(got, at, bodiless=bodiless)
        except Cut:
            break
        if bodiless:  # which of a pipeline's answers have no body is not known here
            assert status < 500
            return f"HEAD {status}"
        check(status, headers, body)
        outcome = outcome or f"broken {status}"
    return outcome or "no answer"


def case(server, rng):
    outcome = good_head(server, rng) if rng.random() < 0.6 else broken_head(server, raw_request(rng))
    assert not server.faults, server.faults
    return outcome


def test_each_odd_part_alone(server):
    """Every method, path and header of the lists above once, and frames that proxies and servers read differently."""
    body = json.dumps(CHAT).encode()
    tail = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
    whole = b"Content-Length: %d\r\n\r\n" % len(body) + body
    start = b"POST /v1/chat/completions HTTP/1.1\r\n" + tail
    odd = [f"{method} /health HTTP/1.1\r\n".encode() + tail + b"\r\n" for method in METHODS]
    odd += [f"GET {path} HTTP/1.1\r\n".encode("latin-1") + tail + b"\r\n" for path in PATHS]
    odd += [start + header.encode("latin-1") + b"\r\n" + whole for header in HEADERS]
    odd += [
        start + b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)) + whole,
        start + b"X: " + b"h" * 10**6 + b"\r\n" + whole,
    ]
    odd += [start + b"Transfer-Encoding: chunked\r\n" + whole, start + b"Content-Length: 3\r\n" + whole]
    odd += [
        start.replace(b"1.1", b"1.0") + whole,
        b"\r\n\r\n" + start + whole,
        b"\0" * 1000,
        b"\x16\x03\x01\x02\0\x01" * 50,
    ]
    odd += [
        HEAD.format("/detokenize", len(ids) + 13).encode() + b'{"tokens": [' + ids + b"]"
        for ids in (b"1e999", b"9" * 400)
    ]
    for ids in (
        b"2147483648",
        b"-1",
        b"18446744073709551616",
        b"1.5",
        b"true",
        b'"1"',
        b"null",
        b"9" * 5000,
        b"1," * 9999 + b"1",
    ):
        raw = b'{"tokens": [' + ids + b"]}"
        odd.append(HEAD.format("/detokenize", len(raw)).encode() + raw)
    for text in (b"null", b"1", b"[]", b'["a"]', b'{"a": 1}', b"true", b'"\\ud800"', b'"\\u0000"'):
        raw = b'{"content": ' + text + b"}"
        odd.append(HEAD.format("/tokenize", len(raw)).encode() + raw)
    for data in odd:
        broken_head(server, data)
        assert not server.faults, (data[:200], server.faults)
        assert good_head(server, random.Random("still serves")).isdigit()


@pytest.mark.parametrize("n", amounts(500, 100_000))
def test_requests(server, n):
    outcomes = run("http", n, lambda rng: case(server, rng), growth_kib=24 << 10)
    assert {"200", "400", "broken 400", "broken 404"} <= outcomes.keys()
    deadline = 200
    while server.live.do(lambda rig: rig.n_busy) and deadline:
        deadline -= 1
    assert server.live.do(lambda rig: rig.n_busy) == 0
    assert good_head(server, random.Random("last"))
