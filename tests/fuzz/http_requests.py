"""Random HTTP requests, valid and broken, for the fuzz test of the server."""

from __future__ import annotations

import json

from tests.api.scripted_model import MODEL
from tests.fuzz.steady import mutated

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODIES = {  # what is odd inside of a body: tests/api/test_fuzz.py
    "/v1/chat/completions": [CHAT, {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2}],
    "/v1/completions": [{"prompt": "Hi", "max_tokens": 2}, {"prompt": ["a", "b"], "max_tokens": 1, "stream": True}],
    "/tokenize": [{"content": "Hi <|im_end|>", "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 8000]}],
}
PATHS = (
    *(
        "/v1/models",
        f"/v1/models/{MODEL}",
        "/v1/models/x%2Fy",
        "/props",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
    ),
    *(
        "/",
        "//",
        "/%00",
        "/v1/models/%00%ff%f0",
        "/..%2f..",
        "*",
        "http://127.0.0.1/health",
        "http://[::1/x",
        "/a?b=%zz&&=;",
    ),
    *("/v1/chat/completions", "/tokenize", "/\u00e9", "/health#f", "?x", "/health?" + "q" * 3000),
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
    *(
        "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
        "Accept: application/openmetrics-text;q=;version=zz",
        "Accept: */*;q=x",
    ),
    *("x-request-id: " + "i" * 300, "x-request-id: a\tb\xff", "x-request-id: \x01", "x-request-id:", "Origin: null"),
    *("Authorization: Bearer", "Authorization: \xff \xfe", "Cookie: a=b; ;=", "Range: bytes=0-", "If-None-Match: *"),
    *("no colon", ": no name", " folded", "a b: c", "X: " + "h" * 9000, "X\x00: 1", "X: \r 1", "Y" * 9000 + ": 1"),
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
