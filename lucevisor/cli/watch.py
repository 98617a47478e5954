"""A live view of a supervisor while a command waits for it; draws nothing unless standard error is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lucevisor.cli.admin_client import AdminClient
from lucevisor.errors import LucevisorError

if TYPE_CHECKING:
    from rich.live import Live

_LOOK_S = 0.2


class Watch:
    """``with Watch("start") as watch``, then `show` each status.  Draws on standard error if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Watch:
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
        """Whether anything is drawn."""
        return self._live is not None

    def show(self, status: dict[str, Any]) -> None:
        """Draw the groups that are not ready, and the time since the watch began."""
        if self._live is not None:
            from lucevisor.cli.status_view import wait_view

            view = wait_view(self._what, status["groups"], time.monotonic() - self._began)
            self._live.update(view, refresh=True)


def call_and_watch(
    client: AdminClient, what: str, target: str, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """POST to the supervisor and return its answer, which may take minutes; meanwhile show how it goes."""
    with Watch(what) as watch:
        if not watch.on:
            return client.call("POST", target, body, timeout_s)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.call, "POST", target, body, timeout_s)
            while not answer.done():
                with contextlib.suppress(LucevisorError):
                    watch.show(client.call("GET", "/status"))
                time.sleep(_LOOK_S)
            return answer.result()
