"""``hf:owner/repo/file`` against a hub on loopback, with the real huggingface_hub, in a process as a user starts it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from lucevisor.app.model_files import part_names
from tests.daemons.tiny_models import Tiny, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SENT_BYTES = 1 << 20


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
        for at in range(start, stop, SENT_BYTES):
            try:
                self.wfile.write(content[at : min(at + SENT_BYTES, stop)])
            except OSError:
                break  # the client was killed
            time.sleep(self.hub.pause_s)
        self.close_connection = True


PIECE = 10 << 20  # of huggingface_hub
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "COVERAGE_PROCESS_START")
QUICK = """
import sys, time
from pathlib import Path
from lucevisor.app.model_files import find_hub_file, resolve_file
from lucevisor.config import load
from lucevisor.errors import LucevisorError
time.sleep = lambda seconds: None  # huggingface_hub between its tries
code = 0
for argument in sys.argv[1:]:
    try:
        if argument.startswith("hf:"):
            print(find_hub_file(argument))
            continue
        config = load(Path(argument))
        notify = lambda what: print("fetching", what, file=sys.stderr)
        print(resolve_file(config, "model.path", config.model.source, notify))
    except LucevisorError as error:
        print(error, file=sys.stderr)
        code = int(error.exit_code)
sys.exit(code)
"""
"""Finds files and nothing else: a second sooner than the command."""


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    """A model of 2 MB with bytes behind it that nobody reads: huggingface_hub stores pieces of 10 MiB."""
    return write(tmp_path_factory.mktemp("hub") / "m.gguf", Tiny(), ["Q8_0"]).read_bytes() + bytes(range(256)) * 90000


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("split")
    write(folder / "s.gguf", Tiny(), ["Q8_0"], split=20)
    return {f"q8/{p.name}": p.read_bytes() + bytes(11 << 20) for p in sorted(folder.iterdir())}


class Box:
    """An empty cache, and a process that finds models: ``lucevisor plan``, or QUICK."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = folder / "hf" / "hub" / "models--me--model" / "blobs"

    def start(self, hub: Hub | str, *paths: str, plan: bool = False, **env: str) -> subprocess.Popen[str]:
        files = []
        for i, path in enumerate(paths or ["m.gguf"]):
            if not path.startswith("hf:"):
                config = self.folder / f"box{i}.toml"
                config.write_text(
                    f'[model]\npath = "hf:{path if path.count("/") > 1 else "me/model/" + path}"\n'
                    '[groups.left]\nbackend = "cpu"\n[placement]\ntarget_devices = ["left:0"]\n'
                )
                path = str(config)
            files.append(path)
        url = hub if isinstance(hub, str) else hub.url
        given = {k: os.environ[k] for k in KEPT if k in os.environ}
        given |= {"HF_ENDPOINT": url, "HF_HOME": str(self.folder / "hf"), "HOME": str(self.folder), **env}
        command = ["-m", "lucevisor", "plan", *files, "--no-probe"] if plan else ["-c", QUICK, *files]
        return subprocess.Popen(
            [sys.executable, *command], env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, hub: Hub | str, *paths: str, plan: bool = False, **env: str) -> tuple[int, str, str]:
        process = self.start(hub, *paths, plan=plan, **env)
        out, err = process.communicate(timeout=100)
        assert "Traceback" not in err, err
        return process.returncode, out, err


@pytest.fixture
def box(tmp_path) -> Box:
    return Box(tmp_path)


