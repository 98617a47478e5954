"""Client of a running supervisor's admin socket, with a live view while it waits: cheap to import."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lucevisor.app.rundir import MAX_SOCKET_BYTES, read_pid
from lucevisor.errors import AdminError, LucevisorError, NotRunningError

if TYPE_CHECKING:
    from rich.live import Live


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        if len(os.fsencode(self._path)) > MAX_SOCKET_BYTES:
            raise LucevisorError(f"{self._path}: too long for a socket, which has {MAX_SOCKET_BYTES} bytes at most")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class AdminClient:
    """Calls raise NotRunningError, or LucevisorError with the supervisor's message."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def call(
        self, method: str, target: str, body: dict[str, Any] | None = None, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        connection = _UnixConnection(self._path, timeout_s)
        try:
            connection.request(method, target, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError:
            raise LucevisorError(
                f"{self._path}: no answer within {timeout_s:.0f} s; the supervisor is stuck, see its log"
            ) from None
        except (ConnectionError, FileNotFoundError, NotADirectoryError, http.client.HTTPException) as e:
            raise self._no_answer(e) from e
        finally:
            connection.close()
        answer = json.loads(raw)
        if response.status == 400:
            raise AdminError(str(answer.get("error", answer)))
        if response.status != 200:
            raise LucevisorError(str(answer.get("error", answer)))
        return dict(answer)

    def _no_answer(self, error: Exception) -> NotRunningError:
        if isinstance(error, FileNotFoundError) and (pid := read_pid(self._path.parent)) > 0:
            return NotRunningError(f"{self._path}: was removed, but the supervisor still runs: `kill {pid}` stops it")
        return NotRunningError(f"{self._path}: no answer ({error}); the supervisor is gone")


class WaitDisplay:
    """``with Watch("start") as watch``, then `show` each status.  Draws on standard error if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> WaitDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def on(self) -> bool:
        return self._live is not None

    def show(self, status: dict[str, Any]) -> None:
        if self._live is not None:
            from lucevisor.cli.status_view import wait_view

            view = wait_view(self._what, status["groups"], time.monotonic() - self._began)
            self._live.update(view, refresh=True)


def call_and_watch(
    client: AdminClient, what: str, target: str, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """POST to the supervisor and return its answer, which may take minutes; meanwhile show how it goes."""
    with WaitDisplay(what) as watch:
        if not watch.on:
            return client.call("POST", target, body, timeout_s)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.call, "POST", target, body, timeout_s)
            while not answer.done():
                with contextlib.suppress(LucevisorError):
                    watch.show(client.call("GET", "/status"))
                time.sleep(0.2)
            return answer.result()
