"""Clients that send half a request, take no answer, come in thousands or speak no HTTP, on real sockets over uvloop."""

from __future__ import annotations

import json
import logging
import resource
import select
import socket
import time
import urllib.request

import pytest
from structlog.testing import capture_logs

from lucevisor.api.contexts import ApiSettings
from lucevisor.config import ApiKey
from tests.api.scripted_model import Rig
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_dialled = []


def dial(server, sent=b"", rcvbuf=0):
    sock = socket.socket()
    _dialled.append(sock)
    if rcvbuf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    host, _, port = server.url.removeprefix("http://").partition(":")
    sock.settimeout(120)
    sock.connect((host, int(port)))
    if sent:
        sock.sendall(sent)
    return sock


def post(body, path=CHAT, n_bytes=None, version="1.1", close=False):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n" if close else ""
    return (head + f"Content-Length: {n_bytes or len(data)}\r\n\r\n").encode() + data


def read_all(sock):
    """What comes until the server closes."""
    got = b""
    try:
        while data := sock.recv(65536):
            got += data
    except ConnectionResetError:
        pass
    return got


def read_one(sock):
    """One answer with a length."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    n = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    while len(body) < n:
        body += sock.recv(65536)
    return head, body


def metric(server, line):
    with urllib.request.urlopen(server.url + "/metrics", timeout=120) as answer:
        for one in answer.read().decode().splitlines():
            if one.startswith(f"lucevisor_{line} "):
                return float(one.rpartition(" ")[2])
    return 0.0


def dropped(server, reason):
    return metric(server, f'connections_dropped_total{{reason="{reason}"}}')


@pytest.fixture
def serve(live):
    """Start a server with settings: `server = serve(head_timeout_s=0.2)`; its clients hang up before it ends."""
    yield lambda **settings: live(lambda: Rig(settings=ApiSettings(**settings)))
    while _dialled:
        _dialled.pop().close()


class TestHeads:
    def test_one_that_never_ends_is_refused_however_it_drips(self, serve):
        server = serve(head_timeout_s=0.3)
        sock = dial(server, b"GET /health HTTP/1.1\r\n")
        answer = b""
        end = time.monotonic() + 100
        while not answer:
            assert time.monotonic() < end
            sock.sendall(b"x-a: b\r\n")
            if select.select([sock], [], [], 0.02)[0]:
                answer = read_all(sock)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert dropped(server, "head") == 1

    def test_silence_is_closed(self, serve):
        server = serve(head_timeout_s=0.2)
        assert read_all(dial(server)) == b""
        assert dropped(server, "head") == 1

    def test_a_later_one_has_the_same_deadline(self, serve):
        server = serve(head_timeout_s=1.5, idle_timeout_s=100)
        sock = dial(server, HEALTH)
        assert read_one(sock)[0].startswith(b"HTTP/1.1 200 ")
        time.sleep(1.8)  # idle for longer than a head may take
        sock.sendall(HEALTH + b"GET /health HT")
        assert read_one(sock)[0].startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"TP/1.1\r\nHost: localhost\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_an_idle_connection_is_closed(self, serve):
        server = serve(idle_timeout_s=0.2)
        sock = dial(server, HEALTH)
        read_one(sock)
        assert read_all(sock) == b""
        assert dropped(server, "idle") == 1


class TestBodies:
    @pytest.mark.parametrize("path", [CHAT, "/admin/restart"])
    def test_one_that_does_not_end_is_given_up(self, serve, path):
        server = serve(body_timeout_s=0.2)
        server.do(lambda rig: rig.context.server.admin_keys.replace([ApiKey("secret")]))
        request = post(BODY, path, n_bytes=100_000).replace(b"\r\n", b"\r\nx-api-key: secret\r\n", 1)
        head, body = read_one(dial(server, request))
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["message"] == "the body did not arrive within 0.2 s"

    @pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
    def test_one_whose_last_part_fills_the_buffer_is_read(self, serve, chunked):
        """aiohttp's parser stops in the part that does, before the end of the body."""
        server = serve()
        server.do(lambda rig: setattr(rig.context.server, "preprocessor", None))
        length, data = b"Content-Length: 1000000", b"x" * 1_000_000
        request = post(BODY, n_bytes=len(data)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + data
        if chunked:
            request = request.replace(length, b"Transfer-Encoding: chunked").replace(data, b"f4240\r\n%s\r\n" % data)
            request += b"0\r\n\r\n"
        sock = dial(server)
        wait_until(lambda: server.runner.server.connections)
        (connection,) = server.runner.server.connections
        server.do(lambda rig: connection.data_received(request))
        head, body = read_one(sock)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert json.loads(body)["error"]["message"].startswith("the body is larger than 4096 bytes")


class TestUnreadAnswers:
    def test_a_client_that_reads_no_answer_is_dropped(self, serve):
        server = serve(write_timeout_s=0.2)
        sock = dial(server, rcvbuf=4096)
        sock.settimeout(0.2)
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
        try:
            while True:
                sock.sendall(ask)  # until nothing more is taken
        except (TimeoutError, ConnectionError):
            pass
        wait_until(lambda: dropped(server, "write") == 1)
        wait_until(lambda: metric(server, "connections") == 1)  # that of the scrape

    def test_a_stream_that_is_read_by_the_byte_keeps_no_slot_and_delays_nobody(self, serve):
        server = serve(write_timeout_s=0.5)
        # Long events fill the buffers soon: each chunk tells 20 tokens' log-probabilities.
        long = [(300 + i, -0.5) for i in range(20)]
        server.do(lambda rig: setattr(rig.stage, "script", lambda seen: (300, long)))
        ask = post({**BODY, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8})
        with capture_logs() as logs:
            sock = dial(server, ask, rcvbuf=4096)
            assert sock.recv(5) == b"HTTP/"

            def is_over():
                sock.recv(5)
                assert read_one(dial(server, HEALTH))[0].startswith(b"HTTP/1.1 200 ")
                return server.do(lambda rig: rig.n_busy) == 0

            wait_until(is_over)
            wait_until(lambda: metric(server, 'requests_total{code="499"}') == 1)
        (line,) = [entry for entry in logs if entry.get("dropped")]
        assert (line["status"], line["dropped"]) == (499, "the client read less than 16 KiB in 0.5 s")

    def test_one_that_reads_slowly_is_not(self, serve):
        server = serve(write_timeout_s=1.5)
        sock = dial(server, rcvbuf=4096)
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        end = time.monotonic() + 3.4
        while time.monotonic() < end:
            assert sock.recv(4096)
            time.sleep(0.02)
        assert dropped(server, "write") == 0


class TestCap:
    def test_two_thousand_half_open_connections_keep_nobody_out(self, serve):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 6000:
            pytest.skip(f"the hard limit of open files is {hard}; 2,000 connections need 6,000 here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6000), hard))
        socks = []
        try:
            server = serve(max_connections=500, head_timeout_s=1.0)
            for i in range(2000):
                socks.append(dial(server, b"GET /health HTTP/1.1\r\nx:"))
                if i % 100 == 99:
                    sock = dial(server, HEALTH)
                    assert read_one(sock)[0].startswith(b"HTTP/1.1 200 ")
                    sock.close()
                    assert metric(server, "connections") <= 500
            answer = read_one(dial(server, post(BODY)))
            assert answer[0].startswith(b"HTTP/1.1 200 ")
            wait_until(lambda: metric(server, "connections") <= 2)
            n_closed = dropped(server, "replaced") + dropped(server, "head")
            assert 2000 <= n_closed <= 2025
            assert dropped(server, "refused") == 0
            assert all(read_all(sock)[:12] in (b"", b"HTTP/1.1 408") for sock in socks)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_requests_in_service_are_never_closed_for_others(self, serve):
        server = serve(max_connections=3)
        server.do(lambda rig: setattr(rig.stage, "held", True))
        asked = [dial(server, post(BODY)) for _ in range(3)]
        wait_until(lambda: server.do(lambda rig: rig.engine.statistics().running + rig.engine.statistics().queued) == 3)
        head, _, body = read_all(dial(server, HEALTH)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        server.do(lambda rig: rig.stage.release())
        assert all(read_one(sock)[0].startswith(b"HTTP/1.1 200 ") for sock in asked)
        assert dropped(server, "refused") == 1  # this scrape replaced one that was idle


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"HELLO\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%%% HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
    b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(200)) + b"\r\n",
    b"GET / HTTP/1.1\r\nx\x00y: z\r\n\r\n",
]
BROKEN_BODY = (
    b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"
)


class TestMalformed:
    @pytest.mark.parametrize("sent", MALFORMED)
    def test_a_refusal_in_json_and_one_log_line_without_a_traceback(self, serve, sent, caplog):
        server = serve()
        with capture_logs() as logs:
            sock = dial(server, sent)
            head, _, body = read_all(sock).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), head
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert b"Traceback" not in body
        assert [entry["event"] for entry in logs] == ["malformed request"]
        assert "\n" not in logs[0]["reason"]
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert metric(server, 'requests_total{code="400"}') == 1

    @pytest.mark.parametrize("target", [b"GET /health", b"POST " + CHAT.encode(), b"POST /nope"])
    def test_a_broken_body(self, serve, target, caplog):
        server = serve(body_timeout_s=0.5)
        with capture_logs() as logs:
            assert read_all(dial(server, target + BROKEN_BODY)).startswith(b"HTTP/1.")
            sock = dial(server, target + BROKEN_BODY[:-6])
            time.sleep(0.1)
            sock.sendall(BROKEN_BODY[-6:])  # alone, as from a client that sends head and body apart
            assert read_one(sock)[0].startswith(b"HTTP/1.1 200 " if b"health" in target else b"HTTP/1.1 4")
        assert not [entry for entry in logs if entry["log_level"] not in ("info", "debug")]
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def expecting(expect, path=CHAT, version="1.1", more=""):
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Expect: {expect}\r\n{more}Content-Length: {len(json.dumps(BODY))}\r\n\r\n".encode()


class TestExpect:
    def test_100_continue_is_obeyed(self, serve):
        sock = dial(serve(), expecting("100-Continue"))
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(json.dumps(BODY).encode())
        assert read_one(sock)[0].startswith(b"HTTP/1.1 200 ")

    def test_http_1_0_does_not_know_it(self, serve):
        sock = dial(serve(), expecting("200-ok", version="1.0") + json.dumps(BODY).encode())
        assert read_all(sock).startswith(b"HTTP/1.0 200 ")


class TestHalfClose:
    def test_half_a_request_is_none(self, serve):
        server = serve()
        for sent in (b"", b"GET /health HTT", post(BODY, n_bytes=5000)):
            sock = dial(server, sent)
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b""
