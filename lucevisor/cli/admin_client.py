"""Client of a running supervisor's admin socket: HTTP from the standard library, cheap to import."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from lucevisor.app.rundir import MAX_SOCKET_BYTES, read_pid
from lucevisor.errors import AdminError, LucevisorError, NotRunningError


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
    """Calls raise NotRunningError if nothing listens, LucevisorError with the supervisor's message if it refuses, and
    of these AdminError if what was asked for is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def call(
        self, method: str, target: str, body: dict[str, Any] | None = None, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """Send one request; return the JSON response."""
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
            return NotRunningError(f"{self._path}: was removed; the supervisor runs on: `kill {pid}` stops it")
        return NotRunningError(f"{self._path}: no answer ({error}); the supervisor is gone")
