"""Progress of a start in the foreground: a live view on a terminal, log records elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import structlog

from lucevisor.app import logs
from lucevisor.app.status import LoadProgress
from lucevisor.config import Config
from lucevisor.supervision.events import State

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from lucevisor.deployment.service import ModelService, Service
    from lucevisor.protocol.messages import Progress

_COMING = frozenset({State.STARTING, State.LOADING, State.BACKOFF})
_ENDING = frozenset({State.STOPPING, State.STOPPED, State.FAILED})
_QUARTERS = 4

log = structlog.get_logger("lucevisor.cli")


class StartDisplay(LoadProgress):
    """Observer of a service that shows its start; a context manager for the live view."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._quarters: dict[tuple[str, int, int, int], int] = {}
        self._url = ""
        self._announced = self._away = False
        self._began = time.monotonic()
        self._console: Console | None = None  # one for all views: the log writes through it
        self._live: Live | None = None

    def __enter__(self) -> StartDisplay:
        if sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True)
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._console = None

    def listening(self, url: str) -> None:
        self._url = url

    def state(self, group: str, state: State, reason: str) -> None:
        super().state(group, state, reason)
        if state in _ENDING:
            self._end()
        elif state in _COMING and self._announced:
            if not self._away:
                self._away = True
                self._began = time.monotonic()
            self._begin()

    def progress(self, group: str, progress: Progress) -> None:
        super().progress(group, progress)
        if self._console is not None or not progress.total_bytes:
            return
        key = (group, progress.model, progress.stage, progress.device)
        quarters = _QUARTERS * progress.done_bytes // progress.total_bytes
        if quarters > self._quarters.get(key, 0):
            self._quarters[key] = quarters
            percent = 100 * quarters // _QUARTERS
            device = f"{group}:{progress.device}"
            log.info("loading", group=group, device=device, phase=progress.phase, percent=percent,
                     bytes=progress.total_bytes)  # fmt: skip

    def ready(self, service: Service) -> None:
        if not self.announces:
            return
        self._end()
        self._quarters.clear()
        seconds = time.monotonic() - self._began
        if self._announced and self._away:
            self._echo(f"ready again after {seconds:.1f} s")
        elif not self._announced:
            self._announced = True
            for model in service.models.values():
                self._ready_model(model, seconds)
            name = next(iter(service.models)) if len(service.models) > 1 and service.replicated is None else ""
            for warning in self._warnings(service):
                self._echo(warning)
            for line in first_request(self._url, keys=bool(self._config.server.api_keys_file), model=name):
                self._echo(line)
        self._away = False

    def _ready_model(self, service: ModelService, seconds: float) -> None:
        if service.placement is None or service.state != "ready":
            self._echo(f"replica {service.replica} follows: {service.reason()}")
            return
        devices = ", ".join(f"{d.device} layers {d.layers}" for d in service.placement.devices)
        if self._console is None:
            log.info("ready", model=service.name, url=self._url, devices=devices, seconds=round(seconds, 3))
        self._echo(f"ready after {seconds:.1f} s: {service.name} ({service.model.spec.quant}) over {devices}")

    def _warnings(self, service: Service) -> list[str]:
        loads = ((name, loaded) for name, group in service.groups.items() for loaded in group.loads)
        return [f"group {name} is slow: {warning}" for name, loaded in loads for warning in loaded.warnings]

    def _echo(self, line: str) -> None:
        if self._console is not None:
            logs.print_line(line)

    def _begin(self) -> None:
        if self._console is not None and self._live is None:
            from rich.live import Live

            self._live = Live(get_renderable=self._view, console=self._console, transient=True, redirect_stdout=False)
            with contextlib.suppress(OSError):  # the terminal was closed
                self._live.start()

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                live.refresh()  # empty now: a record that is written while it stops finds an empty line
            with contextlib.suppress(OSError):
                live.stop()

    def _view(self) -> RenderableType:
        """Return what is to be drawn; called by the view's own thread."""
        from rich.text import Text

        from lucevisor.cli.status_view import wait_view

        if self._live is None:
            return Text()
        return wait_view("restart" if self._announced else "start", self.groups(), time.monotonic() - self._began)


def first_request(url: str, *, keys: bool, model: str = "") -> list[str]:
    """Return the address, and a curl command in lines that fit 80 columns.  ``model``: one of several."""
    lines = [f"open {url} in a browser, or ask:", f"curl {url}/v1/chat/completions \\"]
    if keys:
        lines.append("  -H 'authorization: Bearer KEY' \\")
    content = '"messages": [{"role": "user", "content": "What does os.path.join do?"}]'
    name = f'       "model": "{model}", ' if model else "       "
    return [*lines, "  -H 'content-type: application/json' \\", f"  -d '{{{content},", f'{name}"temperature": 0}}\'']