def test_a_file_is_fetched_once_and_found_without_the_hub_afterwards(box, content):
    with Hub({"m.gguf": content}) as hub:
        code, _, err = box.run(hub, HF_HUB_OFFLINE="1")
        assert code == 2
        assert "model.path" in err
        assert "is not in the cache" in err
        assert "unset HF_HUB_OFFLINE" in err
        assert hub.seen == []
        code, out, err = box.run(hub, plan=True)
        assert code == 0, err
        assert "qwen35, 4 layers" in out
        assert [line for line in err.splitlines() if "m.gguf" in line] == ["fetching me/model/m.gguf"]
        assert len(hub.gets()) == 1
        n = len(hub.seen)
        code, out, err = box.run(hub, HF_HUB_OFFLINE="1")
        assert (code, err) == (0, "")
        assert out.endswith("/m.gguf\n")
        assert len(hub.seen) == n
        url = hub.url
    assert box.run(url)[0] == 0  # the hub is gone: what is there is used
    (blob,) = box.blobs.iterdir()
    assert blob.read_bytes() == content


def test_a_cut_connection_is_taken_up_where_it_broke(box, content):
    cut = PIECE + 1_000_000
    with Hub({"m.gguf": content}, break_at=[cut]) as hub:
        code, _, err = box.run(hub)
        assert code == 0, err
        assert [s.range for s in hub.gets()] == [None, f"bytes={PIECE}-"]
    (blob,) = box.blobs.iterdir()
    assert blob.read_bytes() == content


def test_a_hub_that_is_not_there_is_named(box):
    code, _, err = box.run("http://127.0.0.1:9")
    assert code == 2
    assert "m.gguf cannot be fetched: ConnectError" in err
    assert "HF_ENDPOINT" in err


def test_what_the_hub_does_not_have(box, content):
    with Hub({"m.gguf": content}) as hub:
        code, _, err = box.run(hub, "absent.gguf", "you/other/m.gguf")
    assert code == 2
    assert "the repository me/model has no file absent.gguf" in err
    assert "the hub has no repository you/other, or does not show it to you" in err


def test_a_private_repository_needs_the_token_and_only_the_hub_gets_it(box, content):
    with Hub({"m.gguf": content}, token="secret") as hub:
        code, _, err = box.run(hub)
        assert code == 2
        assert "set HF_TOKEN if it is private" in err
        code, _, err = box.run(hub, HF_TOKEN="secret")
        assert code == 0, err
        assert "secret" not in err
        assert [s.token for s in hub.gets()] == [None]


def test_a_gated_repository_says_so(box, content):
    with Hub({"m.gguf": content}, gated=True) as hub:
        code, _, err = box.run(hub)
    assert code == 2
    assert "the repository me/model is gated; accept its terms" in err


def test_all_parts_of_a_split_file_come_and_only_missing_ones_later(box, parts):
    names = list(parts)
    assert len(names) > 2
    assert part_names(names[0]) == names
    with Hub(parts, break_at=[10**9, PIECE, 0, 0, 0, 0, 0, 0]) as hub:
        process = box.start(hub, names[0])
        deadline = time.monotonic() + 100
        while len(hub.gets()) < 3:  # the second part breaks off for good
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.communicate()
        hub.break_at = []
        before = len(hub.gets())
        code, out, err = box.run(hub, names[1])  # any part leads to all
        assert code == 0, err
        assert out.endswith(f"/{names[0]}\n")
        later = hub.gets()[before:]
        assert [s.path.removeprefix("/bytes/") for s in later] == names[1:]


def test_a_quantisation_is_found_in_a_repository(box):
    files = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"]
    files += [f"q2/m-Q2_K-0000{i}-of-00002.gguf" for i in (1, 2)]
    asked = ["hf:me/model", "hf:me/model:q8_0", "hf:me/model:Q2_K", "hf:me/model/other.gguf"]
    with Hub(dict.fromkeys(files, b"")) as hub:
        _, out, err = box.run(hub, *asked, "hf:me/model:Q6_K", "hf:me/none")
    assert out.splitlines() == [
        f"hf:me/model/{name}"
        for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "q2/m-Q2_K-00001-of-00002.gguf", "other.gguf")
    ]
    assert "no GGUF file with 'Q6_K' in its name; it has m-Q4_K_M.gguf, m-Q8_0.gguf, q2/" in err
    assert "the files of me/none cannot be listed" in err
