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
from tests.api.scripted_model import MODEL, Rig, dice
from tests.fuzz.steady import amounts, mutated, run
from tests.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

BODIES = {  # what is odd inside of a body: tests/api/test_fuzz.py
    "/v1/chat/completions": [CHAT, {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2}],
    "/v1/completions": [{"prompt": "Hi", "max_tokens": 2}, {"prompt": ["a", "b"], "max_tokens": 1, "stream": True}],
    "/tokenize": [{"content": "Hi <|im_end|>", "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 8000]}],
}

PATHS = (
    *("/v1/models", f"/v1/models/{MODEL}", "/v1/models/x%2Fy", "/props", "/health", "/ready", "/metrics"),
    *("/openapi.json", "/", "//", "/%00", "/v1/models/%00%ff%f0", "/..%2f..", "*", "http://127.0.0.1/health"),
    *("http://[::1/x", "/a?b=%zz&&=;", "/v1/chat/completions", "/tokenize", "/\u00e9", "/health#f", "?x"),
    *("/health?" + "q" * 3000,),
)

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "PATCH", "PRI", "get", "G T", "")

HEADERS = (
    *("Host: [::1", "Host: a:b:c", "Host:", "Host: \xff\xfe", "Host: 127.0.0.1:99999999", "Host: evil.example"),
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: +5", "Content-Length: 99999999999999999999"),
    *("Content-Length: 0x5", "Content-Length: 5, 5", "Content-Length:", "Transfer-Encoding: chunked"),
    *("Transfer-Encoding: chunked, identity", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: xchunked"),
    *("Transfer-Encoding : chunked", "Content-Encoding: gzip", "Content-Type: text/plain", "Content-Type: ;;;"),
    *("Content-Type: application/json; charset=\xff", "Content-Type: application/json; charset=utf-16"),
    *("Expect: 100-continue", "Expect: 200-ok", "Upgrade: websocket", "Upgrade: h2c", "Connection: upgrade"),
    *("Connection: close", "Connection: keep-alive, x", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"),
    *("HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA", "Accept: application/openmetrics-text;q=;version=zz"),
    *("Accept: */*;q=x", "x-request-id: " + "i" * 300, "x-request-id: a\tb\xff", "x-request-id: \x01"),
    *("x-request-id:", "Origin: null", "Authorization: Bearer", "Authorization: \xff \xfe", "Cookie: a=b; ;="),
    *("Range: bytes=0-", "If-None-Match: *", "no colon", ": no name", " folded", "a b: c", "X: " + "h" * 9000),
    *("X\x00: 1", "X: \r 1", "Y" * 9000 + ": 1"),
)

HEAD = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def body_of(rng, path):
    """JSON of an endpoint, or damaged bytes of it."""
    raw = json.dumps(rng.choice(BODIES[path])).encode()
    return mutated(rng, raw) if rng.random() < 0.4 else raw


def with_body(rng):
    path = rng.choice(list(BODIES))
    raw = body_of(rng, path)
    return HEAD.format(path, len(raw)).encode() + raw


def chunked(rng, raw):
    """A body in chunks, of which the framing may be wrong."""
    out = b""
    while raw:
        n = rng.randint(1, max(1, len(raw)))
        size = (
            rng.choice(
                (b"%x", b"%x", b"%x", b"%x;a=b", b"0%x", b"%d", b"-%x", b"0x%x", b"%xg", b" %x", b"%x" + b"f" * 20)
            )
            % n
        )
        out += (
            size
            + rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n"))
            + raw[:n]
            + rng.choice((b"\r\n", b"\r\n", b"\r\n", b"", b"\n", b"xx"))
        )
        raw = raw[n:]
    return out + rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"", b"0\r\n", b"00\r\n\r\n"))


def raw_request(rng):
    """A head of odd parts and a body that may not fit it."""
    path = rng.choice((*PATHS, *BODIES))
    version = rng.choice(
        (*("HTTP/1.1",) * 6, "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.1 ", "http/1.1", "", "HTTP/1.10")
    )
    lines = [
        f"{rng.choice(METHODS)} {path} {version}",
        "Host: 127.0.0.1",
        *rng.sample(HEADERS, rng.choice((0, 0, 1, 1, 2, 3))),
    ]
    many = rng.random()
    if many < 0.002:
        lines += [f"X-{i}: {i}" for i in range(10_000)]
    elif many < 0.004:
        lines.append("X: " + "h" * 1_000_000)
    raw = body_of(rng, path) if path in BODIES else b"{}"
    if rng.random() < 0.3:
        lines.append("Transfer-Encoding: chunked")
        raw = chunked(rng, raw)
    elif rng.random() < 0.6:
        lines.append(f"Content-Length: {len(raw) + rng.choice((0, 0, 0, 0, -1, 1))}")
    head = rng.choice(("\r\n", "\r\n", "\r\n", "\r\n", "\n")).join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
    if rng.random() < 0.2:
        head = mutated(rng, head)
    if rng.random() < 0.1:
        raw += raw_request(rng) if rng.random() < 0.8 else b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50
    return head + raw


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
    if status >= 400 and status != 417 and body:  # 417 is aiohttp's own, in plain text
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
    sock = server.kept or server.connect(100)
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
    for ids in (b"18446744073709551616", b"9" * 5000, b"1," * 9999 + b"1"):
        raw = b'{"tokens": [' + ids + b"]}"
        odd.append(HEAD.format("/detokenize", len(raw)).encode() + raw)
    for data in odd:
        broken_head(server, data)
        assert not server.faults, (data[:200], server.faults)
        assert good_head(server, random.Random("still serves")).isdigit()


@pytest.mark.parametrize("n", amounts(500, 100_000))
def test_requests(server, n):
    outcomes = run("http", n, lambda rng: case(server, rng), growth_kib=24 << 10)
    assert {"200", "400", "broken 400", "broken 404"} <= outcomes.keys()
    wait_until(lambda: server.live.do(lambda rig: rig.n_busy) == 0)
    assert good_head(server, random.Random("last"))
