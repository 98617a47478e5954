"""A server on loopback that speaks what huggingface_hub asks of a hub to download a file.

``HEAD /owner/repo/resolve/REVISION/FILE`` answers with commit, checksum and size and leads to another host name, as the
hub does for large files; ``GET`` of that one serves bytes, ranges too, and may break off.  Written after what
huggingface_hub sends and reads, seen from outside.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 1 << 20


@dataclass
class Seen:
    """One request."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """``files``: what the repository ``me/model`` holds.  ``break_at``: for each coming GET of bytes after how many of
    them the connection is cut.  ``pause_s``: wait between pieces.  ``token``: refuse who does not bring it.
    """

    files: dict[str, bytes]
    token: str = ""
    gated: bool = False
    pause_s: float = 0.0
    break_at: list[int] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Hub:
        handler = type("Bound", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def gets(self) -> list[Seen]:
        """Requests for bytes, at the second host name."""
        return [s for s in self.seen if s.method == "GET" and s.path.startswith("/bytes/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        path = unquote(self.path)
        token = self.headers.get("Authorization")
        self.hub.seen.append(Seen(method, path, self.headers.get("Range"), token))
        if path.startswith("/bytes/"):
            self._bytes(self.hub.files[path.removeprefix("/bytes/")])
            return
        if path.startswith("/api/models/me/model/tree/"):
            self._list()
            return
        if "/resolve/" not in path:  # what else a hub can do is not needed to download
            self._refuse(404, "NotFound", f"{path}: not spoken here")
            return
        owner, repo, _, revision, *name = path.strip("/").split("/")
        assert revision in ("main", COMMIT)
        if self.hub.gated and token is None:
            self._refuse(403, "GatedRepo", "Access to model me/model is restricted.")
        elif (owner, repo) != ("me", "model") or (self.hub.token and token != f"Bearer {self.hub.token}"):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif "/".join(name) not in self.hub.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            content = self.hub.files["/".join(name)]
            self.send_response(302)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Location", f"http://localhost:{self.server.server_port}/bytes/{'/'.join(name)}")  # type: ignore[attr-defined]
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _list(self) -> None:
        files = self.hub.files.items()
        body = json.dumps(
            [{"type": "file", "path": n, "size": len(data), "oid": "0" * 40} for n, data in files]
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        if code == "EntryNotFound":
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _bytes(self, content: bytes) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = min(len(content), start + self.hub.break_at.pop(0)) if self.hub.break_at else len(content)
        for at in range(start, stop, PIECE):
            try:
                self.wfile.write(content[at : min(at + PIECE, stop)])
            except OSError:
                break  # the client was killed
            time.sleep(self.hub.pause_s)
        self.close_connection = True
