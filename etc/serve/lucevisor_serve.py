"""A Ray Serve application: whole Lucevisor services behind Ray's ingress, as many as the load needs.

`lucevisor serve-config` writes a copy of it beside its serve.yaml.  A replica of the deployment is an actor that runs
`lucevisor start` as its child, and passes requests on to it; Ray limits the GPUs that both see.  Needs `ray[serve]`,
and Lucevisor in the interpreter that the file names; neither imports the other.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import tempfile
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "trailer", "transfer-encoding", "upgrade"}


def end_with_parent() -> None:
    """Have the kernel end this process when its parent's thread ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@serve.deployment
class Lucevisor:
    """One service.  ``lucevisor``: the command, which runs with ``python_path``; ``start_s``: how long a start may
    take.
    """

    def __init__(
        self, lucevisor: list[str], python_path: str, config: str, overrides: list[str], start_s: float
    ) -> None:
        self._command, self._name = lucevisor, f"serve-{secrets.token_hex(4)}"
        self._directory = tempfile.TemporaryDirectory(prefix="lucevisor-")
        self._environment = os.environ | {"XDG_RUNTIME_DIR": self._directory.name, "PYTHONPATH": python_path}
        settings = [part for each in [*overrides, "server.host=127.0.0.1", "server.port=0"] for part in ("--set", each)]
        self._process = subprocess.Popen(
            [*lucevisor, "start", config, "--name", self._name, *settings],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        try:
            self._url = self._wait(start_s)
        except BaseException:
            self.__del__()
            raise
        self._session: aiohttp.ClientSession | None = None

    def _wait(self, start_s: float) -> str:
        """Return the address of the service when it is ready."""
        command = [*self._command, "status", "--json", "--name", self._name]
        for _ in range(max(1, round(start_s * 2))):
            if self._process.poll() is not None:
                raise RuntimeError(f"lucevisor start ended with {self._process.returncode}: see the log of this actor")
            answer = subprocess.run(command, env=self._environment, capture_output=True, check=False)
            if answer.returncode == 0 and (status := json.loads(answer.stdout))["state"] == "ready":
                return str(status["url"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        raise RuntimeError(f"lucevisor was not ready within {start_s:g} s; raise --start-s")

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        target = self._url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await self._session.request(
            request.method, target, headers=headers, data=await request.body(), allow_redirects=False
        )
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        return StreamingResponse(self._body(answer), status_code=answer.status, headers=kept)

    async def _body(self, answer: aiohttp.ClientResponse) -> Any:
        try:
            async for part in answer.content.iter_any():
                yield part
        finally:
            answer.close()  # a client that went away ends its request

    async def check_health(self) -> None:
        """Raise if the service is gone or serves nobody; Ray replaces this replica then."""
        if self._process.poll() is not None:
            raise RuntimeError(f"lucevisor ended with {self._process.returncode}")
        async with (
            asyncio.timeout(10),
            aiohttp.ClientSession() as session,
            session.get(f"{self._url}/health") as answer,
        ):
            answer.raise_for_status()

    def __del__(self) -> None:
        """Stop the service: it lets requests end for `server.drain_s`, and saves prefix slots."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        if self._process.poll() is None:
            self._process.kill()
        self._directory.cleanup()


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for the `args` of serve.yaml."""
    return Lucevisor.bind(**arguments)
