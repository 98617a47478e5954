"""Requests over plain sockets."""

from __future__ import annotations

import json
import socket

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def raw_post(client, body):
    """Send a request on a socket of small buffers and leave it open; the caller reads or closes it."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(head(len(data)) + data)
    return sock


def head(n_bytes):
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {n_bytes}\r\n\r\n"
    ).encode()
